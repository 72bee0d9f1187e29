"""Exchanges that stay fresh in displaced steps: none, all, and those that a call's measurement picks; and quality."""

import gc
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.run.sampling import BoundProgram
from fxpipe.sampler import Sampler
from fxpipe.sampling import calibration
from fxpipe.sampling.quality import psnr, values_of
from tests.distributed import run_processes
from tests.tiny_pipelines import tiny

STEPS = 7
SLOW = """
device = "A100-80GB"
[[level]]
size = 2
bandwidth_bytes_per_second = 1e9
latency_seconds = 5e-4
"""
SOME = 0.4  # of a step's time: for some exchanges, not for all


class Small(nn.Module):
    """A U-Net's kinds of exchanges: halos (none of what inputs say, which all have whole), moments, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm, self.heads, self.mix = nn.GroupNorm(2, 4), nn.Linear(4, 12), nn.Linear(2, 2)

    def forward(self, sample: Tensor, time: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.mix(sample.movedim(1, -1)).movedim(-1, 1))) * (1 + time.reshape(-1, 1, 1, 1))
        q, k, v = self.heads(hidden.flatten(2).mT).unflatten(-1, (3, 4)).unbind(2)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return self.last(hidden + attended.mT.unflatten(2, hidden.shape[2:]))  # type: ignore[no-any-return]


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().double()


def noise() -> Tensor:
    return torch.randn(2, 2, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loop(predict: Callable[..., Tensor], steps: int = STEPS) -> Tensor:
    sample = noise()
    with torch.no_grad():
        for step in range(steps):
            time = torch.tensor([1 - step / steps], dtype=torch.float64)
            sample = sample - 0.2 * predict(sample=sample, time=time)
    return sample


def compiled(**how: Any) -> Sampler:
    example = {"sample": noise(), "time": torch.ones(1).double()}
    return fxpipe.compile_sampler(
        model(), 2, example=example, sample={"sample": 2}, cluster=SLOW,
        **{"cfg": 1, "patches": 2, "mode": "displaced", "warmup": 1, "advance": False, "attention": "gather"} | how,
    )  # fmt: skip


def sampled(sampler: Sampler) -> Tensor:
    with sampler.call():
        return loop(sampler.predict)


def loop_in_place(predict: Callable[..., Tensor]) -> Tensor:
    """The same, which writes into the tensor that it hands over."""
    handed = noise()
    return loop(lambda sample, time: predict(sample=handed.copy_(sample), time=time))


@cache
def plain() -> Tensor:
    return sampled(compiled())


def test_all_fresh_is_exact_mode_and_none_is_as_before() -> None:
    sampler, wanted = compiled(), loop(model())
    assert sampler.calibrate(loop, 0).fresh == () == sampler.plan.how.fresh
    assert torch.equal(sampled(sampler), plain())
    assert compiled(advance=None).plan == compiled(advance=True).plan  # left out
    found = sampler.calibrate(loop, math.inf)
    assert {name.split()[0] for name in found.fresh} == {"halo", "moments", "gather"}
    assert len(found.fresh) == len(found.exchanges) == 5
    assert torch.equal(sampled(sampler), sampled(compiled(mode="exact")))
    assert psnr(sampled(sampler), wanted) > 250 > 100 > psnr(plain(), wanted)


def test_what_changes_much_for_its_time_is_fresh_and_nearer(tmp_path: Path) -> None:
    sampler, wanted = compiled(), loop(model())
    all_of_it = sampler.calibrate(loop, math.inf)
    found = sampler.calibrate(loop, SOME)
    worth = [one.change / one.seconds for one in found.exchanges]
    assert worth == sorted(worth, reverse=True)
    assert 0 < len(found.fresh) < len(found.exchanges)
    assert found.exchanges[0].fresh
    assert found.before_seconds < found.after_seconds < found.exact_seconds
    assert [(one.name, one.change) for one in found.exchanges] == [(o.name, o.change) for o in all_of_it.exchanges]
    between = sampled(sampler)
    assert psnr(plain(), wanted) < psnr(between, wanted) < 200
    assert torch.equal(sampled(sampler), between)  # a second call is the first
    assert sampler.verify().ok
    assert found.note in sampler.plan.notes
    # the plan says so, in every form of it, and what it says is done
    assert f"kept fresh: {', '.join(sampler.plan.how.fresh)}\n" in str(sampler.plan)
    assert set(sampler.plan.how.fresh) == set(found.fresh)
    assert (
        SamplePlan.parse(str(sampler.plan)) == sampler.plan == SamplePlan.load(sampler.plan.save(tmp_path / "p.json"))
    )
    again = compiled(plan=tmp_path / "p.json")
    assert torch.equal(sampled(again), between)
    assert "kept fresh" not in str(again.denoiser.step((), {"sample": noise()[:, :, :8], "time": torch.ones(1)}).plan)


def test_no_step_is_longer_than_an_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be both faster and nearer."""
    seconds = calibration._steady_seconds

    def steady(spread: Any, step: Any, cluster: Any, warmup: int = 1) -> float:
        return seconds(spread, step, cluster, warmup) * (0.8 if warmup > 1 else 1.0)

    monkeypatch.setattr(calibration, "_steady_seconds", steady)
    found = compiled().calibrate(loop, math.inf)
    assert len(found.fresh) < len(found.exchanges)
    assert found.after_seconds <= max(found.before_seconds, found.exact_seconds)


