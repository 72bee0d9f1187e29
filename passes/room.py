"""Memory of a placement before its stages are traced: what a rank holds all step long, and what micro-batches add.

rank 0 of a 1F1B line    weights, gradients, optimizer state, frozen weights     held
                         saved activations of 4 micro-batches in flight          by the order of actions
                         the largest temporary of a block                        once
"""

from collections.abc import Sequence

from fxpipe.block_costs import BlockCosts
from fxpipe.block_graph import BlockGraph
from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged
from passes.estimate import stage_bytes

ADAMW_BYTES = 8
"""Optimizer state per trained element: two float32 averages."""


def saved_bytes(costs: BlockCosts, staged: Staged, num_samples: int) -> tuple[int, ...]:
    """What one micro-batch leaves on every stage for its backward; what came in, where that is recomputed."""
    return tuple(
        costs.stage_saved_bytes(staged.blocks(stage), num_samples, stage in staged.recompute)
        for stage in range(staged.num_stages)
    )


def held_bytes(costs: BlockCosts, staged: Staged, stages: Sequence[int], num_samples: int) -> int:
    """What a rank with these stages holds, whatever the order: state, gradients, AdamW's averages, frozen weights, and
    room for the largest temporary, with what is recomputed for one backward."""
    blocks = [b for stage in stages for b in staged.blocks(stage)]
    state = sum(costs.parameter_bytes[b] + costs.trained_bytes[b] for b in blocks)
    state += ADAMW_BYTES * sum(costs.trained_elements[b] for b in blocks)
    largest = costs.temporary_bytes(num_samples)
    again = [costs.stage_saved_bytes(staged.blocks(s), num_samples) for s in stages if s in staged.recompute]
    temporary = max((largest[b] for b in blocks), default=0) + max(again, default=0)
    return state + sum(costs.component_bytes) + temporary


def most_saved(actions: Sequence[Action], saved: Sequence[int]) -> int:
    """The most bytes that saved activations take on a rank: from each F to the B, or the W, of its micro-batch."""
    split = {action.stage for action in actions if action.kind == "W"}
    level = most = 0
    for action in actions:
        if action.kind == "F":
            level += saved[action.stage]
            most = max(most, level)
        elif action.kind == "W" or (action.kind in "BI" and action.stage not in split):
            level -= saved[action.stage]
    return most


def peak_bytes(costs: BlockCosts, staged: Staged, schedule: Schedule, num_samples: int) -> list[int]:
    """The most bytes on every rank of `schedule`."""
    saved = saved_bytes(costs, staged, num_samples)
    return [
        held_bytes(costs, staged, sorted({a.stage for a in actions if a.kind == "F"}), num_samples)
        + most_saved(actions, saved)
        for actions in schedule.ranks
    ]


def room_bytes(
    costs: BlockCosts, staged: Staged, places: Sequence[int], num_samples: int, limit: int
) -> tuple[int, ...]:
    """What `limit` leaves for saved activations on every place of a pipeline; `places` are those of the stages."""
    return tuple(
        limit - held_bytes(costs, staged, [s for s, p in enumerate(places) if p == place], num_samples)
        for place in range(max(places) + 1)
    )


def wire_bytes(graph: BlockGraph, costs: BlockCosts, staged: Staged, batch_size: int) -> int:
    """Bytes all ranks send in a step: values and their gradients, and rings for the reductions."""
    ranks = staged.stage_ranks
    moved = sum(2 * size for (a, b), size in stage_bytes(graph, staged).items() if ranks[a] != ranks[b])
    reduced = sum(
        2 * (len(ranks[stage]) - 1) * sum(costs.trained_bytes[b] for b in staged.blocks(stage))
        for stage in range(staged.num_stages)
    )
    return moved * batch_size + reduced
