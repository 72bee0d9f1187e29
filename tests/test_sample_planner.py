"""The layout of a sampler that its user leaves open: estimates against simulated programs of all layouts."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from cost_models.devices import device
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import EXACT, How, SamplePlan
from fxpipe.sampler import Sampler
from fxpipe.sampling import bounds
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.candidates import Setting
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import ranked, ways
from fxpipe.sampling.columns import Columns
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.paced import _booked
from fxpipe.sampling.planning import SampleRequest, chosen, planned

DEVICE = replace(device("A100-80GB"), peak_flops=1e9, bandwidth=1e10, launch_seconds=1e-6, ramp_seconds=1e-6)
A100 = device("A100-80GB")
STEPS, CLUSTER = 6, "4x1xA100+Ethernet-100"
X, TEXT = torch.randn(2, 3, 16, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)


class UNet(nn.Module):
    """Halos, moments, keys and values of the image and of text, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.qkv = nn.GroupNorm(4, 16), nn.Linear(16, 48)
        self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 16)
        self.up, self.last = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        first = self.first(x)
        h = self.norm(self.down(first.tanh()))
        tokens = h.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        tokens = tokens + nn.functional.scaled_dot_product_attention(q, k, v)
        tokens = tokens + nn.functional.scaled_dot_product_attention(tokens, self.k(text), self.v(text))
        h = nn.functional.interpolate(tokens.transpose(1, 2).reshape(h.shape), scale_factor=2.0)
        return self.last(self.up(torch.cat([first, h], 1)).tanh())


class DiT(nn.Module):
    """Patches of the image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Conv2d(3, 16, 2, 2), nn.ConvTranspose2d(16, 3, 2, 2)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        h = self.embed(x)
        tokens = h.flatten(2).transpose(1, 2) + text.mean((1, 2))[:, None, None]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            tokens = tokens + nn.functional.scaled_dot_product_attention(*qkv(tokens).chunk(3, -1))
            tokens = tokens + mlp(tokens)
        return self.out(tokens.transpose(1, 2).reshape(h.shape))


MODELS: dict[str, type[nn.Module]] = {"U-Net": UNet, "DiT": DiT}


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def compiled(name: str, world_size: int = 4, **how: Any) -> Sampler:
    given = {"cost_model": DEVICE, "cluster": CLUSTER, "steps": STEPS, "warmup": 1, **how}
    given = {"example": {"x": X, "text": TEXT}, **given}
    return fxpipe.compile_sampler(model(name), world_size, sample={"x": 2}, **given)


@pytest.mark.parametrize("name", MODELS)
def test_estimates_are_what_is_simulated(name: str) -> None:
    made = compiled(name, mode="displaced")
    found = ranked(*asked(made)).candidates
    told = [one for one in found if one.found and one.request.copies == 1 and not one.request.fold]
    assert len(told) >= 7
    for one in told[::2]:
        assert one.found is not None
        way = one.request
        how = {"cfg": way.cfg, "stages": way.stages, "patches": way.patches, "mode": way.how.mode, "fold": way.fold}
        timeline = compiled(name, **how).simulate(STEPS)
        assert one.found.seconds == pytest.approx(timeline.makespan_seconds, rel=0.1), str(one)
        assert one.found.memory_bytes == pytest.approx(max(timeline.peak_bytes), rel=0.3), str(one)
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.05)
    assert made.verify().ok
    assert SamplePlan.parse(str(made.plan)) == made.plan == SamplePlan.from_dict(made.plan.as_dict())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bounds", [(0, 1, 8), (0, 7, 8)])
def test_estimates_of_stages_see_every_patch_of_uneven_bounds(name: str, bounds: tuple[int, ...]) -> None:
    made = compiled(name, stages=2, cfg=1, patches=bounds)
    timeline, told = made.simulate(STEPS), made.plan.expects
    assert told is not None
    assert told.seconds == pytest.approx(timeline.makespan_seconds, rel=0.1)
    assert told.memory_bytes == pytest.approx(max(timeline.peak_bytes), rel=0.1)


@pytest.mark.parametrize("patches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_patch_goes_on_when_all_its_samples_are_predicted(name: str, patches: int) -> None:
    """Where there is a single one, so does a step."""
    made = compiled(name, 2 * patches, stages=2, cfg=1, patches=patches, mode="displaced")
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.06)


@pytest.mark.parametrize(("how", "samples"), [({"cfg": 2, "stages": 2}, 2), ({"cfg": 3, "patches": 2}, 4)])
def test_every_rank_of_a_group_is_told_what_others_predict(how: dict[str, Any], samples: int) -> None:
    """Over one bus between nodes of a group each."""
    ranks, given = 2 * how["cfg"], {"x": X.repeat(2, 1, 1, 1)[:samples], "text": TEXT.repeat(2, 1, 1)[:samples]}
    levels = Level(2, Link("inside", 1e10, 1e-5)), Level(3, Link("bus", 1e7, 1e-5, duplex=False, shared=True))
    made = compiled("DiT", ranks, example=given, cluster=Cluster("A100-80GB", levels), **how)
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.03)


def test_patches_in_turn_may_be_of_any_number() -> None:
    """Here latency takes a third of a step: four follow each other too slowly, of two each ends too late."""
    wire = Cluster("A100-80GB", (Level(4, Link("slow", 1e9, 3e-4)),))
    case, request, setting = asked(compiled("DiT", mode="displaced"))
    found = ranked(case, request, replace(setting, cluster=wire, steps=20))
    seconds = {one.request.patches: one.seconds for one in found.candidates if one.request.cfg == 2 and one.found}
    assert found.best.request.patches == 3
    assert 1.05 * seconds[3] < min(seconds[2], seconds[4])


def asked(made: Sampler) -> tuple[SampleCase, SampleRequest, Setting]:
    """What was to be chosen, of the example's call."""
    lowering: Any = made.denoiser.lowering
    return lowering.case(made.step.traced, 2), lowering.request, lowering.setting


