"""Ranks that watch where devices are so slow that others are faster without them."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.errors import CompileError
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.sampler import Sampler
from fxpipe.sampling.choosing import ranked
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.planning import chosen, planned
from tests.denoisers import noise
from tests.distributed import run_processes
from tests.test_sample_planner import DEVICE, MODELS, STEPS, asked, compiled, model
from tests.test_sampling_piped import equal


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["exact", "displaced"])
def test_a_device_that_is_far_slower_watches(name: str, mode: str) -> None:
    made = compiled(name, 4, cluster="4xA100*1,1,1,0.02", mode=mode)
    assert made.plan.watching >= 1
    assert made.plan.world_size == 4
    assert any("of which the others watch" in note for note in made.plan.notes)
    assert made.verify().ok
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.05)
    last = made.step.programs[-1]
    assert (last.state, last.inputs) == ({}, ())
    assert SamplePlan.parse(str(made.plan)) == made.plan == SamplePlan.from_dict(made.plan.as_dict())
    again = compiled(name, 4, plan=made.plan, cluster=None)
    assert again.plan == made.plan
    assert again.simulate(STEPS).makespan_seconds == made.simulate(STEPS).makespan_seconds
    assert again.verify().ok


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("speeds", ["1,1,1,0.5", "1,1,0.3,0.3", "1,0.6,0.1,0.1", "1,1,1,0.01"])
def test_no_call_is_slower_than_on_the_first_device_alone(name: str, speeds: str) -> None:
    made = compiled(name, 4, mode="displaced")
    case, request, setting = asked(made)
    cluster = Cluster.parse(f"4xA100*{speeds}")
    request = replace(request, speeds=cluster.speeds)
    for steps in (1, 4, 12):
        found = ranked(case, request, replace(setting, cluster=cluster, steps=steps))
        assert found.best.seconds <= 1.01 * found.alone_seconds


def test_it_is_sent_the_prediction() -> None:
    made = compiled("DiT", 2, cluster="2xA100*1,0.02", mode="exact")
    (prediction,) = made.traffic().channels.values()
    assert made.plan.watching == 1
    assert made.plan.expects is not None
    assert made.plan.expects.wire_bytes == prediction > 0


@pytest.mark.parametrize(("world_size", "speeds"), [(3, ""), (4, "*1,1,1,0.05")])
def test_what_is_shown_over_a_slow_wire_is_in_the_estimate(world_size: int, speeds: str) -> None:
    """The prediction is told to the other group, and to who watches, which ends last."""
    cluster = Cluster.parse(f"{world_size}x1xA100+Ethernet-1{speeds}")
    made = compiled("DiT", world_size, cluster=cluster, cost_model=replace(DEVICE, peak_flops=1e10))
    assert made.plan.watching > 0
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.05)


def test_predictions_of_short_steps_follow_each_other_to_who_watches() -> None:
    """One after the other, latency and all; and who watches has what the first rank has, with the slowest group."""
    for samples, speeds, latency in ((1, (1.0, 0.01), 1e-4), (2, (0.7, 1.0, 0.1), 1e-4)):
        wire = Cluster("A100-80GB", (Level(len(speeds), Link("far", 1e10, latency)),), speeds)
        given = {"x": noise(samples, 3, 16, 8), "text": noise(samples, 5, 8)}
        made = compiled("DiT", len(speeds), example=given, cluster=wire, cost_model=replace(DEVICE, peak_flops=1e11))
        assert made.plan.watching == 1
        assert made.plan.expects is not None
        assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.02)


def test_devices_that_are_a_little_slower_make_the_same_behind_a_slow_wire() -> None:
    wire = "3x1xA100+Ethernet-1*1,0.9,0.9"
    made = compiled("DiT", 3, cluster=wire, mode="exact", cost_model=replace(DEVICE, peak_flops=1e11))
    expects = made.plan.expects
    assert (made.plan.copies, made.plan.watching) == (3, 0)
    assert expects is not None
    assert expects.seconds == pytest.approx(expects.alone_seconds / 0.9, rel=0.01)
    assert expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.01)
    assert made.verify().ok


@pytest.mark.parametrize("stages", [None, 2])
def test_the_first_copy_shows_while_slower_ones_are_at_work(stages: int | None) -> None:
    speeds = (1.0, 1.0, 0.5, 0.5, 0.01)
    wire, device = f"5x1xA100+Ethernet-1*{','.join(map(str, speeds))}", replace(DEVICE, peak_flops=1e11)
    made = compiled("DiT", 5, cluster=wire, cost_model=device)
    case, request, setting = asked(made)
    how = replace(request, world_size=4, copies=2, watching=1, speeds=speeds[:4], cfg=1, stages=stages)
    layout = chosen(case, replace(how, patches=None if stages else 2))
    plan, _ = planned(case, layout, made.plan.cluster, made.plan.cost_model)
    found = compiled("DiT", 5, plan=plan, cluster=None, cost_model=device).simulate(2).makespan_seconds
    assert estimate(case, layout, setting.cluster, 2, speeds[:4]).seconds == pytest.approx(found, rel=0.05)


def test_equal_devices_all_work() -> None:
    case, request, setting = asked(compiled("DiT", 4))
    assert all(not one.request.watching for one in ranked(case, request, setting).candidates)


@pytest.mark.parametrize(
    ("cluster", "mode"),
    [("{}xL40-PCIe", "exact"), ("{}xL40-PCIe", "displaced"), ("{}x1xA100+Ethernet-10", "exact")],
)
def test_ranks_that_samples_cannot_be_shared_out_to_are_no_slower_than_fewer(cluster: str, mode: str) -> None:
    for name in MODELS:
        case, request, setting = asked(compiled(name, 2, cluster="2xA100", mode=mode))
        seconds = []
        for ranks in range(2, 8):
            on = replace(setting, cluster=Cluster.parse(cluster.format(ranks)), steps=12)
            seconds.append(ranked(case, replace(request, world_size=ranks), on, anew=True).best.seconds)
        assert all(more <= 1.05 * min(seconds[: place + 1]) for place, more in enumerate(seconds))


def test_copies_of_fewer_ranks_are_watched_by_the_last() -> None:
    made = compiled("DiT", 7, cluster="7x1xA100+Ethernet-10", cost_model="A100-80GB")
    assert (made.plan.copies, made.plan.watching) == (7, 0)
    made = compiled("DiT", 7, cluster="7xL40-PCIe")
    case, request, _ = asked(made)
    assert made.plan.watching == 1
    of_two = chosen(case, replace(request, world_size=6, cfg=2, patches=1, copies=3, watching=1))
    plan, _ = planned(case, of_two, made.plan.cluster, made.plan.cost_model)
    again = compiled("DiT", 7, plan=plan, cluster=None)
    for one in (made, again):
        assert one.verify().ok
        assert SamplePlan.parse(str(one.plan)) == one.plan
    assert (again.plan.copies, again.plan.watching) == (3, 1)
    assert made.plan.expects is not None
    assert made.plan.expects.seconds == pytest.approx(made.simulate(STEPS).makespan_seconds, rel=0.05)


def test_exact_steps_of_a_displaced_call_are_of_its_own_ranks() -> None:
    """On others the fastest exact layout is one with a rank that watches."""
    case, request, setting = asked(compiled("DiT", 7, cluster="7x1xA100+Ethernet-10", mode="displaced", warmup=3))
    found = ranked(case, request, replace(setting, steps=12))
    warmed = [one for one in found.candidates if one.made and one.made.warm]
    assert {one.request.watching for one in warmed} == {0, 1}
    assert next(one for one in found.candidates if one.is_exact and one.found).request.watching == 1


# -- steps of a displaced call


@cache
def displaced(world_size: int) -> Sampler:
    made = compiled("DiT", 2, mode="displaced", cfg=1, patches=2, advance=True)
    return made if world_size == 2 else compiled("DiT", 3, plan=replace(made.plan, watching=1), cluster=None)


def called(sampler: Sampler) -> list[Tensor]:
    """Of two calls."""
    x, text, found = noise(2, 3, 16, 8), noise(2, 5, 8), list[Tensor]()
    for call in range(2):
        with sampler.call():
            found += [sampler.predict(x=x + 0.1 * (step + call) * x.cos(), text=text) for step in range(4)]
    return found


def launched() -> tuple[list[Tensor], int, bool]:
    """A rank's predictions, the bytes that it lets go of, and whether it goes on as before."""
    sampler = displaced(3)
    found, freed = called(sampler), sampler.release()
    goes_on = equal(called(sampler), found)
    sampler.close()
    return found, freed, goes_on


