"""Synthesised schedules: against brute force, the named schedules, the memory limits and themselves."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.schedule_check import check
from passes.schedules.bounds import jackson, lower_bound_ticks
from passes.schedules.job_shop import job_shop, tick_seconds
from passes.schedules.problem import Problem
from passes.schedules.synthesis import references, synthesise
from tests.partitions import wave_ranks
from tests.test_schedule import chain, works

SLOW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def held(problem: Problem, schedule: Schedule) -> list[int]:
    """Peak bytes per rank, from the times of a simulation: every F to the end of its B or W."""
    timeline = problem.simulate(schedule)
    peaks = []
    for actions in schedule.ranks:
        spans = []
        for forward in (a for a in actions if a.kind == "F" and a.stage in problem.work.backward):
            ends = [
                a for a in actions if a.kind != "F" and (a.stage, a.microbatch) == (forward.stage, forward.microbatch)
            ]
            end = max(timeline.end_seconds[a] for a in ends if a.kind != "T")
            spans.append((timeline.start_seconds[forward], end, problem.activation_bytes[forward.stage]))
        times = [start for start, _, _ in spans]
        peaks.append(max((sum(size for start, end, size in spans if start <= t < end) for t in times), default=0))
    return peaks


def shortest(problem: Problem) -> float:
    """The optimum of a chain of stages over every order and every choice of B or I and W, by enumeration."""
    work, num_stages = problem.work, problem.work.num_stages
    keys = list(product(range(1, num_stages), range(work.num_microbatches)))
    choices = product(("B", "IW") if "I" in problem.seconds else ("B",), repeat=len(keys))
    return min(_shortest(problem, dict(zip(keys, choice, strict=True))) for choice in choices)


def _shortest(problem: Problem, mixture: dict[tuple[int, int], str]) -> float:
    work, ranks = problem.work, problem.stage_rank
    last_stage = work.num_stages - 1
    actions = [
        Action(s, kind, m)
        for s in range(work.num_stages)
        for m in range(work.num_microbatches)
        for kind in "F" + mixture.get((s, m), "B")
    ]
    backward = {(a.stage, a.microbatch): a for a in actions if a.kind in "BI"}

    def needs(a: Action) -> list[tuple[Action, float]]:
        s, m = a.stage, a.microbatch
        if a.kind == "W":
            return [(backward[s, m], 0.0)]
        if a.kind == "F":
            return [(Action(s - 1, "F", m), problem.lag(s - 1, s, "F"))] if s else []
        after = [(Action(s, "F", m), 0.0)]
        return [*after, (backward[s + 1, m], problem.lag(s + 1, s, "B"))] if s < last_stage else after

    before = {a: needs(a) for a in actions}
    best, seen = float("inf"), set()

    def visit(ends: dict[Action, float], free: tuple[float, ...], memory: tuple[int, ...]) -> None:
        nonlocal best
        state = (frozenset(ends.items()), free)
        left = [0.0] * problem.num_ranks
        for a in actions:
            if a not in ends:
                left[ranks[a.stage]] += problem.duration(a)
        if state in seen or max(f + rest for f, rest in zip(free, left, strict=True)) >= best:
            return
        seen.add(state)
        if len(ends) == len(actions):
            best = max(free)
            return
        for a in actions:
            rank = ranks[a.stage]
            if a in ends or any(need not in ends for need, _ in before[a]):
                continue
            size = problem.activation_bytes[a.stage] if problem.activation_bytes else 0
            used = memory[rank] + (size if a.kind == "F" else 0)
            if problem.memory_limit_bytes is not None and used > problem.memory_limit_bytes[rank]:
                continue
            used -= 0 if a.kind in "FI" else size
            end = max([free[rank], *(ends[need] + lag for need, lag in before[a])]) + problem.duration(a)
            visit(
                {**ends, a: end},
                (*free[:rank], end, *free[rank + 1 :]),
                (*memory[:rank], used, *memory[rank + 1 :]),
            )

    visit({}, (0.0,) * problem.num_ranks, (0,) * problem.num_ranks)
    return best


@st.composite
def small_chains(draw: st.DrawFn) -> Problem:
    placement, num_microbatches = draw(
        st.sampled_from([((0,), 3), ((0, 1), 3), ((0, 1, 2), 2), ((0, 1, 0), 2), ((0, 1, 1, 0), 2)])
    )
    num_stages = len(placement)
    seconds = st.tuples(*[st.integers(1, 6)] * num_stages)
    table = {"F": draw(seconds), "B": draw(seconds)}
    if draw(st.booleans()) and num_stages * num_microbatches <= 6:
        table |= {"I": draw(seconds), "W": draw(seconds)}
    delay = draw(st.integers(0, 3))
    limited = draw(st.booleans())
    sizes = draw(seconds) if limited else ()
    one = [sum(s for s, r in zip(sizes, placement, strict=False) if r == rank) for rank in range(max(placement) + 1)]
    limits = tuple(o + draw(st.integers(0, 6)) for o in one) if limited else None
    return Problem(
        chain(num_stages, num_microbatches),
        placement,
        table,
        lag=lambda a, b, kind: 0.0 if placement[a] == placement[b] else float(delay),
        activation_bytes=sizes,
        memory_limit_bytes=limits,
    )


@given(small_chains())
@SLOW
def test_bound_optimum_and_schedule_are_in_order(problem: Problem) -> None:
    optimum = shortest(problem)
    found = synthesise(problem, budget_seconds=0.5)
    assert found.lower_bound_seconds <= optimum * (1 + 1e-9)
    assert found.makespan_seconds >= optimum * (1 - 1e-9)
    shop = job_shop(problem, frozenset())
    known = lower_bound_ticks(shop)
    full = replace(problem, seconds={kind: problem.seconds[kind] for kind in "FB"})
    assert known <= round(shortest(full) / shop.seconds_per_tick)
    if "I" not in problem.seconds:
        assert found.makespan_seconds <= optimum * (1 + 1e-9)
        assert found.gap == 0


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any work on any placement, with times that have no common unit."""
    work: Work = draw(works())
    num_ranks = draw(st.integers(1, 4))
    times = st.floats(0, 3, allow_subnormal=False) | st.sampled_from([0.0, 1.0])
    table = {k: draw(st.lists(times, min_size=work.num_stages, max_size=work.num_stages)) for k in "FBIW"}
    if draw(st.booleans()):
        del table["I"], table["W"]
    table["T"] = draw(st.lists(times, min_size=work.num_components, max_size=work.num_components))
    placement = tuple(draw(st.integers(0, num_ranks - 1)) for _ in range(work.num_stages))
    delay = draw(st.floats(0, 2))
    sizes = tuple(draw(st.integers(0, 9)) for _ in range(work.num_stages))
    limits = None
    if draw(st.booleans()):
        one = [sum(s for s, r in zip(sizes, placement, strict=True) if r == rank) for rank in range(num_ranks)]
        limits = tuple(o + draw(st.integers(0, 20)) for o in one)
    return Problem(work, placement, table, num_ranks, lambda a, b, kind: delay * (a != b), sizes, limits)