def test_moments_count_as_what_is_sent_of_them() -> None:
    """Not as what they are moments of."""
    case, *_ = asked(compiled("U-Net"))
    moments = [one for item in case.work(2, (0, 4, 8), 0, False).items if (one := item.told) and one.kind == "moments"]
    assert moments
    assert all({size for *_, size in one.sent} == {one.own_bytes} for one in moments)


def every_layout(case: SampleCase, world_size: int, how: How, setting: Setting) -> dict[SampleRequest, float]:
    """Seconds of all ways to use up to so many ranks, by trying all numbers."""
    found, every = dict[SampleRequest, float](), range(1, world_size + 1)
    for cfg, stages, patches, copies in product(every, [None, *every], [*every, *range(8, 20, 4)], every):
        for way, fold in product({EXACT, how}, (False, True)):
            request = SampleRequest(world_size, cfg, stages, fold if stages else None, patches, way, copies=copies)
            beside = world_size // (cfg * (stages or 1) * copies) if request.in_turn else patches
            is_way = cfg * (stages or 1) * beside * copies == world_size and stages != 1
            turns = [beside * times * stages for times in (1, 2, 4)] if stages else every[1:]
            is_way = is_way and (way == EXACT or patches in turns)
            if is_way:
                with suppress(CompileError):
                    made = with_attention(case, chosen(case, request), "auto", setting.cluster)
                    found[request] = estimate(case, made, setting.cluster, setting.steps).seconds
    return found


