"""Fillers: valid whatever the work and the idle time, never below the bound, each at least as good as it promises."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from passes.comparison.published import published
from passes.costs.layer import FrozenComponent, Points, layer_points, layer_seconds
from passes.fill.bound import lower_bound_seconds
from passes.fill.problem import FillProblem
from passes.fill.result import parts
from tests.fill_check import check, require
from tests.fill_problems import FILLERS, affine, fill, holders, problems

MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
ROUNDING = 1 + 1e-9


@MANY
@given(problems(), st.sampled_from(sorted(FILLERS)))
def test_valid_and_never_below_the_bound(problem: FillProblem, how: str) -> None:
    found = fill(problem, how)
    assert not check(problem, found), str(found)
    assert found.iteration_seconds * ROUNDING >= lower_bound_seconds(problem)


@MANY
@given(problems())
def test_per_device_keeps_samples_in_place(problem: FillProblem) -> None:
    assert fill(problem).stays


@MANY
@given(problems())
def test_exact_is_never_worse_than_greedy(problem: FillProblem) -> None:
    assert fill(problem, "exact").iteration_seconds <= fill(problem, "greedy").iteration_seconds * ROUNDING


@MANY
@given(problems(anywhere=True))
def test_no_fill_is_the_pipeline_and_a_balanced_tail(problem: FillProblem) -> None:
    share = -(-problem.batch_size // problem.num_ranks)
    tail = sum(table[share] for tables in problem.seconds for table in tables)
    found = fill(problem, "none")
    assert found.iteration_seconds == pytest.approx(problem.pipeline_seconds + tail, rel=1e-4)
    assert all(p.start_seconds >= problem.pipeline_seconds for pieces in found.ranks for p in pieces)


@MANY
@given(problems(anywhere=True), st.sampled_from(("greedy", "exact", "per-device")))
def test_filling_is_never_worse_than_not(problem: FillProblem, how: str) -> None:
    assert fill(problem, how).iteration_seconds <= fill(problem, "none").iteration_seconds * (1 + 1e-4)


@MANY
@given(problems())
def test_results_are_held_once(problem: FillProblem) -> None:
    found = fill(problem)
    for index, component in enumerate(problem.components):
        if component.layers:
            samples = [s for first, last, _ in holders(problem, found, index) for s in range(first, last)]
            assert samples == list(range(problem.batch_size))


def layer(launch_ms: float, sample_ms: float) -> Points:
    return affine(launch_ms / 1e3, sample_ms / 1e3)


VAE = FrozenComponent("vae", (layer(1, 1),) * 4)
TEXT = FrozenComponent("text", (layer(1, 0.125),) * 4)
TWO_RANKS = FillProblem(0.1, (((0.0, 0.04),), ((0.06, 0.1),)), (VAE, TEXT), 16)


def test_a_millisecond_of_idle_time_is_used() -> None:
    component = FrozenComponent("quick", (affine(0.0, 0.0005),))
    assert fill(FillProblem(0.02, (((0.005, 0.006),),) * 2, (component,), 2)).tail_seconds == 0.0


@pytest.mark.parametrize("how", sorted(FILLERS))
@pytest.mark.parametrize(
    "problem",
    [
        replace(TWO_RANKS, idle=((), ())),
        replace(TWO_RANKS, components=()),
        replace(TWO_RANKS, components=(replace(VAE, layers=()), replace(TEXT, depends=(0,)))),
        replace(TWO_RANKS, components=(replace(VAE, layers=(layer(0, 0),) * 3), TEXT)),
        replace(TWO_RANKS, idle=(((0.0, 0.04),),)),
        replace(TWO_RANKS, batch_size=1),
        replace(TWO_RANKS, components=(FrozenComponent("slow", (layer(50, 0),) * 2),)),
        replace(TWO_RANKS, idle=(((0.0, 0.001), (0.002, 0.003)), ((0.05, 0.05),))),
        replace(TWO_RANKS, pipeline_seconds=0.0, idle=((), ())),
        replace(TWO_RANKS, local_batches=()),
        replace(TWO_RANKS, components=(replace(VAE, ranks=(0,)), replace(TEXT, depends=(0,), ranks=(1,)))),
        replace(TWO_RANKS, components=(replace(VAE, whole=True), replace(TEXT, depends=(0,)))),
        replace(TWO_RANKS, components=(VAE, *(replace(TEXT, depends=(i,)) for i in range(5)))),
        replace(TWO_RANKS, components=(VAE, FrozenComponent("glue", (), (0,)), replace(TEXT, depends=(1,)))),
        replace(TWO_RANKS, components=(VAE, FrozenComponent("glue", (), (0,), (0,)), replace(TEXT, depends=(1,)))),
    ],
    ids=[
        "no bubbles", "no components", "a component without layers", "layers without time", "one rank", "one sample",
        "bubbles shorter than a layer", "bubbles too short", "no pipeline", "no local batches", "on different ranks",
        "whole", "a chain", "glue without layers", "glue on one rank",
    ],
)  # fmt: skip
def test_absurd_problems(problem: FillProblem, how: str) -> None:
    found = require(problem, fill(problem, how))
    assert lower_bound_seconds(problem) <= found.iteration_seconds * ROUNDING


def test_everything_hidden() -> None:
    for problem in (replace(TWO_RANKS, batch_size=8), replace(TWO_RANKS, components=(VAE,), idle=(((0.0, 0.1),), ()))):
        found = require(problem, fill(problem))
        assert found.method == "per-device"
        assert found.tail_seconds == 0.0


def test_idle_time_at_the_end_goes_on_in_the_tail() -> None:
    """4 layers of 9 ms each from 90 ms on, without a cut at the pipeline's end at 100 ms."""
    problem = FillProblem(0.1, (((0.09, 0.1),),), (FrozenComponent("c", (layer(1, 1),) * 4),), 8)
    (piece,) = fill(problem).ranks[0]
    assert (piece.start_seconds, piece.end_seconds) == pytest.approx((0.09, 0.126))
    assert fill(problem, "greedy").iteration_seconds > 0.126 + 1e-4


