"""Local search: reorder one window of a schedule after another, each nearly optimally, while that helps.

    rank 0:  ....[    ]......        the window jumps to a random place in time
    rank 1:  ....[    ]......

An equally good order is taken, too, so that the search drifts on where no single window improves; where that does not
help for long, it begins anew from another order, with more time for each window.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from passes.schedules.exact import Solved, reorder
from passes.schedules.job_shop import JobShop, JobStarts, RankOrders, run

# Measured on 48 pipelines of 2 to 8 ranks and 2 to 32 micro-batches, loose and tight in memory, half a second and a
# second each: windows of twice the size, or of five times the limit, end 0.2 to 1 % longer on average.
_SMALLEST, _FIRST_SIZE = 16, 48.0  # operations of a window
_SPREAD = 0.4  # of the size by which windows vary around it
_GROWTH, _EASY = 1.1, 0.25  # a window that took less than this share of its limit may grow
_IDLE = 0.5  # the share of windows around an idle moment
_FIRST_LIMIT = 0.01  # deterministic seconds for one window: twice as many after each stall
_PATIENCE = 20  # windows without gain: a stall, after which another start is taken
# What is counted as time, in place of a clock: a fit to 271 windows on one core of a server.
_SECONDS_PER_SOLVER_SECOND = 3.0  # of OR-tools' deterministic seconds
_SECONDS_PER_OPERATION, _SECONDS_PER_WINDOW, _SECONDS_PER_FREE = 10e-6, 1e-3, 90e-6  # besides the solver


def improve(shop: JobShop, starts: Sequence[RankOrders], *, limit: float, bound_ticks: int) -> Solved:
    """Search for about `limit` seconds, counted in steps rather than by a clock: the result is the same every time.

    A window that holds everything proves a bound, too: small schedules end as the shortest.

    Args:
        starts: orders to begin from in turn, the best first; where all have been, the best that is known ends the list.
    """
    random, waiting = Random(0), list(starts[1:])
    known = run(shop, starts[0])
    best = found = Solved(starts[0], known.ticks, bound_ticks)
    size, most, stale = _FIRST_SIZE, _FIRST_LIMIT, 0
    while best.ticks > found.bound_ticks and found.spent < limit:
        window = _window(shop, found.orders, known, int(size * random.uniform(1 - _SPREAD, 1 + _SPREAD)), random)
        step = reorder(
            shop, found.orders, window, limit=most, seed=random.randrange(2**31),
            bound_ticks=found.bound_ticks, known=known,
        )  # fmt: skip
        if step.spent < _EASY * most:
            size = min(size * _GROWTH, float(len(shop)))
        elif step.spent >= most:
            size = max(size / _GROWTH, _SMALLEST)
        stale = 0 if step.ticks < found.ticks else stale + 1
        if step.orders != found.orders:
            known = run(shop, step.orders)
        bound = step.bound_ticks if len(window) == len(shop) else found.bound_ticks
        found = replace(step, bound_ticks=bound, spent=found.spent + _seconds(shop, window, step))
        best = min(found, best, key=lambda solved: solved.ticks)
        if stale < _PATIENCE:
            continue
        most, stale = 2 * most, 0
        if waiting:
            size = _FIRST_SIZE
            start = waiting.pop(0)
            known = run(shop, start)
            found = replace(found, orders=start, ticks=known.ticks)
            waiting += [] if waiting or start is best.orders else [best.orders]
    return replace(best, bound_ticks=min(best.ticks, found.bound_ticks), spent=found.spent)


def _seconds(shop: JobShop, window: frozenset[int], step: Solved) -> float:
    """What a step counts as, in place of a clock."""
    around = _SECONDS_PER_WINDOW + len(shop) * _SECONDS_PER_OPERATION + len(window) * _SECONDS_PER_FREE
    return step.spent * _SECONDS_PER_SOLVER_SECOND + around


def _window(shop: JobShop, orders: RankOrders, known: JobStarts, size: int, random: Random) -> frozenset[int]:
    """Operations that start one after the other: around a random idle moment, or anywhere, the ends included."""
    times = sorted(known.start)
    size = min(max(size, 1), len(times))
    if random.random() < _IDLE:
        middle = bisect(times, _idle_moment(shop, orders, known, random))
    else:
        middle = random.randrange(len(times) + size) - size // 2
    first = min(max(middle - size // 2, 0), len(times) - size)
    low, high = times[first], times[first + size] if first + size < len(times) else times[-1] + 1
    return frozenset(i for i, start in enumerate(known.start) if low <= start < high)


def _idle_moment(shop: JobShop, orders: RankOrders, known: JobStarts, random: Random) -> int:
    """A moment in which a rank is idle, each as likely as any other."""
    gaps: list[tuple[int, int]] = []
    for order in orders:
        begins = [*(known.start[i] for i in order), known.ticks]
        ends = [0, *(known.start[i] + shop.ticks[i] for i in order)]
        gaps += [gap for gap in zip(ends, begins, strict=True) if gap[0] < gap[1]]
    if not gaps:
        return 0
    begin, end = random.choices(gaps, [end - begin for begin, end in gaps])[0]
    return random.randrange(begin, end)