@pytest.mark.parametrize("mode", ["exact", "displaced"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world_size", "link"), [(2, "Ethernet-10"), (3, "EFA-400"), (4, "Ethernet-100")])
def test_the_choice_is_that_of_trying_all(name: str, mode: str, world_size: int, link: str) -> None:
    case, request, setting = asked(compiled(name, mode=mode))
    how = replace(request.how, advance=False)
    request = replace(request, world_size=world_size, how=how)
    setting = replace(setting, cluster=Cluster.parse(f"{world_size}x1xA100+{link}"), steps=12)
    one, seconds = ranked(case, request, setting).best, every_layout(case, world_size, how, setting)
    exact = min(s for way, s in seconds.items() if way.how == EXACT)
    wins = exact <= 1.05 * min(seconds.values())
    assert one.is_exact == wins
    assert one.seconds <= 1.01 * (exact if wins else min(seconds.values()))
    assert seconds[replace(one.request, fold=bool(one.request.fold) if one.request.stages else None)] == one.seconds


class Wide(nn.Module):
    """Little work, and a prediction that is most of what travels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 512)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh().sin())  # type: ignore[no-any-return]


def require_bounds(case: SampleCase, request: SampleRequest, cluster: str, setting: Setting) -> set[tuple[int, int]]:
    """What a layout takes at least is no more than what it takes; ranks beside each other and turns of all layouts."""
    setting, found = replace(setting, cluster=Cluster.parse(cluster)), set[tuple[int, int]]()
    for way in ways(case, request, setting):
        with suppress(CompileError):
            made = with_attention(case, chosen(case, way), "auto", setting.cluster)
            for steps in (1, 7):
                most = estimate(case, made, setting.cluster, steps).seconds * (1 + 1e-9)
                assert bounds.least_seconds(case, way, steps) <= most, way
                assert bounds.least_seconds_of_work(case, way, setting.cluster, steps) <= most, way
            found.add((made.grid.patches, made.grid.turns))
    return found


@pytest.mark.parametrize("cluster", ["4xA100", "4xL40-PCIe", "4x1xA100+Ethernet-10"])
def test_bounds_are_no_more_than_estimates(cluster: str) -> None:
    for name in MODELS:
        case, request, setting = asked(compiled(name, mode="displaced"))
        for on in (DEVICE, A100):
            beside = require_bounds(SampleCase(case.traced, 2, on), request, cluster, setting)
            assert any(patches > 1 < turns for patches, turns in beside)
    example = {"x": torch.zeros(1, 64, 8).double(), "text": TEXT[:1]}
    wide = fxpipe.compile_sampler(Wide().double(), 4, example=example, sample={"x": 1}, mode="displaced", warmup=1)
    case, request, setting = asked(wide)
    assert any(patches > 1 < turns for patches, turns in require_bounds(case.of(1), request, cluster, setting))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", [DEVICE, A100])
def test_few_steps_are_no_slower_than_on_one_device_and_exact(name: str, device: Any) -> None:
    case, request, setting = asked(compiled(name, mode="displaced"))
    case = SampleCase(case.traced, 2, device)
    for steps in range(1, 9):
        for warmup in (1, 4):
            how = replace(request.how, warmup=warmup)
            found = ranked(case, replace(request, how=how), replace(setting, steps=steps))
            notes = " ".join(found.notes(case, found.best))
            assert found.best.seconds <= found.alone_seconds
            assert (found.best.request.copies > 1) == ("predicted to be" in notes)
            if steps <= warmup + 4:
                assert found.best.is_exact
                assert "all are exact" in notes
            else:
                assert "exact" not in notes
    slow = compiled(name, cost_model=A100, steps=4, mode="displaced")
    assert slow.plan.copies == 4
    assert slow.verify().ok
    assert SamplePlan.parse(str(slow.plan)) == slow.plan == SamplePlan.from_dict(slow.plan.as_dict())


def test_copies_of_layouts_with_messages_are_exact() -> None:
    made = compiled("U-Net", 6, cluster="6x1xA100+Ethernet-10", cfg=1, patches=6)
    case, request, _ = asked(made)
    of_two = chosen(case, replace(request, patches=2, copies=3))
    plan, _ = planned(case, of_two, made.plan.cluster, made.plan.cost_model)
    again = compiled("U-Net", 6, plan=plan, cluster=None)
    assert (again.plan.copies, again.grid.world_size, again.verify().ok) == (3, 6, True)
    assert SamplePlan.parse(str(again.plan)) == again.plan


def test_throughput_is_that_of_joined_requests() -> None:
    one, many = (compiled("DiT", objective=objective) for objective in ("latency", "throughput"))
    assert many.requests > one.requests == 1
    assert one.plan.expects is not None
    assert many.plan.expects is not None
    assert many.plan.expects.seconds / many.requests < one.plan.expects.seconds
    assert many.plan.num_samples == 2 * many.requests
    assert many.plan.expects.seconds == pytest.approx(many.simulate(STEPS).makespan_seconds, rel=0.05)
    assert many.verify().ok
    assert SamplePlan.parse(str(many.plan)) == many.plan
    again = compiled("DiT", plan=many.plan)
    assert (again.plan, again.requests, again.step.batch_size) == (many.plan, many.requests, many.step.batch_size)
    assert compiled("DiT", plan=many.plan, example=again.example[1]).plan == many.plan


def test_what_is_given_is_kept_and_few_steps_are_exact() -> None:
    made = compiled("DiT", stages=2)
    assert (made.grid.stages, made.plan.how.mode) == (2, "exact")
    assert compiled("DiT", mode="displaced", patches=2, steps=4).plan.how.mode == "displaced"
    assert compiled("DiT", mode="displaced", steps=5).plan.how.mode == "exact"
    assert compiled("U-Net", mode="displaced").plan.how.mode == "displaced"


def test_one_stage_is_none() -> None:
    how = {"cfg": 1, "patches": 2, "mode": "displaced", "warmup": 2}
    assert compiled("U-Net", 2, stages=1, **how).plan == compiled("U-Net", 2, **how).plan


def test_memory_decides() -> None:
    made = compiled("DiT")
    assert made.plan.expects is not None
    least = min(compiled("DiT", stages=s).plan.expects.memory_bytes for s in (1, 2, 4))  # type: ignore[union-attr]
    tight = compiled("DiT", memory_limit=least).plan
    assert tight.expects is not None
    assert tight.expects.memory_bytes == least < made.plan.expects.memory_bytes
    assert any("needs more than" in line for line in tight.considered)
    with pytest.raises(CompileError, match=r"no layout fits into memory_limit=1.0 KiB per rank: the least, .* needs"):
        compiled("DiT", memory_limit="1KiB")


def test_nothing_is_timed_of_stages_where_none_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case, request, setting = asked(compiled("DiT", mode="displaced"))
    roomy = ranked(case, request, replace(setting, limit_bytes=1 << 40))
    tight = replace(setting, limit_bytes=min(one.found.memory_bytes for one in roomy.candidates if one.found))
    assert all(one.found.seconds < inf for one in ranked(case, request, tight).candidates if one.found)
    monkeypatch.setattr(Columns, "estimate", None)
    with pytest.raises(CompileError, match=r"no layout fits into memory_limit=1.0 KiB per rank"):
        ranked(case, request, replace(setting, limit_bytes=1024))


def test_more_ranks_than_are_of_use_are_told() -> None:
    slow = compiled("DiT", patches=4, cost_model="A100-80GB")
    assert "4 ranks are predicted to be no faster than one" in slow.notes


@pytest.mark.parametrize("mode", ["exact", "displaced"])
@pytest.mark.parametrize("name", MODELS)
def test_another_size_is_planned_by_what_was_near_the_best(name: str, mode: str) -> None:
    made = compiled(name, mode=mode, sizes="any")
    case, request, setting = asked(made)
    lowering: Any = made.denoiser.lowering
    assert not ranked(case, request, setting).narrowed
    batch, channels, height, width = X.shape
    for wider, near in ((width + width // 2, True), (4 * width, False)):
        call = {"x": torch.zeros(batch, channels, height, wider, dtype=X.dtype), "text": TEXT}
        other = SampleCase(lowering.tracing.resized(case.traced, (), call), 2, case.cost_model)
        found, anew = ranked(other, request, setting), ranked(other, request, setting, anew=True)
        assert (found.narrowed, anew.narrowed) == (near, False)
        assert found.best.made == anew.best.made
        assert found.best.seconds == anew.best.seconds
        if near:
            assert any(one.why.startswith("at another size") for one in found.candidates)
            assert sum(bool(one.found) for one in found.candidates) <= sum(bool(one.found) for one in anew.candidates)


def test_all_is_looked_at_where_what_was_near_the_best_does_not_fit() -> None:
    made = compiled("DiT", 8, mode="displaced", cluster="2x4xL40-PCIe", sizes="any")
    case, request, setting = asked(made)
    lowering: Any = made.denoiser.lowering
    call = {"x": torch.zeros(*X.shape[:3], X.shape[3] + 2, dtype=X.dtype), "text": TEXT}
    other = SampleCase(lowering.tracing.resized(case.traced, (), call), 2, case.cost_model)
    sizes = {one.found.memory_bytes for one in ranked(other, request, setting, anew=True).candidates if one.found}
    narrowed = set[bool]()
    for size in sorted(sizes):
        tight = replace(setting, limit_bytes=size - 1)
        ranked(case, request, tight)
        found, anew = ranked(other, request, tight), ranked(other, request, tight, anew=True)
        assert found.best.made == anew.best.made
        narrowed.add(found.narrowed)
    assert narrowed == {True, False}


def test_patches_that_another_size_has_no_units_for_are_looked_at() -> None:
    """8 units on 2 ranks beside each other are up to 8 patches in turn, 10 are up to 10."""
    made = compiled("DiT", mode="displaced", stages=2, cfg=1, sizes="any")
    case, request, setting = asked(made)
    lowering: Any = made.denoiser.lowering
    call = {"x": torch.zeros(2, 3, 20, 8, dtype=X.dtype), "text": TEXT}
    other = SampleCase(lowering.tracing.resized(case.traced, (), call), 2, case.cost_model)
    found, anew = ranked(other, request, setting), ranked(other, request, setting, anew=True)
    assert found.narrowed
    assert {one.request.num_patches for one in found.candidates} == {4, 6, 8, 10}  # 6 lie between
    assert found.best.made == anew.best.made


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=30))
def test_a_message_has_the_bus_in_the_first_span_that_is_free(messages: list[tuple[int, int]]) -> None:
    bus, taken = list[tuple[float, float]](), set[int]()
    for begin, seconds in messages:
        free = next(at for at in range(begin, 200) if taken.isdisjoint(range(at, at + seconds)))
        assert _booked(bus, begin, seconds) == free + seconds
        taken |= {*range(free, free + seconds)}
    assert sum(stop - start for start, stop in bus) == len(taken)
    assert bus == sorted(bus)
