"""Patterns that repeat: against brute force over every start, laid out over many periods, and as schedules."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule_check import check
from passes.placement.waves import wave_ranks
from passes.schedules.building_block import Operation, placed, shortest_block
from passes.schedules.job_shop import JobShop, job_shop, run, within_limits
from passes.schedules.periodic import repeating
from passes.schedules.problem import Problem, fits
from passes.schedules.ramps import short_count, squeezed
from passes.schedules.steady import greedy_patterns, least_period, peak_bytes, tight_patterns
from passes.schedules.unrolling import Pattern, estimated_ticks, one_microbatch, sample, unrolled_orders
from tests.test_schedule import chain
from tests.test_synthesis import held, uniform


def faults(one: JobShop, pattern: Pattern) -> list[str]:
    """What is wrong with a pattern, laid out over many periods: needs, overlaps, memory."""
    count = 8 * pattern.copies + 3 * pattern.copies * (pattern.flight // pattern.period + 1)
    begin = {(i, m): pattern.start(i, m) for i in range(len(one)) for m in range(count)}
    end = {(i, m): start + one.ticks[i] for (i, m), start in begin.items()}
    found = []
    for (i, m), start in begin.items():
        if any(start < end[need, m] + lag for need, lag in one.needs[i]):
            found.append(f"{i} of {m} starts before what it needs")
    for rank, mine in enumerate(one.on_rank):
        spans = sorted((begin[i, m], end[i, m]) for i in mine for m in range(count))
        found += [f"overlap on rank {rank}" for a, b in pairwise(spans) if b[0] < a[1]]
        if one.limits is not None:
            held = [
                (begin[i, m], end[one.freeing[i], m], one.taken[i])
                for i in mine
                for m in range(count)
                if i in one.freeing
            ]
            most = max((sum(size for a, b, size in held if a <= t < b) for t, _, _ in held), default=0)
            found += [f"rank {rank} holds {most}"] * (most > one.limits[rank])
    return found


@st.composite
def single_problems(draw: st.DrawFn) -> Problem:
    """A few stages on few ranks, small times."""
    placement = draw(st.sampled_from([(0,), (0, 1), (0, 1, 0), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 2)]))
    count = len(placement)
    times = st.tuples(*[st.integers(1, 5)] * count)
    table = {"F": draw(times), "B": draw(times)} | ({"I": draw(times), "W": draw(times)} if draw(st.booleans()) else {})
    delay, sizes = draw(st.integers(0, 2)), draw(times)
    own = [sum(s for s, r in zip(sizes, placement, strict=True) if r == rank) for rank in range(max(placement) + 1)]
    limits = tuple(o + draw(st.integers(0, 12)) for o in own) if draw(st.booleans()) else None
    return Problem(
        chain(count, 12),
        placement,
        table,
        lag=lambda a, b, kind: float(delay * (placement[a] != placement[b])),
        activation_bytes=sizes,
        memory_limit_bytes=limits,
    )


@given(single_problems(), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_patterns_repeat_without_a_fault(problem: Problem, copies: int) -> None:
    one = one_microbatch(problem, problem.splittable)
    patterns = list(greedy_patterns(one))
    found, _ = repeating(one, copies, int(1.3 * copies * least_period(one)), limit=0.05, seed=0)
    patterns += [] if found is None else [found]
    shop = job_shop(problem, problem.splittable)
    for pattern in patterns[:: max(1, len(patterns) // 6)] + patterns[-1:]:
        assert pattern.period >= least_period(one) * pattern.copies
        assert faults(one, pattern) == []
        orders = unrolled_orders(shop, one, pattern)
        schedule = shop.schedule("pattern", problem.work.num_stages, orders)
        assert check(schedule, problem.work, problem.num_ranks) == []
        assert fits(problem, schedule)
        limits = problem.memory_limit_bytes
        assert limits is None or all(h <= limit for h, limit in zip(held(problem, schedule), limits, strict=True))


@given(single_problems())
@settings(deadline=None, max_examples=20)
def test_a_peak_is_what_many_periods_hold(problem: Problem) -> None:
    one = one_microbatch(replace(problem, memory_limit_bytes=None), frozenset())
    for pattern in list(greedy_patterns(one))[::25]:
        tight = replace(one, limits=tuple(peak_bytes(one, pattern)))
        assert faults(tight, pattern) == []
        for rank, peak in enumerate(peak_bytes(one, pattern)):
            limits = [p - (r == rank) for r, p in enumerate(peak_bytes(one, pattern))]
            assert faults(replace(one, limits=tuple(limits)), pattern) == [f"rank {rank} holds {peak}"]


def possible(one: JobShop, period: int, horizon: int) -> bool:
    """Whether any starts below `horizon` are a pattern, by trying all."""
    first = one.heads[0]
    rest = [range(one.heads[i], horizon - one.ticks[i] + 1) for i in range(1, len(one))]
    for starts in product(*rest):
        pattern = Pattern(period, ((first, *starts),))
        late = all(
            pattern.starts[0][i] >= pattern.starts[0][need] + one.ticks[need] + lag
            for i in range(len(one))
            for need, lag in one.needs[i]
        )
        if late and faults(one, pattern) == []:
            return True
    return False


@pytest.mark.parametrize(
    ("placement", "forward", "backward", "delay", "limit"),
    [
        ((0, 1), (1, 2), (2, 1), 0, 2),
        ((0, 1), (1, 1), (1, 2), 1, 2),
        ((0, 0), (1, 2), (2, 2), 0, 3),
        ((0, 1), (2, 1), (1, 2), 1, 1),
        ((0, 0), (2, 1), (1, 3), 0, None),
    ],
)
def test_a_period_is_found_where_any_start_gives_one(
    placement: tuple[int, ...], forward: tuple[int, ...], backward: tuple[int, ...], delay: int, limit: int | None
) -> None:
    problem = Problem(
        chain(2, 1),
        placement,
        {"F": forward, "B": backward},
        lag=lambda a, b, kind: float(delay * (placement[a] != placement[b])),
        activation_bytes=(1, 1),
        memory_limit_bytes=None if limit is None else (limit,) * (max(placement) + 1),
    )
    one = one_microbatch(problem, frozenset())
    least = sum(one.ticks) + sum(lag for needs in one.needs for _, lag in needs)
    outcomes = set()
    for period in range(1, 9):
        found, _ = repeating(one, 1, period, limit=1.0, seed=0)
        expected = possible(one, period, int(2.5 * least))
        assert (found is not None) == expected, period
        assert not expected or period >= least_period(one)
        outcomes.add(expected)
    assert outcomes == {False, True}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=100)
def test_a_block_never_overlaps_its_repetitions(operations: list[tuple[int, int, int]], random: object) -> None:
    made = []
    for number, (rank, ticks, gap) in enumerate(operations):
        needs = ((number - 1, gap),) if number and gap else ()
        made.append(Operation(rank, ticks, needs))
    load = max(sum(o.ticks for o in made if o.rank == rank) for rank in range(3))
    block = shortest_block(lambda period: made, load)
    assert block.period >= load
    for i, a in enumerate(made):
        assert all(block.starts[i] >= block.starts[need] + gap for need, gap in a.needs)
        for j, b in enumerate(made[:i]):
            if a.rank == b.rank:
                ahead = (block.starts[i] - block.starts[j]) % block.period
                assert b.ticks <= ahead <= block.period - a.ticks
    assert placed(made, load - 1) is None


def test_memory_sets_the_period_and_several_micro_batches_shorten_it() -> None:
    """Stages of 10 and 20 on 4 ranks: 64 ticks at three quarters of 1F1B's memory, fewer than 82 at five eighths."""
    for limit, one_alone, several in [(6, 64, 64), (5, 82, 80)]:
        problem = uniform(wave_ranks(4), 32, 10, split=False, limit=limit)
        one = one_microbatch(problem, frozenset())
        patterns, _ = tight_patterns(one, limit=0.4, seed=0)
        assert all(faults(one, pattern) == [] for pattern in patterns)
        assert min(p.period for p in patterns if p.copies == 1) == one_alone
        assert min(p.period / p.copies for p in patterns) <= several


