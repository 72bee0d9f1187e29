"""What a plan claims, recomputed: makespans by a simulator of a few lines, and a solver only where one is needed."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from fxpipe.plan.schedule import Schedule
from passes.schedules.problem import Problem
from passes.schedules.synthesis import synthesise
from tests.partitions import wave_ranks
from tests.test_schedule import chain
from tests.test_synthesis import problems, uniform


def makespan(problem: Problem, schedule: Schedule) -> float:
    """Starts grow until none has to: after what is before on the rank, and after every value has arrived."""
    work = problem.work
    seconds = {a: float(problem.seconds[a.kind][a.stage]) for actions in schedule.ranks for a in actions}
    start = dict.fromkeys(seconds, 0.0)
    by_name = {(a.stage, a.kind, a.microbatch): a for a in seconds}
    arrows = [(p, a, 0.0) for actions in schedule.ranks for p, a in pairwise(actions)]

    def arrow(source: tuple[int, str, int], target: tuple[int, str, int], lag: float) -> None:
        if source in by_name and target in by_name:
            arrows.append((by_name[source], by_name[target], lag))

    for m in range(work.num_microbatches):
        for s in range(work.num_stages):
            arrow((s, "I", m), (s, "W", m), 0.0)
            for kind in "BI":
                arrow((s, "F", m), (s, kind, m), 0.0)
        for a, b in work.edges:
            arrow((a, "F", m), (b, "F", m), problem.lag(a, b, "F"))
        for a, b in work.grad_edges:
            for one in "BI":
                for two in "BI":
                    arrow((a, one, m), (b, two, m), problem.lag(a, b, "B"))
        for component, s in work.frozen_edges:
            arrow((component, "T", m), (s, "F", m), problem.lag(component, s, "T"))
        for one_component, two_component in work.component_edges:
            arrow((one_component, "T", m), (two_component, "T", m), 0.0)
    for _ in range(len(start) + 1):
        moved = False
        for before, after, lag in arrows:
            least = start[before] + seconds[before] + lag
            if start[after] < least:
                start[after], moved = least, True
        if not moved:
            return max((start[a] + seconds[a] for a in start), default=0.0)
    raise AssertionError("the schedule never ends")


@given(problems())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_makespan_gap_and_idle_share_are_what_they_are_called(problem: Problem) -> None:
    found = synthesise(problem, budget_seconds=0.1)
    length = makespan(problem, found.schedule)
    assert found.makespan_seconds == pytest.approx(length, rel=1e-12, abs=1e-12)
    assert 0 <= found.lower_bound_seconds <= length * (1 + 1e-12)
    if found.lower_bound_seconds:
        assert found.gap == pytest.approx(length / found.lower_bound_seconds - 1, abs=1e-12)
    busy = sum(problem.duration(a) for actions in found.schedule.ranks for a in actions)
    if length:
        assert found.bubble_ratio == pytest.approx(1 - busy / length / problem.num_ranks, abs=1e-9)


def test_everything_is_printed() -> None:
    text = str(synthesise(uniform(wave_ranks(3), 4, 10, split=False, limit=6), 0))
    assert "s, lower bound " in text
    assert "% above the shortest" in text
    assert "% idle, by " in text


def test_equal_small_problems_close_their_gap() -> None:
    """The whole at once proves what windows and lists leave open."""
    for placement in ((0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1)):
        count = len(placement)
        forward = tuple(1 + 0.3 * s for s in range(count))
        problem = Problem(
            chain(count, 6),
            placement,
            {"F": forward, "B": tuple(2 * f for f in forward)},
            lag=lambda a, b, kind, placement=placement: 0.1 * (placement[a] != placement[b]),  # type: ignore[misc]
            activation_bytes=(1,) * count,
            memory_limit_bytes=(4,) * (max(placement) + 1),
        )
        assert synthesise(problem, 2.0).gap == 0