def test_changes_are_what_a_run_by_hand_has() -> None:
    seen: list[Tensor] = []
    hook = model().first.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    loop(model())
    hook.remove()
    changes = [float((b - a).norm() / b.norm()) for a, b in pairwise(seen)]
    found = {one.name: one.change for one in compiled(warmup=3).calibrate(loop).exchanges}
    assert found["halo conv2d"] == pytest.approx(sum(changes[2:]) / len(changes[2:]), rel=1e-12)
    in_place = compiled(warmup=3).calibrate(loop_in_place).exchanges
    assert {one.name: one.change for one in in_place} == pytest.approx(found, rel=1e-9)


def edited(text: str) -> SamplePlan:
    plan = compiled().plan
    return replace(plan, how=replace(plan.how, fresh=(text,)))


def of_two_kinds(predict: Callable[..., Tensor]) -> None:
    for count in (2, 1):
        predict(sample=noise()[:count], time=torch.ones(1).double())


def of_nothing(predict: Callable[..., Tensor]) -> Tensor:
    return loop(lambda sample, time: predict(sample=sample * math.nan, time=time))


def of_outside(draw: torch.Generator) -> Callable[..., Tensor]:
    def run(predict: Callable[..., Tensor]) -> Tensor:
        return predict(sample=torch.randn(2, 2, 12, 5, generator=draw).double(), time=torch.ones(1).double())

    return run


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "exact": (lambda: compiled(mode="exact").calibrate(loop), "the plan has all exchanges fresh: no exchange of it"),
    "in turn": (lambda: compiled(stages=2, patches=2).calibrate(loop), "the plan has patches in turn, of which"),
    "one step": (lambda: compiled().calibrate(lambda predict: loop(predict, 1)), "a call of one step"),
    "slower": (lambda: compiled().calibrate(loop, -0.1), "slower=-0.1 is a share of a step's time"),
    "no samples": (lambda: compiled().predict(noise()[:0], torch.ones(1).double()), "the call has no samples"),
    "no call": (lambda: compiled().measure(3), "call is a int; give a pipeline's arguments, or a function"),  # type: ignore[arg-type]
    "no pipeline": (lambda: compiled().calibrate({"prompt": "a"}), "Small is no pipeline"),
    "two kinds": (lambda: compiled().calibrate(of_two_kinds), "steps of several kinds"),
    "no exchange": (lambda: compiled(plan=edited("halo conv2d_9")), "'halo conv2d_9' is to be kept fresh, but patches"),
    "no numbers": (lambda: compiled().calibrate(of_nothing), "values that are no finite numbers, whose change"),
    "quality of no numbers": (lambda: compiled().measure(of_nothing), "values that are no finite numbers: nothing is"),
    "other numbers": (lambda: compiled().measure(of_outside(torch.Generator())), "begins with other numbers now"),
    "quality of two kinds": (lambda: compiled().measure(of_two_kinds), "measure a call whose steps are alike"),
    "no quality": (lambda: compiled().measure(lambda predict: (loop(predict), None)[1]), "nothing is measured"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    call, says = REFUSED[what]
    with pytest.raises(CompileError, match=re.escape(says)):
        call()


def test_quality_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="reports are an extra")
    sampler = compiled()
    sampler.calibrate(loop, SOME)
    streams: list[str | None] = []

    def named(predict: Any) -> Tensor:
        predict.stream_name = "prompt"  # as pipelines do
        streams.append(sampler.denoiser.stream_name)
        found = loop(predict)
        predict.stream_name = None
        return found

    bound, made = WeakSet[BoundProgram](), BoundProgram.__init__
    monkeypatch.setattr(
        BoundProgram, "__init__", lambda self, *given, **by: (made(self, *given, **by), bound.add(self))[0]
    )
    quality = sampler.measure(named)
    assert streams == [None, *("prompt" for _ in quality.ways)]  # one device first
    gc.collect()
    assert len(bound) == 2  # its own, of two ranks: no other way that was measured keeps any
    assert [one.chosen for one in quality.ways].count(True) == 1
    by_way = {("kept fresh" in one.way, one.exact): one.decibels for one in quality.ways}
    wanted = loop(model())
    assert by_way == {
        (True, False): psnr(sampled(sampler), wanted), (False, False): psnr(plain(), wanted),
        (False, True): psnr(sampled(compiled(mode="exact")), wanted),
    }  # fmt: skip
    assert quality.frontier[-1].exact
    page = sampler.report(tmp_path / "report.html", quality=quality).read_text()
    drawn = json.loads(re.search(r"^const figures = (.*);$", page, re.M)[1])["quality"]["data"]  # type: ignore[index]
    assert sorted(x for one in drawn[1:] for x in one["x"]) == sorted(1e3 * one.seconds for one in quality.ways)
    assert max(y for one in drawn for y in one["y"]) == 120


