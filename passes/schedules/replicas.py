"""Replicas: several ranks that hold the same stage and take its micro-batches in turn.

    one pipeline          rank 0: 0F0 0F1 0B0 0B1            two, over micro-batches 0 2 and 1 3
    rank 1: 1F0 1B0 ...                                ->    rank 0: 0F0 0F2 0B0 0B2 0R0     rank 2: 0F1 0F3 0B1 0B3 0R2
                                                             rank 1: 1F0 1B0 1F2 1B2 1R1     rank 3: 1F1 1B1 1F3 1B3 1R3

Their weight gradients are summed as soon as the last of them is there, while earlier stages still compute.
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.schedule import Schedule


def with_reductions(schedule: Schedule, work: Work) -> Schedule:
    """The schedule with a reduction on every rank of a replicated stage, right after its last weight gradient there.

    Stages are reduced from the last to the first on every rank, so that all ranks of a group agree on the order.
    """
    replicated = [
        stage for stage, ranks in enumerate(schedule.stage_ranks) if len(ranks) > 1 and stage in work.weight_grad
    ]
    ranks = list(schedule.ranks)
    for rank, actions in enumerate(schedule.ranks):
        placed = [(i, a) for i, a in enumerate(actions)]
        position = -1
        for stage in reversed(replicated):
            if rank in schedule.stage_ranks[stage]:
                position = max(position, *(i for i, a in enumerate(actions) if a.kind in "BW" and a.stage == stage))
                placed.append((position, Action(stage, "R", rank)))
        ranks[rank] = tuple(action for _, action in sorted(placed, key=lambda item: item[0]))
    return replace(schedule, ranks=tuple(ranks))


def tile(schedule: Schedule, pipelines: Sequence[Sequence[int]], work: Work) -> Schedule:
    """One pipeline's schedule run by several: pipeline p takes micro-batches p, p + P, p + 2P, ... of P pipelines.

    Args:
        pipelines: the rank of every place of every pipeline.
        work: of one pipeline, which has `schedule.num_microbatches` micro-batches.
    """
    count = len(pipelines)
    ranks: dict[int, tuple[Action, ...]] = {}
    for first, pipeline in enumerate(pipelines):
        for actions, rank in zip(schedule.ranks, pipeline, strict=True):
            ranks[rank] = tuple(replace(action, microbatch=action.microbatch * count + first) for action in actions)
    ordered = tuple(ranks[rank] for rank in range(len(ranks)))
    whole = replace(schedule, num_microbatches=schedule.num_microbatches * count, ranks=ordered)
    return with_reductions(whole, work)
