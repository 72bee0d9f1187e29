"""Memory of a placement before its stages are traced: what a rank holds all step long, and what micro-batches add.

rank 0 of a 1F1B line    weights, gradients, optimizer state, frozen weights     held
                         saved activations of 4 micro-batches in flight          by the order of actions
                         the largest temporary of a block                        once
"""

from collections.abc import Sequence

from fxpipe._interim_costs import BlockCosts
from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged

ADAMW_BYTES = 8
"""Optimizer state per trained element: two float32 averages."""


def saved_bytes(costs: BlockCosts, staged: Staged, num_samples: int) -> tuple[int, ...]:
    """What one micro-batch leaves on every stage for its backward."""
    whole, inputs = costs.saved_bytes(num_samples), costs.saved_bytes_recomputed(num_samples)
    # Of a stage that is recomputed only what comes in stays: its first block's inputs, nearly.
    return tuple(
        sum((inputs if stage in staged.recompute else whole)[b] for b in _kept_blocks(staged, stage))
        for stage in range(staged.num_stages)
    )


def _kept_blocks(staged: Staged, stage: int) -> range:
    blocks = staged.blocks(stage)
    return blocks[:1] if stage in staged.recompute else blocks


def held_bytes(costs: BlockCosts, staged: Staged, stages: Sequence[int], num_samples: int) -> int:
    """What a rank with these stages holds, whatever the order: state, gradients, AdamW's averages, frozen weights, and
    room for the largest temporary, with what is recomputed for one backward."""
    blocks = [b for stage in stages for b in staged.blocks(stage)]
    state = sum(
        costs.parameter_bytes[b] + costs.trained_bytes[b] + ADAMW_BYTES * costs.trained_elements[b] for b in blocks
    )
    temporary_of, saved_of = costs.temporary_bytes(num_samples), costs.saved_bytes(num_samples)
    again = [sum(saved_of[b] for b in staged.blocks(s)) for s in stages if s in staged.recompute]
    return (
        state + sum(costs.component_bytes) + max((temporary_of[b] for b in blocks), default=0) + max(again, default=0)
    )


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