@given(problems())
@SLOW
def test_never_worse_than_a_name_and_always_correct(problem: Problem) -> None:
    found = synthesise(problem, budget_seconds=0.1)
    assert check(found.schedule, problem.work, problem.num_ranks) == []
    assert found.makespan_seconds == problem.simulate(found.schedule).makespan_seconds
    limits = problem.memory_limit_bytes
    for schedule in [found.schedule, *references(problem)]:
        within = limits is None or all(h <= limit for h, limit in zip(held(problem, schedule), limits, strict=True))
        if schedule is found.schedule:
            assert within
        elif within:
            seconds = problem.simulate(schedule).makespan_seconds
            assert found.makespan_seconds <= seconds
            assert found.lower_bound_seconds <= seconds * (1 + 1e-9)


def uniform(placement: tuple[int, ...], num_microbatches: int, forward: int, *, split: bool, limit: int) -> Problem:
    """Equal stages, backward twice the forward, one second between ranks; `limit` in activations of one stage."""
    count = len(placement)
    table = {"F": (forward,) * count, "B": (2 * forward,) * count}
    if split:
        table |= {"I": (forward,) * count, "W": (forward,) * count}
    return Problem(
        chain(count, num_microbatches),
        placement,
        table,
        lag=lambda a, b, kind: 0.0 if placement[a] == placement[b] else 1.0,
        activation_bytes=(1,) * count,
        memory_limit_bytes=(limit,) * (max(placement) + 1),
    )


def test_a_wave_is_shorter_than_1f1b_in_the_same_memory() -> None:
    linear = uniform((0, 1, 2, 3), 8, 20, split=False, limit=4)
    times = {s.name: linear.simulate(s).makespan_seconds for s in references(linear)}
    assert times["1f1b"] == 676
    wave = synthesise(uniform(wave_ranks(4), 8, 10, split=False, limit=8))
    assert wave.makespan_seconds == 612  # the least
    assert wave.lower_bound_seconds <= 612
    split = synthesise(uniform(wave_ranks(4), 8, 10, split=True, limit=8))
    assert split.makespan_seconds == 519  # the least
    assert split.lower_bound_seconds <= 519


def test_without_memory_limits_a_list_schedule_is_proven_shortest() -> None:
    problem = replace(uniform(wave_ranks(4), 8, 10, split=False, limit=8), memory_limit_bytes=None)
    found = synthesise(problem)
    assert (found.makespan_seconds, found.lower_bound_seconds, found.gap) == (576, 576, 0)
    assert "proven shortest" in str(found)


def test_a_budget_gives_one_schedule() -> None:
    for num_microbatches in (6, 12):
        problem = uniform(wave_ranks(4), num_microbatches, 7, split=True, limit=7)
        assert synthesise(problem, 0.4) == synthesise(problem, 0.4)


def test_jacksons_bound_is_the_preemptive_optimum() -> None:
    assert jackson([]) == 0
    assert jackson([(3, 2, 4)]) == 9
    assert jackson([(0, 4, 0), (1, 2, 9)]) == 12  # the second interrupts the first
    assert jackson([(0, 4, 1), (1, 2, 0), (20, 1, 0)]) == 21


def test_too_little_memory_is_refused() -> None:
    problem = replace(uniform(wave_ranks(2), 3, 1, split=False, limit=4), memory_limit_bytes=(1, 9))
    with pytest.raises(CompileError, match=r"no order fits into \(1, 9\) bytes .*rank 0 needs \d+ bytes, has 1;"):
        synthesise(problem)


def test_times_next_to_nothing_have_a_unit() -> None:
    """The smallest number there is has no half."""
    assert tick_seconds([5e-324]) == tick_seconds([0.0]) == 1.0
    assert tick_seconds([5e-324, 2.0, 3.0]) == 1.0
