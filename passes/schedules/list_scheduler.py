"""The list scheduler: whenever a rank is idle it starts the most urgent of its operations that have arrived.

    urgency 0 1 2 ...   a number per operation, the smallest first      rank 0: 0F0 0F1 0B0 0F2 ...
    also                what else an operation waits for           ->   rank 1: 1F0 1B0 1F1 1B1 ...

Memory is lent as a banker does: a forward starts only when, after it, one slot for every later stage of its rank is
left. The last stages can then always end, which frees what the stages before them wait for, so that nothing deadlocks.
"""

import heapq
from collections.abc import Mapping, Sequence

from passes.schedules.job_shop import JobShop, RankOrders


class ListScheduler:
    """One event-driven run.

    Args:
        urgency: a permutation of the operations' numbers.
        also: operation -> operations that must end before it, besides those of `shop`; without a cycle.
    """

    def __init__(self, shop: JobShop, urgency: Sequence[int], also: Mapping[int, Sequence[int]]) -> None:
        self.shop, self.urgency = shop, urgency
        self.number = sorted(range(len(shop)), key=urgency.__getitem__)
        self.missing = [len(needs) + len(also.get(i, ())) for i, needs in enumerate(shop.needs)]
        self.also_users: dict[int, list[int]] = {}
        for i, needs in also.items():
            for need in needs:
                self.also_users.setdefault(need, []).append(i)
        self.arrival = [0] * len(shop)
        self.ready: list[list[int]] = [[] for _ in range(shop.num_ranks)]  # urgencies, a heap per rank
        self.events: list[tuple[int, bool, int]] = []  # (time, it has arrived rather than ended, operation), a heap
        self.idle = [True] * shop.num_ranks
        self.held = [0] * shop.num_ranks
        self.reserve = _reserves(shop) if shop.limits is not None else ()
        self.order: list[list[int]] = [[] for _ in range(shop.num_ranks)]

    def orders(self) -> RankOrders | None:
        """Of every rank; None where memory stops it, which the banker's rule excludes for chains of stages."""
        for i, count in enumerate(self.missing):
            if not count:
                heapq.heappush(self.ready[self.shop.rank[i]], self.urgency[i])
        changed, now = set(range(self.shop.num_ranks)), 0
        while True:
            for rank in changed:
                if self.idle[rank] and self.ready[rank]:
                    self._start_best(rank, now)
            if not self.events:
                break
            now, changed = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, arrived, i = heapq.heappop(self.events)
                if arrived:
                    self._arrive(i, changed)
                else:
                    self._end(i, now, changed)
        return tuple(map(tuple, self.order)) if sum(map(len, self.order)) == len(self.shop) else None

    def _start_best(self, rank: int, now: int) -> None:
        heap, refused = self.ready[rank], []
        while heap:
            best = heapq.heappop(heap)
            i = self.number[best]
            if self._admits(i, rank):
                self.order[rank].append(i)
                self.held[rank] += self.shop.taken[i]
                self.idle[rank] = False
                heapq.heappush(self.events, (now + self.shop.ticks[i], False, i))
                break
            refused.append(best)
        for best in refused:
            heapq.heappush(heap, best)

    def _admits(self, i: int, rank: int) -> bool:
        limits, taken = self.shop.limits, self.shop.taken[i]
        return limits is None or not taken or self.held[rank] + taken + self.reserve[i] <= limits[rank]

    def _arrive(self, i: int, changed: set[int]) -> None:
        rank = self.shop.rank[i]
        heapq.heappush(self.ready[rank], self.urgency[i])
        changed.add(rank)

    def _end(self, i: int, now: int, changed: set[int]) -> None:
        rank = self.shop.rank[i]
        self.idle[rank] = True
        self.held[rank] -= self.shop.freed[i]
        changed.add(rank)
        for user, lag in self.shop.users[i]:
            self._serve(user, now + lag, now, changed)
        for user in self.also_users.get(i, ()):
            self._serve(user, now, now, changed)

    def _serve(self, user: int, at: int, now: int, changed: set[int]) -> None:
        self.arrival[user] = max(self.arrival[user], at)
        self.missing[user] -= 1
        if self.missing[user]:
            return
        if self.arrival[user] == now:
            self._arrive(user, changed)
        else:
            heapq.heappush(self.events, (self.arrival[user], True, user))


def _reserves(shop: JobShop) -> Sequence[int]:
    """For every forward, the bytes that the later stages of its rank take for one micro-batch."""
    reserves, later = [0] * len(shop), dict[tuple[int, int], int]()
    for i in reversed(range(len(shop))):
        key = shop.rank[i], shop.actions[i].microbatch
        reserves[i] = later.get(key, 0)
        later[key] = reserves[i] + shop.taken[i]
    return reserves
