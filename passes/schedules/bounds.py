"""Lower bounds on a makespan: no schedule is shorter, so what reaches one needs no further search.

    rank 2   |head| busy, with gaps it cannot avoid |tail|      head, tail: the longest paths to and from an operation

Jackson's one-machine bound (J. R. Jackson, 1955; Carlier, "The one-machine sequencing problem", 1982): one rank alone,
with preemption, every operation waiting for its head and followed by its tail, is solved exactly by starting whatever
has arrived and has the longest tail.
"""

import heapq
from collections.abc import Iterable

from passes.schedules.job_shop import JobShop


def lower_bound_ticks(shop: JobShop) -> int:
    """The best of the longest path and of Jackson's bound of every rank."""
    path = max((h + t + q for h, t, q in zip(shop.heads, shop.ticks, shop.tails, strict=True)), default=0)
    one_machine = (jackson((shop.heads[i], shop.ticks[i], shop.tails[i]) for i in ops) for ops in shop.on_rank)
    return max([path, *one_machine])


def jackson(jobs: Iterable[tuple[int, int, int]]) -> int:
    """The shortest preemptive makespan of (head, ticks, tail) on one machine, tails included. O(n log n)."""
    arrivals = sorted(jobs)
    waiting: list[list[int]] = []  # [-tail, ticks left], a heap
    now = bound = position = 0
    while waiting or position < len(arrivals):
        if not waiting:
            now = max(now, arrivals[position][0])
        while position < len(arrivals) and arrivals[position][0] <= now:
            _, ticks, tail = arrivals[position]
            heapq.heappush(waiting, [-tail, ticks])
            position += 1
        until = arrivals[position][0] if position < len(arrivals) else None
        job = waiting[0]
        run = job[1] if until is None else min(job[1], until - now)
        now += run
        job[1] -= run
        if job[1] == 0:
            bound = max(bound, now - job[0])
            heapq.heappop(waiting)
    return bound