def test_a_pipeline_of_two_streams() -> None:
    """Its denoiser is called with guidance; schedulers and generators stay as they are."""
    pipe, call = tiny("sd/small")
    draw = torch.Generator().manual_seed(3)
    call = {**call, "output_type": "np", "generator": draw, "num_inference_steps": 6}
    sampler = fxpipe.compile_sampler(pipe, 2, example=call, cfg=1, patches=2, mode="displaced", warmup=1, cluster=SLOW)
    before = draw.get_state()
    quality = sampler.measure(call)
    assert torch.equal(draw.get_state(), before)
    sampler.calibrate({**call, "generator": torch.Generator().manual_seed(3)}, math.inf)
    made = sampler.pipeline()(**{**call, "generator": torch.Generator().manual_seed(3)})
    wanted = pipe(**{**call, "generator": torch.Generator().manual_seed(3)})
    assert psnr(values_of(made), values_of(wanted)) > 200 > min(one.decibels for one in quality.ways)


def test_a_second_denoiser_goes_by_the_calibrated_plan_as_where_it_is_loaded() -> None:
    """Of the same shape; whether its programs were made before or not."""
    pipe, call = tiny("wan")
    call = {**call, "output_type": "latent", "num_inference_steps": 6, "latents": call["latents"][..., :8, :8]}
    call |= {"height": 16, "width": 16}
    given: dict[str, Any] = {"example": call, "vae": False, "cluster": SLOW}
    first = fxpipe.compile_sampler(pipe, 2, cfg=1, patches=2, mode="displaced", warmup=1, **given)
    fast = first.pipeline()
    before = fast(**call).frames
    first.calibrate(call, math.inf)
    found = fast(**call).frames
    assert first.plan.how.fresh
    assert not torch.equal(found, before)
    assert torch.equal(found, fxpipe.compile_sampler(pipe, 2, plan=first.plan, **given).pipeline()(**call).frames)


def of_rank() -> tuple[SamplePlan, Tensor, list[float]]:
    sampler = compiled()
    sampler.calibrate(loop, SOME)
    plan, found = sampler.plan, sampled(sampler)
    return plan, found, [one.decibels for one in sampler.measure(loop, 1).ways]


def test_processes_agree_with_threads() -> None:
    plan, wanted, decibels = of_rank()
    for other, found, others in run_processes(2, of_rank):
        assert other == plan
        assert torch.equal(found, wanted)
        assert others == decibels