def test_ends_are_squeezed_whatever_the_number_of_micro_batches() -> None:
    problem = uniform(wave_ranks(3), 60, 10, split=False, limit=5)
    one, shop = one_microbatch(problem, frozenset()), job_shop(problem, frozenset())
    few = sample(problem, shop, frozenset())
    assert few.num_microbatches < 60
    pattern = min(greedy_patterns(one), key=lambda p: estimated_ticks(few, one, p, 60))
    plain = run(shop, unrolled_orders(shop, one, pattern)).ticks
    assert estimated_ticks(few, one, pattern, 60) == pytest.approx(plain, rel=0.05)
    assert short_count(pattern, 60) < 60
    orders, spent = squeezed(problem, shop, one, pattern, frozenset(), limit=0.3, seed=0)
    assert spent < 1
    assert within_limits(shop, orders)
    assert run(shop, orders).ticks < plain
    schedule = shop.schedule("squeezed", 6, orders)
    assert check(schedule, problem.work, 3) == []
    more = replace(problem, work=replace(problem.work, num_microbatches=90))
    longer = job_shop(more, frozenset())
    again, _ = squeezed(more, longer, one, pattern, frozenset(), limit=0.3, seed=0)
    gained = plain - run(shop, orders).ticks
    assert run(longer, unrolled_orders(longer, one, pattern)).ticks - run(longer, again).ticks == gained
