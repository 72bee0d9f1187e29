"""Order the work of every rank.

    stages 0 1 on ranks 0 1, micro-batches 0 1 2         rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    seconds of every F and B                       ->    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

One list scheduler for all names: whenever a rank is idle it starts the best action that is ready. A name decides what
is best, and adds to the precedences of the work some of its own: these bound the micro-batches in flight.

Nothing can deadlock: every added precedence of a micro-batch is on an earlier one, or on the forward of one ("gpipe").
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import lcm

from fxpipe.errors import CompileError
from fxpipe.schedule import Action, Schedule, Work
from passes.placement.replicas import with_reductions
from passes.schedules.hanayo import wave_orders
from passes.schedules.repetition import keep_blocks


@dataclass(frozen=True)
class Policy:
    """What a schedule name chooses."""

    drain_last: bool = False  # a rank ends its forwards before its first backward; nothing bounds what is in flight
    split: bool = False  # backward as I and W (ZB-H1 of "Zero Bubble Pipeline Parallelism", 2024): W fills idle time
    grouped: bool = False  # world_size micro-batches pass a stage before the rank turns to its next (Megatron-LM, 2021)
    capped: bool = False  # no more in flight on a rank than 1F1B holds at most (Hanayo: Liu et al., SC 2023)
    repeated: bool = False  # one micro-batch's block every period (ZB-V: Qi et al., NeurIPS 2024)


POLICIES = {
    "gpipe": Policy(drain_last=True),
    "1f1b": Policy(),
    "interleaved": Policy(grouped=True),
    "wave": Policy(),
    "bidirectional": Policy(),  # two groups of backbones, in opposite directions (DiffusionPipe, MLSys 2024)
    "hanayo": Policy(capped=True),
    "zb-h1": Policy(split=True),
    "zero-bubble": Policy(split=True),  # the same by the name of its idea
    "zb-v": Policy(split=True, repeated=True),
}


def make_schedule(
    name: str,
    work: Work,
    stage_rank: Sequence[int | tuple[int, ...]],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    *,
    frozen_seconds: Sequence[float] = (),
    frozen_ranks: Sequence[tuple[int, ...]] = (),
    world_size: int | None = None,
) -> Schedule:
    """The schedule `name` of `work`, for any stage graph, placement and number of micro-batches.

    `stage_rank`, `forward_seconds` and `backward_seconds` are per stage, `frozen_seconds` per component; I and W take
    half a backward each. A stage with several ranks has replicas, which take its micro-batches in turn and end with a
    gradient reduction. Frozen work comes first, on the ranks in turn, or with replicas on those that a micro-batch
    passes through; with `frozen_ranks`, per component, on those of these, or on any of these where it passes none.
    Raises CompileError for an unknown name.
    """
    if name not in POLICIES:
        raise CompileError(f"unknown schedule {name!r}; choose one of {', '.join(map(repr, POLICIES))}")
    policy = POLICIES[name]
    replicas = [ranks if isinstance(ranks, tuple) else (ranks,) for ranks in stage_rank]
    world_size = max(map(max, replicas)) + 1 if world_size is None else world_size
    frozen_ranks = tuple(frozen_ranks) if work.num_components else ()
    if policy.capped and all(len(ranks) == 1 for ranks in replicas):
        seconds = {"F": forward_seconds, "B": backward_seconds, "T": frozen_seconds or [1.0] * work.num_components}
        waves = wave_orders(work, [ranks[0] for ranks in replicas], seconds, world_size, frozen_ranks)
        if waves is not None:
            return Schedule(name, work.num_stages, work.num_microbatches, waves)
    split = work.input_grad & work.weight_grad if policy.split else frozenset()
    rank_of = {action: _rank(action, replicas, world_size, frozen_ranks) for action in _actions(work, split)}
    needs = {action: set(work.needs(action, rank_of.keys())) for action in rank_of}
    ticks = _ticks(forward_seconds, backward_seconds, frozen_seconds or [1.0] * work.num_components)
    if policy.repeated:
        keep_blocks(needs, rank_of, ticks, lcm(*map(len, replicas)))
    else:
        _keep_order(needs, replicas)
    if policy.drain_last:
        _drain_last(needs, rank_of)
    elif not policy.repeated:
        _bound_in_flight(needs, work, replicas, policy)
    order = _list_schedule(needs, rank_of, world_size, ticks, _priority(work, world_size if policy.grouped else 1))
    return with_reductions(Schedule(name, work.num_stages, work.num_microbatches, order), work)


def _actions(work: Work, split: frozenset[int]) -> Iterator[Action]:
    for microbatch in range(work.num_microbatches):
        yield from (Action(component, "T", microbatch) for component in range(work.num_components))
        for stage in work.stages:
            kinds = "F" if stage not in work.backward else "FIW" if stage in split else "FB"
            yield from (Action(stage, kind, microbatch) for kind in kinds)


Replicas = Sequence[tuple[int, ...]]


def _rank(action: Action, replicas: Replicas, world_size: int, frozen_ranks: Sequence[tuple[int, ...]]) -> int:
    microbatch = action.microbatch
    if action.kind != "T":
        return replicas[action.stage][microbatch % len(replicas[action.stage])]
    most = max(map(len, replicas))
    allowed: Sequence[int] = frozen_ranks[action.stage] if frozen_ranks else range(world_size)
    if most == 1:
        return allowed[microbatch % len(allowed)]
    passed = sorted({ranks[microbatch % len(ranks)] for ranks in replicas} & {*allowed})
    return passed[microbatch // most % len(passed)] if passed else allowed[microbatch % len(allowed)]


Needs = dict[Action, set[Action]]


def _keep_order(needs: Needs, replicas: Replicas) -> None:
    """A replica takes its micro-batches in order."""
    for action, before in needs.items():
        if action.kind != "T" and (earlier := action.microbatch - len(replicas[action.stage])) >= 0:
            before.add(Action(action.stage, action.kind, earlier))


def _drain_last(needs: Needs, rank_of: dict[Action, int]) -> None:
    forwards: dict[int, set[Action]] = {}
    for action, rank in rank_of.items():
        if action.kind == "F":
            forwards.setdefault(rank, set()).add(action)
    for action, before in needs.items():
        if action.kind in "BI":
            before |= forwards[rank_of[action]]


def _bound_in_flight(needs: Needs, work: Work, replicas: Replicas, policy: Policy) -> None:
    """A forward waits until its stage has few enough micro-batches whose gradient (or, without one, whose use) is due.

    Weight gradients may lag behind their input gradient as far as the memory of the fullest rank admits.
    """
    limits = _limits(work, replicas, policy.grouped)
    on_ranks: dict[tuple[int, ...], list[int]] = {}
    for stage in work.stages:
        on_ranks.setdefault(replicas[stage], []).append(stage)
    if policy.capped:
        for stages in on_ranks.values():
            cap = _cap([limits[stage] for stage in stages], len(on_ranks) * len(stages))
            limits |= {stage: min(limits[stage], cap) for stage in stages}
    held = {ranks: sum(limits[stage] for stage in stages) for ranks, stages in on_ranks.items()}
    for forward in [action for action in needs if action.kind == "F"]:
        stage, ranks = forward.stage, replicas[forward.stage]
        slack = (max(held.values()) - held[ranks]) // len(on_ranks[ranks])
        _after(needs, forward, limits[stage] * len(ranks), "BI" if stage in work.backward else "F", work)
        _after(needs, forward, (limits[stage] + slack) * len(ranks), "W", work)


def _after(needs: Needs, forward: Action, limit: int, kinds: str, work: Work) -> None:
    """`forward` waits for `kinds` of the micro-batch `limit` before it; "F" stands for the forwards of its users."""
    microbatch = forward.microbatch - limit
    users = [b for a, b in work.edges if a == forward.stage] if kinds == "F" else [forward.stage]
    ends = (Action(user, kind, microbatch) for user in users for kind in kinds)
    needs[forward].update(end for end in ends if end in needs)


def _limits(work: Work, replicas: Replicas, grouped: bool) -> dict[int, int]:
    """Micro-batches in flight per stage and replica: as in 1F1B the stages from it to the end of the pipeline.

    With groups of N = number of ranks: N, and on the first N stages what the ramp of the pipeline needs besides.
    """
    num_ranks = len({replicas[stage] for stage in work.stages})
    if num_ranks == 1:
        return dict.fromkeys(work.stages, 1)
    if grouped and num_ranks < len(work.stages):
        return {stage: num_ranks + max(0, num_ranks - place) for place, stage in enumerate(work.stages)}
    users: dict[int, set[int]] = {stage: set() for stage in work.stages}
    for source, target in work.edges:
        users[source].add(target)
    limits: dict[int, int] = {}
    for stage in TopologicalSorter(users).static_order():
        limits[stage] = 1 + max((limits[user] for user in users[stage]), default=0)
    return limits


def _cap(limits: Sequence[int], room: int) -> int:
    """The largest cap under which the limits of a rank's stages add up to no more than `room`; at least one."""
    return max(cap for cap in range(1, max(limits) + 1) if cap == 1 or sum(min(limit, cap) for limit in limits) <= room)


