"""The tuner: bounds that hold, limits that are kept, reasons that are told; odd numbers of ranks, tight memory."""

from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.errors import CompileError
from passes.rehearsal.case import Case
from passes.rehearsal.rehearse import Rehearsal
from passes.tuner.candidates import Wishes, candidates
from passes.tuner.finals import finals
from passes.tuner.predictions import Predictions
from passes.tuner.tune import NothingFits, Tuned, tune
from tests.unet import TinyUNet


@dataclass(frozen=True)
class Slow:
    """A device on which compute takes long: launches count for nothing."""

    def forward_seconds(self, cost: Any, num_samples: int) -> float:
        return 1e-6 * (int(cost.at(num_samples).forward_flops) + int(cost.at(num_samples).bytes_read))

    def backward_input_seconds(self, cost: Any, num_samples: int) -> float:
        return self.forward_seconds(cost, num_samples)

    def backward_weight_seconds(self, cost: Any, num_samples: int) -> float:
        return self.forward_seconds(cost, num_samples)

    def backward_seconds(self, cost: Any, num_samples: int) -> float:
        return 2 * self.forward_seconds(cost, num_samples)


@cache
def case() -> Case:
    """A tiny U-Net's step with a frozen encoder."""
    from passes import plan

    found: list[Case] = []
    original = plan.finals

    def spy(of: Case, wishes: Wishes, budget_seconds: float) -> Tuned:
        found.append(of)
        return original(of, wishes, budget_seconds)

    plan.finals = spy
    try:
        fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=8, cost_model=Slow(), schedule="1f1b")
    finally:
        plan.finals = original
    return found[0]


def planned() -> tuple[BlockGraph, BlockCosts]:
    return case().graph, case().costs


def tuned(world_size: int, batch_size: int, cluster: str = "", **wishes: Any) -> Tuned:
    graph, costs = planned()
    where = Cluster.parse(cluster or f"{world_size}xA100-80GB")
    return tune(graph, costs, where, Wishes("auto", world_size, batch_size, **wishes))


@given(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8)), st.integers(1, 12), st.sampled_from((None, 1, 2, 3)))
@settings(max_examples=40, deadline=None)
def test_bounds_hold_and_the_fastest_is_chosen(world_size: int, batch_size: int, microbatches: int | None) -> None:
    if microbatches is not None and microbatches > batch_size:
        microbatches = batch_size
    found = tuned(world_size, batch_size, microbatches=microbatches)
    simulated = [c for c in found.ranked if c.seconds is not None]
    assert len(simulated) == found.num_simulated
    for candidate in simulated:
        assert candidate.bound_seconds <= candidate.seconds * (1 + 1e-9)
        assert candidate.estimated_seconds >= candidate.bound_seconds
    assert found.chosen.seconds == min(c.seconds for c in simulated)
    assert found.chosen.why == ""
    assert all(c.why for c in found.ranked[1:])
    ranks = {rank for ranks in found.chosen.placed.stage_ranks for rank in ranks}
    assert ranks <= set(range(world_size))


def test_nothing_left_out_by_a_bound_is_faster() -> None:
    """Every candidate simulated, against the tuner that stops early."""
    graph, costs = planned()
    cluster, wishes = Cluster.parse("4xA100-80GB"), Wishes("auto", 4, 8)
    tuner = Predictions(graph, costs, cluster, wishes)
    every = [next(tuner.simulated(tuner._first_estimate(c))) for c in candidates(graph, costs, wishes)]
    best = min(c.seconds or inf for c in every)
    assert (tuned(4, 8).chosen.seconds or inf) <= best * 1.05


