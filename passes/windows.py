"""Local search: reorder one window of a schedule after another, each nearly optimally, while that helps.

    rank 0:  ....[    ]......        the window jumps to a random place in time
    rank 1:  ....[    ]......

An equally good order is taken, too, so that the search drifts on where no single window improves.
"""

from dataclasses import replace
from random import Random

from passes.exact import Solved, reorder
from passes.job_shop import JobShop, Orders, run

_SIZES, _LARGE_SIZES = (32, 64, 96), (64, 96, 128)  # operations of a window; the latter above 512 in all, measured
_SUB_LIMIT = 0.05  # deterministic seconds for one window
SECONDS_PER_SEARCHING_SECOND, SECONDS_PER_PROVING_SECOND = 2.0, 4.0  # per deterministic second of OR-tools, measured
_SECONDS_PER_OPERATION, _SECONDS_PER_WINDOW = 15e-6, 5e-3  # what surrounds the solver's own work, measured


def improve(shop: JobShop, orders: Orders, *, limit: float, seed: int, bound_ticks: int) -> Solved:
    """Search for about `limit` seconds, counted in steps rather than by a clock: the result is the same every time."""
    random = Random(seed)
    found = Solved(orders, run(shop, orders).ticks, bound_ticks)
    while found.ticks > bound_ticks and found.spent < limit:
        window = _window(shop, found.orders, random)
        step = reorder(
            shop, found.orders, window, limit=_SUB_LIMIT, seed=random.randrange(2**31), bound_ticks=bound_ticks
        )
        spent = step.spent * SECONDS_PER_SEARCHING_SECOND
        spent += _SECONDS_PER_WINDOW + len(shop) * _SECONDS_PER_OPERATION
        found = replace(step, bound_ticks=bound_ticks, spent=found.spent + spent)
    return found


def _window(shop: JobShop, orders: Orders, random: Random) -> frozenset[int]:
    """The operations that start in a random interval; near the ends as often as elsewhere."""
    start = run(shop, orders).start
    size = min(random.choice(_SIZES if len(shop) <= 512 else _LARGE_SIZES), len(shop))
    first = min(max(random.randrange(-size // 2, len(shop) - size // 2), 0), len(shop) - size)
    times = sorted(start)
    low, high = times[first], times[first + size] if first + size < len(shop) else times[-1] + 1
    return frozenset(i for i, time in enumerate(start) if low <= time < high)
