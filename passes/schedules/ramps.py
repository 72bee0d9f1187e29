"""Squeeze the start-up and the drain of a pattern, apart from how often it repeats.

    start-up   |  two periods, as they are  |  drain          a few micro-batches: windows move at either side only
    start-up   |  as many periods as wanted |  drain          then the middle repeats

The search costs what a few micro-batches cost, whatever their number.
"""

from dataclasses import replace
from math import ceil

from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.job_shop import JobShop, Orders, job_shop
from passes.schedules.problem import Problem
from passes.schedules.unrolling import Pattern, unrolled, unrolled_starts
from passes.schedules.windows import improve

_KEPT = 2  # periods that stay as they are
_RAMP = 2.0  # of what moves at either side, in flights of a micro-batch


def short_count(pattern: Pattern, num_microbatches: int) -> int:
    """Micro-batches after which the pattern has begun and two periods have passed, and as many too many."""
    rounds = ceil((2 * _RAMP - 1) * pattern.flight / pattern.period) + _KEPT + 1
    return pattern.copies * rounds + num_microbatches % pattern.copies


def squeezed(
    problem: Problem, shop: JobShop, one: JobShop, pattern: Pattern, split: frozenset[int], *, limit: float, seed: int
) -> tuple[Orders, float]:
    """(orders of all micro-batches, the seconds spent as `windows.improve` counts them).

    `shop` has more than `short_count` micro-batches and no frozen work.
    """
    count = short_count(pattern, shop.num_microbatches)
    short = job_shop(replace(problem, work=replace(problem.work, num_microbatches=count)), split)
    starts = unrolled_starts(short, one, pattern)
    first = min(starts) + int(_RAMP * pattern.flight)
    last = max(starts) - int(_RAMP * pattern.flight)
    assert first <= last
    early = frozenset(i for i, start in enumerate(starts) if start < first)
    late = frozenset(i for i, start in enumerate(starts) if start >= last)
    found = improve(
        short,
        unrolled(short, starts),
        limit=limit,
        seed=seed,
        bound_ticks=lower_bound_ticks(short),
        regions=(early, late),
    )
    return _extended(shop, short, one, pattern, found.orders, starts, (first + last) // 2), found.spent


def _extended(
    shop: JobShop, short: JobShop, one: JobShop, pattern: Pattern, orders: Orders, starts: list[int], cut: int
) -> Orders:
    """What the short schedule does before `cut`, the pattern's periods, and the rest for later micro-batches."""
    more = shop.num_microbatches - short.num_microbatches
    rounds = more // pattern.copies
    middle = unrolled_starts(shop, one, pattern)
    repeated = unrolled(shop, middle)
    until = cut + rounds * pattern.period
    found = []
    for order, pattern_order in zip(orders, repeated, strict=True):
        before = [shop.index[short.actions[i]] for i in order if starts[i] < cut]
        between = [i for i in pattern_order if cut <= middle[i] < until]
        later = [short.actions[i] for i in order if starts[i] >= cut]
        after = [shop.index[replace(a, microbatch=a.microbatch + more)] for a in later]
        found.append((*before, *between, *after))
    return tuple(found)
