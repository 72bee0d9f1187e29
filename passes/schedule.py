"""Order the work of every rank.

    stages 0 1 on ranks 0 1, micro-batches 0 1 2         rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    seconds of every F and B                       ->    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

One list scheduler for all names: whenever a rank is idle it starts the best action that is ready. A name decides what is
best, and adds to the precedences of the work some of its own: these bound the micro-batches in flight.

Nothing can deadlock: every added precedence of a micro-batch is on an earlier one, or on the forward of one ("gpipe").
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from fxpipe.errors import CompileError
from fxpipe.schedule import Action, Schedule, Work


@dataclass(frozen=True)
class Policy:
    """What a schedule name chooses."""

    drain_last: bool = False  # a rank ends its forwards before its first backward; nothing bounds what is in flight
    split: bool = False  # backward as I and W (ZB-H1 of "Zero Bubble Pipeline Parallelism"): W fills idle time


POLICIES = {
    "gpipe": Policy(drain_last=True),
    "1f1b": Policy(),
    "interleaved": Policy(),
    "wave": Policy(),
    "zero-bubble": Policy(split=True),
}


def make_schedule(
    name: str,
    work: Work,
    stage_rank: Sequence[int],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    *,
    frozen_seconds: Sequence[float] = (),
    world_size: int | None = None,
) -> Schedule:
    """The schedule `name` of `work`, for any stage graph, placement and number of micro-batches.

    `stage_rank`, `forward_seconds` and `backward_seconds` are per stage, `frozen_seconds` per component; I and W take half
    a backward each. Frozen work of micro-batch m comes first on rank m % `world_size`.
    Raises CompileError for an unknown name.
    """
    if name not in POLICIES:
        raise CompileError(f"unknown schedule {name!r}; choose one of {', '.join(map(repr, POLICIES))}")
    policy = POLICIES[name]
    world_size = max(stage_rank) + 1 if world_size is None else world_size
    split = work.input_grad & work.weight_grad if policy.split else frozenset()
    rank_of = {action: _rank(action, stage_rank, world_size) for action in _actions(work, split)}
    needs = {action: set(work.needs(action, rank_of.keys())) for action in rank_of}
    _keep_order(needs)
    if policy.drain_last:
        _drain_last(needs, rank_of)
    else:
        _bound_in_flight(needs, work)
    seconds = _Seconds(forward_seconds, backward_seconds, frozen_seconds or [1.0] * work.num_components)
    ranks = _list_schedule(needs, rank_of, world_size, seconds.ticks, _priority(work))
    return Schedule(name, work.num_stages, work.num_microbatches, ranks)


def _actions(work: Work, split: frozenset[int]) -> Iterator[Action]:
    for microbatch in range(work.num_microbatches):
        yield from (Action(component, "T", microbatch) for component in range(work.num_components))
        for stage in work.stages:
            kinds = "F" if stage not in work.backward else "FIW" if stage in split else "FB"
            yield from (Action(stage, kind, microbatch) for kind in kinds)


def _rank(action: Action, stage_rank: Sequence[int], world_size: int) -> int:
    return action.microbatch % world_size if action.kind == "T" else stage_rank[action.stage]


Needs = dict[Action, set[Action]]


def _keep_order(needs: Needs) -> None:
    """A stage takes its micro-batches in order."""
    for action, before in needs.items():
        if action.kind != "T" and action.microbatch > 0:
            before.add(Action(action.stage, action.kind, action.microbatch - 1))


def _drain_last(needs: Needs, rank_of: dict[Action, int]) -> None:
    forwards: dict[int, set[Action]] = {}
    for action, rank in rank_of.items():
        if action.kind == "F":
            forwards.setdefault(rank, set()).add(action)
    for action, before in needs.items():
        if action.kind in "BI":
            before |= forwards[rank_of[action]]


def _bound_in_flight(needs: Needs, work: Work) -> None:
    """Stage s starts a forward when fewer micro-batches than stages from s to the end are in flight, as in 1F1B.

    A micro-batch is in flight until its last gradient; in a stage without gradients, until its values are used.
    """
    depth = _depths(work)
    for action, before in needs.items():
        earlier = action.microbatch - depth.get(action.stage, 0)
        if action.kind == "F" and earlier >= 0:
            ends = [Action(action.stage, kind, earlier) for kind in "WBI"]
            last = next((end for end in ends if end in needs), None)
            uses = (Action(b, "F", earlier) for a, b in work.edges if a == action.stage)
            before.update([last] if last else uses)


def _depths(work: Work) -> dict[int, int]:
    """Stages on the longest path from each stage to an end of the forward graph, itself included."""
    users: dict[int, set[int]] = {stage: set() for stage in work.stages}
    for source, target in work.edges:
        users[source].add(target)
    depth: dict[int, int] = {}
    for stage in TopologicalSorter(users).static_order():
        depth[stage] = 1 + max((depth[user] for user in users[stage]), default=0)
    return depth


@dataclass(frozen=True)
class _Seconds:
    forward: Sequence[float]
    backward: Sequence[float]
    frozen: Sequence[float]

    def ticks(self, action: Action) -> int:
        """Whole ticks: two sums that are equal on paper must be equal here, or ties would fall by rounding."""
        seconds = {"F": self.forward, "T": self.frozen}.get(action.kind, self.backward)[action.stage]
        unit = max(*self.forward, *self.backward, *self.frozen) / 1_000_000
        return max(1, round(seconds / unit / (2 if action.kind in "IW" else 1))) if unit > 0 else 1


Priority = Callable[[Action], tuple[int, ...]]


def _priority(work: Work) -> Priority:
    """Frozen work, then the oldest backward, then the oldest forward, then weight gradients; the smallest is best."""
    components: dict[int, list[int]] = {component: [] for component in range(work.num_components)}
    for source, target in sorted(work.component_edges):
        components[target].append(source)
    place = {component: k for k, component in enumerate(TopologicalSorter(components).static_order())}

    def priority(action: Action) -> tuple[int, ...]:
        if action.kind == "T":
            return 0, action.microbatch, place[action.stage]
        return "BIFW".index(action.kind) // 2 + 1, action.microbatch, -action.stage

    return priority


def _list_schedule(
    needs: Needs, rank_of: dict[Action, int], world_size: int, ticks: Callable[[Action], int], priority: Priority
) -> tuple[tuple[Action, ...], ...]:
    missing = {action: len(before) for action, before in needs.items()}
    users: dict[Action, list[Action]] = {}
    for action, before in needs.items():
        for need in before:
            users.setdefault(need, []).append(action)
    ready: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in range(world_size)]
    order: list[list[Action]] = [[] for _ in range(world_size)]
    for action, count in missing.items():
        if count == 0:
            heapq.heappush(ready[rank_of[action]], (priority(action), action))
    now, running, idle = 0, [], set(range(world_size))
    while True:
        for rank in sorted(idle):
            if ready[rank]:
                action = heapq.heappop(ready[rank])[1]
                order[rank].append(action)
                heapq.heappush(running, (now + ticks(action), action))
                idle.remove(rank)
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            ended = heapq.heappop(running)[1]
            idle.add(rank_of[ended])
            for user in users.get(ended, ()):
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready[rank_of[user]], (priority(user), user))
    assert sum(map(len, order)) == len(needs), "the precedences have a cycle"
    return tuple(map(tuple, order))
