"""Replicas: several ranks that hold the same stage and take its micro-batches in turn.

    one pipeline          rank 0: 0F0 0F1 0B0 0B1            two, over micro-batches 0 2 and 1 3
    rank 1: 1F0 1B0 ...                                ->    rank 0: 0F0 0F2 0B0 0B2 0R0     rank 2: 0F1 0F3 0B1 0B3 0R2
                                                             rank 1: 1F0 1B0 1F2 1B2 1R1     rank 3: 1F1 1B1 1F3 1B3 1R3

Their weight gradients are summed as soon as the last of them is there, while earlier stages still compute; or those of
every micro-batch as they come, of which each replica adds up its share:

    rank 0: 0F0 0F2 0B0 0R0 0B2 0R0:1        rank 2: 0F1 0F3 0B1 0R2 0B3 0R2:1
"""

from collections import Counter
from collections.abc import Collection, Sequence, Set
from dataclasses import replace

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.schedule import Schedule


def with_reductions(schedule: Schedule, work: Work) -> Schedule:
    """The schedule with a reduction on every rank of a replicated stage, right after its last weight gradient there.

    Stages are reduced from the last to the first on every rank, so that all ranks of a group agree on the order.
    """
    replicated = {stage for stage, ranks in enumerate(schedule.stage_ranks) if len(ranks) > 1} & work.weight_grad
    ranks = (_reduced(actions, rank, replicated) for rank, actions in enumerate(schedule.ranks))
    return replace(schedule, ranks=tuple(ranks))


def _reduced(actions: Sequence[Action], rank: int, replicated: Set[int]) -> tuple[Action, ...]:
    last = {action.stage: place for place, action in enumerate(actions) if action.kind in "BW"}
    at, position = dict[int, list[Action]](), -1
    for stage in sorted(last.keys() & replicated, reverse=True):
        position = max(position, last[stage])
        at.setdefault(position, []).append(Action(stage, "R", rank))
    return tuple(found for place, action in enumerate(actions) for found in (action, *at.get(place, ())))


def _scattered(actions: Sequence[Action], rank: int, replicated: Set[int]) -> tuple[Action, ...]:
    """With a reduction right after every weight gradient."""
    found, turns = list[Action](), Counter[int]()
    for action in actions:
        found.append(action)
        if action.kind in "BW" and action.stage in replicated:
            found.append(Action(action.stage, "R", rank, turn=turns[action.stage]))
            turns[action.stage] += 1
    return tuple(found)


def tile(
    schedule: Schedule,
    pipelines: Sequence[Sequence[int]],
    work: Work,
    only: Collection[int] | None = None,
    scattered: bool = False,
) -> Schedule:
    """One pipeline's schedule run by several: pipeline p takes micro-batches p, p + P, p + 2P, ... of P pipelines.

    Args:
        pipelines: the rank of every place of every pipeline.
        work: of one pipeline, which has `schedule.num_microbatches` micro-batches.
        only: numbers of the pipelines whose ranks have actions; all where left out.
        scattered: whether gradients are summed for every micro-batch, else once a step.
    """
    count = len(pipelines)
    replicated = work.weight_grad if count > 1 else frozenset[int]()
    ranks: list[tuple[Action, ...]] = [()] * sum(map(len, pipelines))
    for first in range(count) if only is None else only:
        for actions, rank in zip(schedule.ranks, pipelines[first], strict=True):
            mine = [Action(a.stage, a.kind, a.microbatch * count + first, a.layers, a.samples) for a in actions]
            ranks[rank] = (_scattered if scattered else _reduced)(mine, rank, replicated)
    return replace(schedule, num_microbatches=schedule.num_microbatches * count, ranks=tuple(ranks))