@cache
def in_turn(watching: int, beside: int, warm: bool) -> Sampler:
    """Two stages, each of so many ranks, the last of all watching; fresh steps by them, or by rows."""
    given = {"mode": "displaced", "cfg": 1, "stages": 2, "patches": 4, "warmup": 3}
    plan = compiled("DiT", 2 * beside, cluster="8xA100", **given).plan
    rows = compiled("DiT", 2 * beside, cluster="8xA100", cfg=1, patches=2 * beside).plan if warm else None
    if rows is not None:
        rows = replace(rows, watching=watching, notes=(), expects=None, considered=())
    return compiled("DiT", 2 * beside + watching, plan=replace(plan, watching=watching, warm=rows), cluster=None)


@pytest.mark.parametrize(("watching", "beside", "warm"), [(1, 1, False), (2, 2, True)])
def test_patches_in_turn_are_shown_to_who_watches(watching: int, beside: int, warm: bool) -> None:
    shown, alone = in_turn(watching, beside, warm), in_turn(0, beside, warm)
    assert equal(called(shown), called(alone))
    assert shown.verify().ok
    assert SamplePlan.parse(str(shown.plan)) == shown.plan == SamplePlan.from_dict(shown.plan.as_dict())
    *_, last = shown.step.programs
    assert (last.rank, last.state, last.inputs if not warm else ()) == (2 * beside + watching - 1, {}, ())
    assert shown.plan.watching == watching


