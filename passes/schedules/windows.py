"""Local search: reorder one window of a schedule after another, each nearly optimally, while that helps.

    rank 0:  ....[    ]......        the window jumps to a random place in time
    rank 1:  ....[    ]......

An equally good order is taken, too, so that the search drifts on where no single window improves.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from passes.schedules.exact import Solved, reorder
from passes.schedules.job_shop import JobShop, Orders, Run, run

_SMALLEST, _FIRST_SIZE = 16, 64.0  # operations of a window
_GROWTH, _EASY = 1.1, 0.25  # a window that took less than this share of its limit may grow
_IDLE = 0.5  # the share of windows around an idle moment
_SUB_LIMIT = 0.05  # deterministic seconds for one window
SECONDS_PER_SOLVER_SECOND = 4.0  # of OR-tools' deterministic seconds, measured
_SECONDS_PER_OPERATION, _SECONDS_PER_WINDOW, _SECONDS_PER_FREE = 15e-6, 5e-3, 100e-6  # besides the solver, measured


def improve(
    shop: JobShop,
    orders: Orders,
    *,
    limit: float,
    seed: int,
    bound_ticks: int,
    regions: Sequence[frozenset[int]] = (),
) -> Solved:
    """Search for about `limit` seconds, counted in steps rather than by a clock: the result is the same every time.

    Args:
        regions: parts of the schedule, from its start or from its end, outside of which nothing is moved; any window
            is inside one of them. Everything moves where left out.
    """
    random = Random(seed)
    known = run(shop, orders)
    found = Solved(orders, known.ticks, bound_ticks)
    size = _FIRST_SIZE
    while found.ticks > bound_ticks and found.spent < limit:
        region = random.choice(regions) if regions else None
        window = _window(shop, found.orders, known, int(size * random.uniform(0.6, 1.4)), region, random)
        step = reorder(
            shop,
            found.orders,
            window,
            limit=_SUB_LIMIT,
            seed=random.randrange(2**31),
            bound_ticks=bound_ticks,
            known=known,
        )
        if step.spent < _EASY * _SUB_LIMIT:
            size = min(size * _GROWTH, float(len(shop)))
        elif step.spent >= _SUB_LIMIT:
            size = max(size / _GROWTH, _SMALLEST)
        if step.orders != found.orders:
            known = run(shop, step.orders)
        spent = step.spent * SECONDS_PER_SOLVER_SECOND + _SECONDS_PER_WINDOW
        spent += len(shop) * _SECONDS_PER_OPERATION + len(window) * _SECONDS_PER_FREE
        found = replace(step, bound_ticks=bound_ticks, spent=found.spent + spent)
    return found


def _window(
    shop: JobShop, orders: Orders, known: Run, size: int, region: frozenset[int] | None, random: Random
) -> frozenset[int]:
    """Operations that start one after the other: around a random idle moment, or anywhere, the ends included."""
    free = range(len(known.start)) if region is None else region
    times = sorted(known.start[i] for i in free)
    size = min(max(size, 1), len(times))
    if random.random() < _IDLE:
        middle = bisect(times, _idle_moment(shop, orders, known, random))
    else:
        middle = random.randrange(len(times) + size) - size // 2
    first = min(max(middle - size // 2, 0), len(times) - size)
    low, high = times[first], times[first + size] if first + size < len(times) else times[-1] + 1
    return frozenset(i for i in free if low <= known.start[i] < high)


def _idle_moment(shop: JobShop, orders: Orders, known: Run, random: Random) -> int:
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