def test_memory_limits_choose_other_plans() -> None:
    free = tuned(4, 64, data_parallel=1, microbatches=8)
    assert free.chosen.peak_bytes is not None
    least = free.chosen.peak_bytes - 1
    tight = tuned(4, 64, data_parallel=1, microbatches=8, memory_limit_bytes=least)
    assert tight.chosen.peak_bytes is not None
    assert tight.chosen.peak_bytes <= least
    assert any("on a rank" in c.why for c in tight.ranked)
    with pytest.raises(NothingFits, match=r"no plan fits into memory_limit=10 B per rank: the least needed is"):
        tuned(4, 8, memory_limit_bytes=10)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"data_parallel": 3}, "data_parallel=3 does not divide world_size=4"),
        ({"data_parallel": 4, "microbatches": 2}, "no way to use world_size=4 with data_parallel=4"),
    ],
)
def test_wishes_that_exclude_each_other_are_refused(wishes: dict[str, int], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        tuned(4, 8, **wishes)


def test_slow_links_prefer_less_traffic() -> None:
    slow = Link("thread", bandwidth_bytes_per_second=1.0, latency_seconds=1.0)
    graph, costs = planned()
    on_thread = tune(graph, costs, Cluster("A100-80GB", (Level(4, slow),)), Wishes("auto", 4, 8, data_parallel=1))
    on_nvlink = tuned(4, 8, data_parallel=1)
    assert on_thread.chosen.wire_bytes is not None
    assert on_thread.chosen.wire_bytes < (on_nvlink.chosen.wire_bytes or 0)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("cluster", ["2x2xV100", "4xA100-PCIe"])
def test_the_plan_is_the_fastest_of_all_that_were_rehearsed(cluster: str, filled: bool) -> None:
    of = replace(case(), cluster=Cluster.parse(cluster), world_size=4, batch_size=16)
    wishes = Wishes("auto", 4, 16, filled=filled)
    chosen = finals(of, wishes).chosen
    first = tune(of.graph, of.costs, of.cluster, wishes).chosen
    seconds = [Rehearsal(of, candidate).run(filled).timeline.makespan_seconds for candidate in (chosen, first)]
    assert chosen.seconds == pytest.approx(seconds[0], rel=1e-9)
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


@pytest.mark.parametrize(("cluster", "batch_size"), [("4xA100-PCIe", 32), ("2x2xV100", 24)])
def test_orders_are_searched_for_where_that_helps(cluster: str, batch_size: int) -> None:
    of = replace(case(), cluster=Cluster.parse(cluster), world_size=4, batch_size=batch_size)
    wishes = Wishes("auto", 4, batch_size, data_parallel=1)
    named, found = finals(of, wishes), finals(of, wishes, 0.5)
    assert named.search_seconds is None
    assert found.search_seconds in (0.5 / 8, 0.5 / 6, 0.5 / 4, 0.5 / 2, 0.5)
    assert found.chosen.seconds is not None
    assert found.chosen.seconds < (named.chosen.seconds or 0.0)
    again = Rehearsal(of, found.chosen).run(False, found.search_seconds)
    assert found.chosen.seconds == pytest.approx(again.timeline.makespan_seconds, rel=1e-9)
    assert found.chosen.why == ""
    assert all(candidate.why for candidate in found.ranked[1:])
    assert {(c.shape, c.microbatches) for c in found.ranked} == {(c.shape, c.microbatches) for c in named.ranked}
    others = [c.likely_seconds for c in found.ranked[1:]]
    assert others == sorted(others)


@pytest.mark.parametrize("search_seconds", [None, 0.3])
def test_compiled_orders_are_searched_for_as_the_plan_says(
    search_seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from passes import plan

    def decided(of: Case, wishes: Wishes, budget_seconds: float) -> Tuned:
        return replace(finals(of, wishes), search_seconds=search_seconds)

    monkeypatch.setattr(plan, "finals", decided)
    program = fxpipe.compile(TinyUNet("no_grad"), 2, batch_size=8, data_parallel=1, cost_model=Slow())
    (how,) = (note for note in program.plan.notes if "one pipeline's schedule" in note)
    assert ("by its name" in how) == (search_seconds is None), how


def test_what_cannot_win_is_not_filled() -> None:
    of = replace(case(), cluster=Cluster.parse("4xA100-PCIe"), world_size=4, batch_size=16)
    rehearsal = Rehearsal(of, finals(of, Wishes("auto", 4, 16, data_parallel=1, filled=True)).chosen)
    whole, short = rehearsal.run(True), rehearsal.run(True, worth_seconds=0.0)
    alone = short.timeline.makespan_seconds
    assert [any("T[" in a.action for a in run.timeline.actions) for run in (whole, short)] == [True, False]
    assert (whole.filled, short.filled) == (True, False)
    assert short.peak_bytes <= whole.peak_bytes
    assert alone <= whole.timeline.makespan_seconds
    assert not rehearsal.run(True, worth_seconds=alone).filled
    assert rehearsal.run(True, worth_seconds=alone * (1 + 1e-9)).timeline == whole.timeline


def test_rehearsals_end_the_search_or_are_left_out() -> None:
    graph, costs = planned()
    wishes, where = Wishes("auto", 4, 8), Cluster.parse("4xA100-80GB")
    plain = tune(graph, costs, where, wishes)
    shape = plain.chosen.shape
    slower = tune(graph, costs, where, wishes, lambda c: replace(c, seconds=2 * (c.seconds or 0.0)))
    assert slower.chosen.seconds == 2 * (plain.chosen.seconds or 0.0)
    assert tune(graph, costs, where, wishes, lambda c: None).chosen.shape == plain.chosen.shape
    limited = replace(wishes, memory_limit_bytes=10**9)
    large = tune(graph, costs, where, limited, lambda c: replace(c, peak_bytes=1 + 10**9 * (c.shape == shape)))
    assert large.chosen.shape != shape
    assert any(c.shape == shape and "on a rank" in c.why for c in large.ranked)


def test_what_does_not_fit_when_rehearsed_is_recomputed() -> None:
    graph, costs = planned()
    wishes, where = Wishes("auto", 2, 8, memory_limit_bytes=10**9), Cluster.parse("2xA100-80GB")
    found = tune(graph, costs, where, wishes, lambda c: replace(c, peak_bytes=1 if c.shape.recompute else 10**9 + 1))
    assert found.chosen.shape.recompute


def test_stages_that_were_asked_for_are_kept_whatever_the_blocks() -> None:
    assert case().costs.num_blocks < 32
    assert tuned(4, 8, stages=16, data_parallel=1).chosen.shape.stages == 16


def test_everything_left_open_compiles_and_is_exact() -> None:
    for world_size, batch_size in ((3, 7), (5, 6), (7, 3)):
        model = TinyUNet("no_grad")
        program = fxpipe.compile(model, world_size, batch_size=batch_size, cost_model=Slow(), budget=0.2)
        assert program.plan.outcomes[0].why == ""
        assert program.verify(**model.example_inputs(batch_size)).ok


def test_fixed_wishes_are_kept() -> None:
    chosen = tuned(8, 16, data_parallel=2, stages=4, microbatches=8).chosen
    assert (len(chosen.shape.pipelines), chosen.shape.stages, chosen.microbatches) == (2, 4, 8)
    assert replace(chosen.shape, hard=True).places == 4


@pytest.mark.parametrize("bandwidth", [1e-9, 1e300])
def test_absurd_links_are_planned_for(bandwidth: float) -> None:
    """Sums of what skips take and what blocks take must not lose either."""
    link = Link("absurd", bandwidth, 0.0)
    model = TinyUNet("")
    program = fxpipe.compile(model, 4, batch_size=8, cluster=Cluster("A100-80GB", (Level(4, link),)))
    assert program.verify(**model.example_inputs(8)).ok
