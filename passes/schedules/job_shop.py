"""A scheduling problem in whole ticks: operations by number, what each waits for, which rank does it.

    0F0 0F1 1F0 1F1 1B0 ...   ->   operation 0 on rank 0, 10 ticks
                                   operation 2 on rank 1, 10 ticks, at least 1 tick after the end of operation 0

Ticks round down, so a lower bound in ticks is one in seconds; makespans are told by the simulator, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from fxpipe.schedule import Action, Schedule
from passes.schedules.problem import Problem

Orders = tuple[tuple[int, ...], ...]
_MOST_TICKS = 100_000  # of the longest operation, where durations have no common unit
_NOTHING = 1e-290  # seconds: parts of less would be zero


@dataclass(frozen=True)
class JobShop:
    """Operations in an order in which each comes after all it needs.

    Terms: `needs[i]` are pairs (operation, ticks after its end); `taken` and `freed` are bytes at the start and the end
    of an operation; `ordered` says that micro-batches are interchangeable and pass every stage in order, so that
    `needs` holds that order and what memory implies, at no loss.
    """

    actions: tuple[Action, ...]
    rank: tuple[int, ...]
    ticks: tuple[int, ...]
    needs: tuple[tuple[tuple[int, int], ...], ...]
    taken: tuple[int, ...]
    freed: tuple[int, ...]
    limits: tuple[int, ...] | None
    num_ranks: int
    num_microbatches: int
    ordered: bool
    seconds_per_tick: float = field(compare=False)

    def __len__(self) -> int:
        return len(self.actions)

    @cached_property
    def index(self) -> dict[Action, int]:
        return {action: i for i, action in enumerate(self.actions)}

    @cached_property
    def users(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every operation the pairs (operation that waits for it, ticks between)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.actions]
        for i, needs in enumerate(self.needs):
            for need, lag in needs:
                found[need].append((i, lag))
        return tuple(map(tuple, found))

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The ticks before which an operation cannot start: the longest path to it."""
        head = [0] * len(self)
        for i, needs in enumerate(self.needs):
            head[i] = max((head[n] + self.ticks[n] + lag for n, lag in needs), default=0)
        return tuple(head)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """The ticks that must pass after the end of an operation: the longest path from it."""
        tail = [0] * len(self)
        for i in reversed(range(len(self))):
            tail[i] = max((lag + self.ticks[u] + tail[u] for u, lag in self.users[i]), default=0)
        return tuple(tail)

    @cached_property
    def on_rank(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(i for i in range(len(self)) if self.rank[i] == r) for r in range(self.num_ranks))

    @cached_property
    def freeing(self) -> dict[int, int]:
        """For every operation that takes memory the one that gives it back."""
        frees = {(a.stage, a.microbatch): i for i, a in enumerate(self.actions) if self.freed[i]}
        return {i: frees[a.stage, a.microbatch] for i, a in enumerate(self.actions) if self.taken[i]}

    def schedule(self, name: str, num_stages: int, orders: Orders) -> Schedule:
        ranks = tuple(tuple(self.actions[i] for i in order) for order in orders)
        return Schedule(name, num_stages, self.num_microbatches, ranks)

    def orders(self, schedule: Schedule) -> Orders:
        """The inverse of `schedule`."""
        return tuple(tuple(self.index[action] for action in actions) for actions in schedule.ranks)


def job_shop(problem: Problem, split: frozenset[int], relaxed: bool = False) -> JobShop:
    """The operations of `problem` with the backward of the stages `split` cut in two.

    `relaxed` shortens them where B and I + W differ, so that lower bounds hold for every mixture of both.
    """
    work = problem.work
    actions = _topological(problem, split)
    present = {action: i for i, action in enumerate(actions)}
    seconds = [_shortest(problem, a) if relaxed else problem.duration(a) for a in actions]
    lags = {pair: problem.lag(*pair) for a in actions for pair in _pairs(problem, a, present)}
    unit = tick_seconds([*seconds, *lags.values()])
    ordered = not work.num_components
    needs = []
    for i, action in enumerate(actions):
        found: dict[int, int] = {}
        for need in work.needs(action, present.keys()):
            pair = _pair(need, action)
            found[present[need]] = _floor(lags[pair], unit) if pair else 0
        if ordered:
            for earlier in _earlier(problem, action, split):
                found.setdefault(present[earlier], 0)
        assert all(need < i for need in found)
        needs.append(tuple(sorted(found.items())))
    return JobShop(
        actions,
        tuple(map(problem.rank, actions)),
        tuple(_floor(s, unit) for s in seconds),
        tuple(needs),
        tuple(map(problem.bytes_taken, actions)),
        tuple(problem.bytes_freed(a, split) for a in actions),
        problem.memory_limit_bytes,
        problem.num_ranks,
        work.num_microbatches,
        ordered,
        unit,
    )