def launched_in_turn() -> list[Tensor]:
    """A rank's predictions."""
    sampler = in_turn(1, 1, True)
    found = [value.clone() for value in called(sampler)]
    sampler.close()
    return found


def test_processes_of_patches_in_turn_watch_as_threads_do() -> None:
    wanted = called(in_turn(0, 1, True))
    assert all(equal(found, wanted) for found in run_processes(3, launched_in_turn))


def test_what_is_shown_in_turn_is_in_the_estimate() -> None:
    made = compiled("DiT", 7, cluster="7x1xA100+Ethernet-10", mode="displaced")
    case, request, setting = asked(made)
    found = [
        one for one in ranked(case, request, replace(setting, steps=12)).candidates
        if one.made and one.request.watching and one.request.in_turn
    ]  # fmt: skip
    assert found
    for one in found:
        assert one.found is not None
        plan, _ = planned(case, one.made, made.plan.cluster, made.plan.cost_model)
        again = compiled("DiT", 7, plan=plan, cluster=None)
        assert one.found.seconds == pytest.approx(again.simulate(12).makespan_seconds, rel=0.08), str(one)


def test_who_watches_has_what_the_others_have_bit_for_bit() -> None:
    wanted = called(displaced(2))
    assert not torch.equal(wanted[-1], wanted[0])
    assert equal(called(displaced(3)), wanted)
    ranks = run_processes(3, launched)
    assert all(equal(found, wanted) for found, *_ in ranks)
    weights = sum(parameter.nbytes for parameter in model("DiT").parameters())
    assert [(freed, goes_on) for _, freed, goes_on in ranks] == [(0, True), (0, True), (weights, True)]


# -- other calls, and plans


@pytest.mark.parametrize("speeds", ["1,0.5,0.01,0.01", "1,0.01,0.01,0.01"])
def test_by_a_plan_with_a_rank_that_watches_more_may_watch_at_another_size(speeds: str) -> None:
    made = compiled("DiT", 4, cluster=f"4xA100*{speeds}", sizes="any").plan
    watching = compiled("DiT", 3, cluster="8xA100", cfg=1, patches=3).plan
    watching = replace(watching, watching=1, cluster=made.cluster)
    again = compiled("DiT", 4, plan=watching, cluster=None, sizes="any")
    call = {"x": noise(2, 3, 16, 12), "text": noise(2, 5, 8)}
    plan = again.denoiser.step((), call).plan
    assert plan.world_size == 4
    assert plan.watching == made.watching > 1
    assert again.verify(**call).ok


def test_who_cannot_watch_is_refused() -> None:
    in_turn = compiled("DiT", 2, cluster="8xA100", mode="displaced", stages=2)
    case, request, _ = asked(in_turn)
    of_two = chosen(case, replace(request, world_size=4, copies=2, cfg=1, watching=1))
    with pytest.raises(CompileError, match=r"1 rank watching \(patches in turn\); .* none where there are copies"):
        planned(case, of_two, "", "")
    data = displaced(3).plan.as_dict()
    for watching in (-1, "1", 1.0, True, None):
        with pytest.raises(CompileError, match=r"watching is .*(, no number of ranks|; give an integer)"):
            SamplePlan.from_dict({**data, "watching": watching})
    del data["watching"]
    assert SamplePlan.from_dict(data) == displaced(2).plan
