"""Many quick schedules: whenever a rank is idle it starts the best of its operations that have arrived.

    a rule = what is best                              x  how many micro-batches may be in flight
             (kind first, or a due date per operation)    (1F1B's number per stage, times a factor; or memory alone)

Memory is lent as a banker does: a forward starts only when, after it, one slot for every later stage of its rank is
left. The last stages can then always end, which frees what the stages before them wait for, so that nothing deadlocks.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from passes.schedules.job_shop import JobShop, Orders

_TURNS = {  # which kind goes first
    "forward": {"T": 0, "F": 1, "B": 2, "I": 2, "W": 3},
    "backward": {"T": 0, "F": 2, "B": 1, "I": 1, "W": 3},
    "weight": {"T": 0, "F": 3, "B": 1, "I": 1, "W": 2},
}


@dataclass(frozen=True)
class Rule:
    """One schedule of the portfolio: the operation with the smallest `urgency` is best.

    `in_flight` bounds micro-batches per stage, in multiples of 1F1B's; None leaves that to memory.
    """

    name: str
    urgency: tuple[tuple[float, ...], ...]
    in_flight: float | None


def rules(shop: JobShop) -> Iterator[Rule]:
    """The portfolio."""
    urgencies = dict(_urgencies(shop))
    for factor in (1.0, None, 1.5, 1.25, 2.0, 0.75):
        for name, urgency in urgencies.items():
            yield Rule(f"{name}, in flight {factor or 'any'}", urgency, factor)


def list_orders(shop: JobShop, rule: Rule) -> Orders | None:
    """The order on every rank; None where memory stops it, which the banker's rule excludes for chains of stages."""
    return _Run(shop, rule).orders()


def _urgencies(shop: JobShop) -> Iterator[tuple[str, tuple[tuple[float, ...], ...]]]:
    actions, tails = shop.actions, _own_tails(shop)
    loads = [sum(shop.ticks[i] for i in ops) for ops in shop.on_rank]
    period = max(loads, default=0) / max(shop.num_microbatches, 1)
    for pace in (1.0, 0.5, 0.75, 0.25, 1.5):  # micro-batch m should end m * pace periods after the first
        due = ((a.microbatch * pace * period - tails[i], a.microbatch) for i, a in enumerate(actions))
        yield f"due at pace {pace:g}", tuple(due)
    for first, turn in _TURNS.items():
        yield f"{first} first", tuple((turn[a.kind], a.microbatch, tails[i]) for i, a in enumerate(actions))
    turn, group = _TURNS["forward"], max(shop.num_ranks, 1)
    grouped = ((turn[a.kind], a.microbatch // group, -tails[i]) for i, a in enumerate(actions))
    yield "groups", tuple(grouped)


def _own_tails(shop: JobShop) -> list[int]:
    """The longest path from the end of an operation within its own micro-batch."""
    tails = [0] * len(shop)
    for i in reversed(range(len(shop))):
        same = (u for u in shop.users[i] if shop.actions[u[0]].microbatch == shop.actions[i].microbatch)
        tails[i] = max((lag + shop.ticks[u] + tails[u] for u, lag in same), default=0)
    return tails


def _in_flight_needs(shop: JobShop, factor: float | None) -> dict[int, int]:
    """Forward -> the operation that ends the micro-batch so many before it on the same stage."""
    if factor is None:
        return {}
    last = {(a.stage, a.microbatch): i for i, a in enumerate(shop.actions) if a.kind in "BW"}
    depth = [0] * len(shop)
    found = {}
    for i in reversed(range(len(shop))):
        action = shop.actions[i]
        if action.kind == "F":
            ahead = (
                u for u, _ in shop.users[i] if shop.actions[u].kind == "F" and shop.actions[u].stage != action.stage
            )
            depth[i] = 1 + max((depth[u] for u in ahead), default=0)
            earlier = last.get((action.stage, action.microbatch - ceil(factor * depth[i])))
            if earlier is not None:
                found[i] = earlier
    return found


class _Run:
    """One event-driven run of the list scheduler."""

    def __init__(self, shop: JobShop, rule: Rule) -> None:
        self.shop, self.rule = shop, rule
        self.limit_of = _in_flight_needs(shop, rule.in_flight)
        self.missing = [len(needs) + (i in self.limit_of) for i, needs in enumerate(shop.needs)]
        self.limit_users: dict[int, list[int]] = {}
        for i, need in self.limit_of.items():
            self.limit_users.setdefault(need, []).append(i)
        self.arrival = [0] * len(shop)
        self.ready: list[list[tuple[tuple[float, ...], int]]] = [[] for _ in range(shop.num_ranks)]
        self.events: list[tuple[int, int, int]] = []  # (time, 0 an operation ends or 1 it has arrived, operation)
        self.idle = [True] * shop.num_ranks
        self.held = [0] * shop.num_ranks
        self.reserve = _reserves(shop)
        self.order: list[list[int]] = [[] for _ in range(shop.num_ranks)]

    def orders(self) -> Orders | None:
        for i, count in enumerate(self.missing):
            if count == 0:
                heapq.heappush(self.ready[self.shop.rank[i]], (self.rule.urgency[i], i))
        changed = set(range(self.shop.num_ranks))
        now = 0
        while True:
            for rank in sorted(changed):
                if self.idle[rank] and self.ready[rank]:
                    self._start_best(rank, now)
            if not self.events:
                break
            now = self.events[0][0]
            changed = set()
            while self.events and self.events[0][0] == now:
                changed.add(self._happen(*heapq.heappop(self.events)))
        return tuple(map(tuple, self.order)) if sum(map(len, self.order)) == len(self.shop) else None

    def _start_best(self, rank: int, now: int) -> None:
        heap, refused = self.ready[rank], []
        while heap:
            best = heapq.heappop(heap)
            i = best[1]
            if self._admits(i, rank):
                self.order[rank].append(i)
                self.held[rank] += self.shop.taken[i]
                self.idle[rank] = False
                heapq.heappush(self.events, (now + self.shop.ticks[i], 0, i))
                break
            refused.append(best)
        for entry in refused:
            heapq.heappush(heap, entry)

    def _admits(self, i: int, rank: int) -> bool:
        limits, taken = self.shop.limits, self.shop.taken[i]
        return limits is None or not taken or self.held[rank] + taken + self.reserve[i] <= limits[rank]

    def _happen(self, now: int, kind: int, i: int) -> int:
        rank = self.shop.rank[i]
        if kind == 1:
            heapq.heappush(self.ready[rank], (self.rule.urgency[i], i))
            return rank
        self.idle[rank] = True
        self.held[rank] -= self.shop.freed[i]
        for user, lag in (*self.shop.users[i], *((u, 0) for u in self.limit_users.get(i, ()))):
            self.arrival[user] = max(self.arrival[user], now + lag)
            self.missing[user] -= 1
            if not self.missing[user]:
                heapq.heappush(self.events, (self.arrival[user], 1, user))
        return rank


def _reserves(shop: JobShop) -> Sequence[int]:
    """For every forward, the bytes that the later stages of its rank take for one micro-batch."""
    reserves, later = [0] * len(shop), dict[tuple[int, int], int]()
    for i in reversed(range(len(shop))):
        key = shop.rank[i], shop.actions[i].microbatch
        reserves[i] = later.get(key, 0)
        later[key] = reserves[i] + shop.taken[i]
    return reserves