def _ticks(forward: Sequence[float], backward: Sequence[float], frozen: Sequence[float]) -> Callable[[Action], int]:
    """Durations in whole ticks: sums that are equal on paper must be equal here, or ties would fall by rounding."""
    unit = max([*forward, *backward, *frozen], default=0.0) / 1_000_000 or 1.0
    table = {"F": forward, "T": frozen, "B": backward}

    def ticks(action: Action) -> int:
        share = 0.5 if action.kind in "IW" else 1.0
        return max(1, round(share * table.get(action.kind, backward)[action.stage] / unit))

    return ticks


Priority = Callable[[Action], tuple[int, ...]]
_TURN = {"T": 0, "F": 1, "B": 2, "I": 2, "W": 3}


def _priority(work: Work, group: int) -> Priority:
    """Frozen work, then forwards, then backwards, then weight gradients; the smallest is best.

    What is in flight is bounded, so a forward goes first whenever it is admitted (measured: up to 15 % shorter than
    backward first where ranks have several stages, the same order where they have one). Older groups of `group`
    micro-batches go first, then the stage nearer to the end of the micro-batch, or within a group the opposite.
    """
    components: dict[int, list[int]] = {component: [] for component in range(work.num_components)}
    for source, target in sorted(work.component_edges):
        components[target].append(source)
    place = {component: k for k, component in enumerate(TopologicalSorter(components).static_order())}

    def priority(action: Action) -> tuple[int, ...]:
        if action.kind == "T":
            return _TURN[action.kind], action.microbatch, place[action.stage]
        onward = action.stage if action.kind == "F" else -action.stage
        return _TURN[action.kind], action.microbatch // group, onward if group > 1 else -onward

    return priority


