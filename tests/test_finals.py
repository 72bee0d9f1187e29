"""What plans gain at the end: receives posted early, stages that begin some blocks earlier or later."""

from dataclasses import replace

import pytest

import fxpipe
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.plan.block_graph import Edge
from fxpipe.plan.staged import Staged, whole_stages
from passes.placement.collocation import is_collocated
from passes.placement.shape import shape
from passes.tuner import finals, plans
from tests.test_compare_by_hand import case, edge
from tests.test_tune import Slow, found
from tests.unet import TinyUNet

SLOW = Cluster("A100-80GB", (Level(2, Link("slow", 1e5, 1e-3)),))
WAVE = {"schedule": "wave", "microbatches": 4, "data_parallel": 1}


def test_receives_are_posted_early_where_that_is_faster() -> None:
    """Exact, and in the seconds and bytes that its program has; with receives one action ahead it takes longer."""
    model = TinyUNet("no_grad")
    program = fxpipe.compile(model, 2, batch_size=8, cluster=SLOW, cost_model=Slow(), fill="none", **WAVE)  # type: ignore[arg-type]
    plan, predicted = program.plan, program.plan.predicted["step"]
    assert f"receives posted {plan.staged.prefetch} actions ahead" in str(plan)
    assert fxpipe.Plan.parse(str(plan)) == fxpipe.Plan.from_dict(plan.as_dict()) == plan
    timeline = program.simulate()
    assert timeline.makespan_seconds == pytest.approx(predicted.seconds, rel=0.01)
    assert max(timeline.peak_bytes) == pytest.approx(predicted.peak_bytes, rel=0.02)
    late = replace(plan, staged=replace(plan.staged, prefetch=1))
    later = fxpipe.compile(model, 2, cluster=SLOW, cost_model=Slow(), plan=late).simulate()
    assert later.makespan_seconds > timeline.makespan_seconds
    assert program.verify(**model.example_inputs(8)).ok


def test_a_plan_with_negative_prefetch_is_refused() -> None:
    model = TinyUNet("no_grad")
    plan = fxpipe.compile(model, 2, batch_size=8, schedule="wave").plan
    with pytest.raises(fxpipe.CompileError, match="receives are posted -1 actions ahead; 0 or more can be"):
        fxpipe.compile(model, 2, plan=replace(plan, staged=replace(plan.staged, prefetch=-1)))


def test_frozen_work_is_done_a_step_early_only_where_that_gains() -> None:
    """Replicas that wait for nobody have no idle time for it."""
    alone = {"data_parallel": 2, "stages": 1, "microbatches": 2}
    best, *others = found(2, 8, **alone).ranked
    assert not best.candidate.ahead
    assert any(one.candidate.ahead for one in others)
    assert found(2, 8, fill="idle", **alone).best.candidate.ahead
    assert found(2, 8, data_parallel=1, stages=2, microbatches=4).best.candidate.ahead


def test_stages_are_shifted_while_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = WAVE | {"schedule": "interleaved"}
    after = found(2, 8, SLOW, **asked).best
    monkeypatch.setattr(plans, "shifted", lambda trials, of: of)
    before = found(2, 8, SLOW, **asked).best
    assert after.bound_seconds < 0.85 * before.bound_seconds
    assert after.placed.boundaries != before.placed.boundaries
    assert all(after.placed.blocks(stage) for stage in range(4))


def test_stages_that_are_recomputed_stay_whole_when_they_are_shifted() -> None:
    """Which layout says that each keeps its inputs alone."""
    best = found(2, 8, SLOW, recompute=True, **WAVE | {"schedule": "interleaved"}).best.placed
    assert best.recompute == whole_stages(best.boundaries)
    staged = Staged((0, 5, 10), ((0,), (1,)), "1f1b", False, 2, ((2, 5), (7, 9)))
    assert staged.cut_at((0, 8, 10)).recompute == ((2, 5), (7, 8), (8, 9))


def test_a_fold_is_shifted_on_both_ways_where_skips_stay_on_their_ranks() -> None:
    skips = [Edge(f"skip {i}", i, (7 - i,), ("skip",), 8, True, True) for i in range(3)]
    graph = case(8, edges=[*(edge(i, i + 1, num_bytes=8) for i in range(7)), *skips]).graph
    staged = replace(shape("wave", 2, 4, 1).staged((0, 2, 4, 6, 8)), collocated=True)
    moved = list(finals._neighbours(graph, staged))
    assert {each.boundaries for each in moved} >= {(0, 1, 4, 7, 8), (0, 3, 4, 5, 8), (0, 2, 5, 6, 8)}
    assert all(is_collocated(graph, each) and all(map(each.blocks, range(4))) for each in moved)
