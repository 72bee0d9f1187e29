"""A scheduling problem in whole ticks: operations by number, what each waits for, which rank does it.

    0F0 0F1 1F0 1F1 1B0 ...   ->   operation 0 on rank 0, 10 ticks
                                   operation 2 on rank 1, 10 ticks, at least 1 tick after the end of operation 0

Ticks round down, so a lower bound in ticks is one in seconds; makespans are told by the simulator, in seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.schedule import Schedule
from passes.schedules.problem import Problem, most_held

RankOrders = tuple[tuple[int, ...], ...]
_MOST_TICKS = 100_000  # of the longest operation, where durations have no common unit
_NOTHING = 1e-290  # seconds: parts of less would be zero


@dataclass(frozen=True)
class JobShop:
    """Operations in an order in which each comes after all it needs, micro-batch after micro-batch.

    Terms: `needs[i]` are pairs (operation, ticks after its end); `taken` and `freed` are bytes at the start and the end
    of an operation. Without frozen work, micro-batches are interchangeable and pass every stage in order, so that
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
    def on_rank(self) -> RankOrders:
        found: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for i, rank in enumerate(self.rank):
            found[rank].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def freeing(self) -> dict[int, int]:
        """For every operation that takes memory the one that gives it back."""
        frees = {(a.stage, a.microbatch): i for i, a in enumerate(self.actions) if self.freed[i]}
        return {i: frees[a.stage, a.microbatch] for i, a in enumerate(self.actions) if self.taken[i]}

    def schedule(self, name: str, num_stages: int, orders: RankOrders) -> Schedule:
        ranks = tuple(tuple(self.actions[i] for i in order) for order in orders)
        return Schedule(name, num_stages, self.num_microbatches, ranks)

    def orders(self, schedule: Schedule) -> RankOrders:
        """The inverse of `schedule`."""
        return tuple(tuple(self.index[action] for action in actions) for actions in schedule.ranks)


def job_shop(problem: Problem, split: frozenset[int], relaxed: bool = False) -> JobShop:
    """The operations of `problem` with the backward of the stages `split` cut in two.

    `relaxed` shortens them where B and I + W differ, so that lower bounds hold for every mixture of both.
    """
    work = problem.work
    one = one_microbatch(work, split)
    pairs = within(work, one)
    seconds = [_shortest(problem, a) if relaxed else problem.duration(a) for a in one]
    lags = [[_lag(problem, one[need], action) for need in needs] for action, needs in zip(one, pairs, strict=True)]
    unit = tick_seconds([*seconds, *(lag for several in lags for lag in several)])
    inner = [[(n, _floor(t, unit)) for n, t in zip(*pair, strict=True)] for pair in zip(pairs, lags, strict=True)]
    earlier = [[] if work.num_components else list(_earlier(problem, one, j, split)) for j in range(len(one))]
    return repeated(
        one, work.num_microbatches, problem.rank, problem.num_ranks, [_floor(s, unit) for s in seconds], inner, earlier,
        [problem.bytes_taken(a) for a in one], [problem.bytes_freed(a, split) for a in one],
        problem.memory_limit_bytes, unit,
    )  # fmt: skip


def one_microbatch(work: Work, split: frozenset[int]) -> list[Action]:
    """The actions of micro-batch 0, each after all it needs, frozen work first; the stages `split` have I and W."""
    first = [Action(component, "T", 0) for component in range(work.num_components)]
    for stage in work.stages:
        kinds = "F" if stage not in work.backward else "FIW" if stage in split else "FB"
        first += [Action(stage, kind, 0) for kind in kinds]
    present = {*first}
    graph = {a: sorted(work.needs(a, present)) for a in sorted(first)}
    frozen = {a: needs for a, needs in graph.items() if a.kind == "T"}
    others = {a: [n for n in needs if n.kind != "T"] for a, needs in graph.items() if a.kind != "T"}
    return [*TopologicalSorter(frozen).static_order(), *TopologicalSorter(others).static_order()]


def within(work: Work, one: Sequence[Action]) -> list[list[int]]:
    """What every action of micro-batch 0 waits for, by place in `one`."""
    place = {action: j for j, action in enumerate(one)}
    found = [sorted({place[need] for need in work.needs(action, place.keys())}) for action in one]
    assert all(need < j for j, needs in enumerate(found) for need in needs)
    return found


def repeated(
    one: Sequence[Action],
    count: int,
    rank: Callable[[Action], int],
    num_ranks: int,
    ticks: Sequence[int],
    inner: Sequence[Iterable[tuple[int, int]]],
    earlier: Sequence[Sequence[tuple[int, int]]],
    taken: Sequence[int] = (),
    freed: Sequence[int] = (),
    limits: tuple[int, ...] | None = None,
    seconds_per_tick: float = 1.0,
) -> JobShop:
    """The same actions for `count` micro-batches, one after the other.

    Args:
        inner: (place, ticks after its end) of what an action waits for within its micro-batch.
        earlier: (place, micro-batches before) of what it waits for in others, without delay.
        taken, freed: bytes of every action; none where left out.
    """
    actions = tuple(Action(a.stage, a.kind, m) for m in range(count) for a in one)
    nothing, needs = (0,) * len(one), []
    for m in range(count):
        base = m * len(one)
        for same, others in zip(inner, earlier, strict=True):
            before = [(base + j - back * len(one), 0) for j, back in others if back <= m]
            needs.append((*before, *((base + j, lag) for j, lag in same)))
    return JobShop(
        actions, tuple(map(rank, actions)), tuple(ticks) * count, tuple(needs), tuple(taken or nothing) * count,
        tuple(freed or nothing) * count, limits, num_ranks, count, seconds_per_tick,
    )  # fmt: skip


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


def _lag(problem: Problem, need: Action, action: Action) -> float:
    """Seconds from the end of `need` to when `action` has what it made."""
    if action.kind == "T" or (need.stage == action.stage and need.kind != "T"):
        return 0.0
    return problem.lag(need.stage, action.stage, need.kind.replace("I", "B"))


def _earlier(problem: Problem, one: Sequence[Action], j: int, split: frozenset[int]) -> Iterable[tuple[int, int]]:
    """(place, micro-batches before): the same action, and for a forward the one that must have freed its memory.

    Sorted by start, interchangeable micro-batches can be renamed so that every stage takes them in order.
    """
    action = one[j]
    yield j, 1
    if problem.bytes_taken(action) and problem.memory_limit_bytes is not None:
        room = problem.memory_limit_bytes[problem.rank(action)] // problem.bytes_taken(action)
        if room >= 1:
            last = problem.backward_kinds(action.stage, split)[-1]
            yield one.index(Action(action.stage, last, 0)), room


@dataclass(frozen=True)
class JobStarts:
    """Starts of all operations, and the operations in an order in which each comes after all that delay it."""

    ticks: int
    start: tuple[int, ...]
    visited: tuple[int, ...]


def run(shop: JobShop, orders: RankOrders) -> JobStarts:
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
    if len(visited) < len(shop):
        raise ScheduleError(f"the orders wait for each other: {len(shop) - len(visited)} actions never start")
    return JobStarts(max(free, default=0), tuple(start), tuple(visited))


def within_limits(shop: JobShop, orders: RankOrders) -> bool:
    """Whether no rank ever holds more than its limit."""
    peaks = (most_held((shop.taken[i], shop.freed[i]) for i in order) for order in orders)
    return shop.limits is None or all(peak <= limit for peak, limit in zip(peaks, shop.limits, strict=True))