def tick_seconds(values: Sequence[float]) -> float:
    """The unit of which all are multiples, or one in which rounding does not matter."""
    positive = [v for v in values if v > _NOTHING]
    if not positive:
        return 1.0
    smallest, largest = min(positive), max(positive)
    for parts in range(1, 61):
        unit = smallest / parts
        if largest / unit <= _MOST_TICKS and all(abs(v / unit - round(v / unit)) < 1e-9 * v / unit for v in positive):
            return unit
    return largest / _MOST_TICKS


def _floor(seconds: float, unit: float) -> int:
    return int(seconds / unit * (1 + 1e-9))


def _shortest(problem: Problem, action: Action) -> float:
    kind, stage = action.kind, action.stage
    if kind not in "IW":
        return problem.duration(action)
    full, first = float(problem.seconds["B"][stage]), float(problem.seconds["I"][stage])
    if kind == "I":
        return min(full, first)
    return min(full, first + float(problem.seconds["W"][stage])) - min(full, first)


def _topological(problem: Problem, split: frozenset[int]) -> tuple[Action, ...]:
    """Micro-batch after micro-batch, each in an order that its needs allow."""
    actions = problem.actions(split)
    first = {a for a in actions if a.microbatch == 0}
    graph = {a: sorted(problem.work.needs(a, first)) for a in sorted(first)}
    order = list(TopologicalSorter(graph).static_order())
    return tuple(Action(a.stage, a.kind, m) for m in range(problem.work.num_microbatches) for a in order)


def _pair(need: Action, action: Action) -> tuple[int, int, str] | None:
    """The arguments of the lag between two actions; None where nothing travels."""
    if action.kind == "T" or (need.stage == action.stage and need.kind != "T"):
        return None
    return need.stage, action.stage, need.kind.replace("I", "B")


def _pairs(problem: Problem, action: Action, present: dict[Action, int]) -> list[tuple[int, int, str]]:
    return [p for need in problem.work.needs(action, present.keys()) if (p := _pair(need, action))]


def _earlier(problem: Problem, action: Action, split: frozenset[int]) -> list[Action]:
    """The same action of the micro-batch before, and for a forward the one that must have freed its memory.

    Sorted by start, interchangeable micro-batches can be renamed so that every stage takes them in order.
    """
    found = [Action(action.stage, action.kind, action.microbatch - 1)] if action.microbatch else []
    if problem.bytes_taken(action) and problem.memory_limit_bytes is not None:
        room = problem.memory_limit_bytes[problem.rank(action)] // problem.bytes_taken(action)
        if 1 <= room <= action.microbatch:
            last = problem.backward_kinds(action.stage, split)[-1]
            found.append(Action(action.stage, last, action.microbatch - room))
    return found


@dataclass(frozen=True)
class Run:
    """Starts of all operations, and the operations in an order in which each comes after all that delay it."""

    ticks: int
    start: tuple[int, ...]
    visited: tuple[int, ...]


def run(shop: JobShop, orders: Orders) -> Run:
    """Ranks keep their order and start as early as they can."""
    start = [-1] * len(shop)
    visited: list[int] = []
    position, free, ready = [0] * len(orders), [0] * len(orders), list(range(len(orders)))
    waiting: dict[int, list[int]] = {}
    while ready:
        rank = ready.pop()
        order, begin = orders[rank], free[rank]
        for i in order[position[rank] :]:
            for need, lag in shop.needs[i]:
                if start[need] < 0:
                    waiting.setdefault(need, []).append(rank)
                    break
                begin = max(begin, start[need] + shop.ticks[need] + lag)
            else:
                start[i] = begin
                begin = free[rank] = begin + shop.ticks[i]
                visited.append(i)
                position[rank] += 1
                if i in waiting:
                    ready += waiting.pop(i)
                continue
            break
    assert len(visited) == len(shop), "the orders wait for each other"
    return Run(max(free, default=0), tuple(start), tuple(visited))


def within_limits(shop: JobShop, orders: Orders) -> bool:
    """Whether no rank ever holds more than its limit."""
    if shop.limits is None:
        return True
    for order, limit in zip(orders, shop.limits, strict=True):
        held = 0
        for i in order:
            held += shop.taken[i]
            if held > limit:
                return False
            held -= shop.freed[i]
    return True