def test_little_work_is_done_in_one_place() -> None:
    """Launches make the small component slower the more ranks share it."""
    problem = FillProblem(0.0, ((),) * 4, (VAE, FrozenComponent("text", (layer(2, 0.01),) * 3)), 32)
    found = require(problem, fill(problem))
    assert len({rank for _, _, rank in holders(problem, found, 1)}) < 4
    assert found.iteration_seconds < fill(problem, "none").iteration_seconds


def test_greedy_is_better_where_only_moving_samples_helps() -> None:
    """One sample, two layers: the ranks are idle one after the other, and only moving the sample uses both."""
    problem = FillProblem(0.04, (((0.0, 0.02),), ((0.02, 0.04),)), (FrozenComponent("c", (layer(20, 0),) * 2),), 1)
    found = require(problem, fill(problem, "greedy"))
    assert (found.stays, found.tail_seconds) == (False, 0.0)
    assert fill(problem).tail_seconds == pytest.approx(0.02)


def test_limits_of_the_paper_are_kept() -> None:
    problem = published(replace(TWO_RANKS, idle=(((0.0, 0.0099), (0.02, 0.04)), ((0.03, 0.06),))))
    for how in ("greedy", "exact", "per-device"):
        starts = [p.start_seconds for pieces in require(problem, fill(problem, how)).ranks for p in pieces]
        assert min(starts) >= 0.02


def test_text_and_bubble_ratio() -> None:
    """116 ms on two ranks; the pipeline is busy for 160 ms, layers for 71 ms, which leaves 1 of 232 ms."""
    problem = replace(TWO_RANKS, components=(VAE,), idle=(((0.0, 0.04),), ()), local_batches=(4, 8))
    found = fill(problem, "greedy")
    assert str(found) == (
        "fill greedy: 116.00 ms (pipeline 100.00 ms, tail 16.00 ms), 0.4% idle\n"
        "rank 0: vae[0:2] x 0:16 @ 0.00-34.00, vae[2:3] x 0:4 @ 34.00-39.00, vae[2:3] x 4:10 @ 100.00-107.00, "
        "vae[3:4] x 0:8 @ 107.00-116.00\n"
        "rank 1: vae[2:3] x 10:16 @ 100.00-107.00, vae[3:4] x 8:16 @ 107.00-116.00"
    )
    assert found.bubble_ratio == pytest.approx(1 / 232)


def test_layer_times() -> None:
    found = layer_points({4: 0.004, 8: 0.003, 16: 0.011})
    assert found == ((4, 0.004), (8, 0.004), (16, 0.011))
    times = layer_seconds(found, None, 24)
    assert [times[n] for n in (0, 1, 4, 8, 12, 16, 24)] == pytest.approx([0, 0.004, 0.004, 0.004, 0.0075, 0.011, 0.018])
    assert layer_seconds(found, None, 12) == times[:13]
    assert layer_seconds(affine(0.001, 0.002), None, 10)[10] == pytest.approx(0.021)
    assert [layer_seconds(((8, 0.1),), None, 16)[n] for n in (1, 8, 16)] == pytest.approx([0.1, 0.1, 0.2])
    assert [layer_seconds(found, 8, 24)[n] for n in (8, 9, 16, 20)] == pytest.approx([0.004, 0.008, 0.008, 0.012])


@MANY
@given(problems())
def test_pieces_run_in_parts_that_their_components_take(problem: FillProblem) -> None:
    found = fill(problem)
    for piece in (piece for of_rank in found.ranks for piece in of_rank):
        most = problem.components[piece.component].most
        samples = list(parts(problem, piece))
        assert [n for part in samples for n in part] == list(range(piece.first_sample, piece.last_sample))
        assert all(most is None or len(part) <= most for part in samples)


@given(problems(most_samples=8), st.integers(2, 4))
def test_more_idle_time_in_one_place_is_used(problem: FillProblem, factor: int) -> None:
    """With all of the pipeline idle on every rank and time enough, nothing is left over."""
    least = sum(table[-1] for tables in problem.seconds for table in tables)
    assume(least > 0)
    pipeline = factor * least + 0.02
    roomy = replace(problem, pipeline_seconds=pipeline, idle=(((0.0, pipeline),),) * problem.num_ranks)
    assert fill(roomy).tail_seconds == 0.0