def _list_schedule(
    needs: Needs, rank_of: dict[Action, int], world_size: int, ticks: Callable[[Action], int], priority: Priority
) -> tuple[tuple[Action, ...], ...]:
    """Whenever a rank is idle, start the best of its actions whose needs have all ended."""
    missing = {action: len(before) for action, before in needs.items()}
    users: dict[Action, list[Action]] = {}
    for action, before in needs.items():
        for need in before:
            users.setdefault(need, []).append(action)
    ready: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in range(world_size)]  # a heap per rank
    running: list[tuple[int, Action]] = []  # a heap by end
    order: list[list[Action]] = [[] for _ in range(world_size)]
    released = [action for action, count in missing.items() if count == 0]
    idle, now = set(range(world_size)), 0
    while any(ready) or released or running:
        for action in released:
            heapq.heappush(ready[rank_of[action]], (priority(action), action))
        for rank in [rank for rank in idle if ready[rank]]:
            action = heapq.heappop(ready[rank])[1]
            order[rank].append(action)
            heapq.heappush(running, (now + ticks(action), action))
            idle.remove(rank)
        now, released = running[0][0], []
        while running and running[0][0] == now:
            ended = heapq.heappop(running)[1]
            idle.add(rank_of[ended])
            for user in users.get(ended, ()):
                missing[user] -= 1
                released += [user] * (missing[user] == 0)
    assert sum(map(len, order)) == len(needs), "the precedences have a cycle"
    return tuple(map(tuple, order))
