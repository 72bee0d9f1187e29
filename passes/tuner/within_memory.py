"""Stages cut anew where memory decides: what blocks hold, how often, and what every rank has left for them.

t5 (9 GiB) on every rank     40 GiB, 40 GiB, 40 GiB, 40 GiB     too much for 32
t5 on the last rank          31 GiB, 31 GiB, 31 GiB, 40 GiB     too much
and fewer blocks there       32 GiB, 32 GiB, 32 GiB, 32 GiB
"""

from collections.abc import Iterator, Sequence

from fxpipe.memory import ADAMW_BYTES
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from passes.partition import StageMemory
from passes.room import Room, computed_again_bytes, most_saved, ranks_of, saved_bytes, stages_of, state_bytes

FrozenRanks = tuple[tuple[int, ...], ...]


def homes(staged: Staged, component_bytes: Sequence[int], ranks: Sequence[int]) -> Iterator[FrozenRanks]:
    """Where frozen weights may be: everywhere, then ever more components, the largest first, at one place each.

    The last place of a pipeline first: the fewest micro-batches are in flight there. `ranks` are those of one pipeline.
    """
    yield ()
    everywhere = tuple(range(staged.world_size))
    found = [everywhere] * len(component_bytes)
    largest_first = sorted(range(len(component_bytes)), key=lambda c: -component_bytes[c])
    for number, component in enumerate(largest_first):
        if component_bytes[component]:
            found[component] = staged.alike(ranks[-1 - number % len(ranks)])
            yield tuple(found)


def stage_memory(room: Room, staged: Staged, schedule: Schedule, num_samples: int, limit: int) -> StageMemory | None:
    """For a partition of the same shape; None where a rank has no room at all.

    What does not depend on a block is that of the stages as they are: inputs, temporaries, and all that is kept of
    stages that are recomputed.

    Args:
        schedule: of the stages as they are; of the first of several equal pipelines.
    """
    costs = room.costs
    held = [
        costs.parameter_bytes[b] + costs.trained_bytes[b] + ADAMW_BYTES * costs.trained_elements[b]
        for b in range(costs.num_blocks)
    ]
    kept = [0] * costs.num_blocks if staged.recompute else costs.saved_bytes(num_samples)
    saved, again = saved_bytes(costs, staged, num_samples), computed_again_bytes(costs, staged, num_samples)
    limits = []
    for rank, actions in zip(ranks_of(staged, schedule), schedule.ranks, strict=True):
        stages = stages_of(actions)
        blocks = [block for stage in stages for block in staged.blocks(stage)]
        other = room.held_bytes(staged, rank, stages) - state_bytes(costs, blocks)
        other += room.temporary_bytes(staged, stages, num_samples)
        other += most_saved(actions, saved, again) if staged.recompute else 0
        limits.append(limit - other)
    if min(limits) < 0:
        return None
    return StageMemory(held, kept, _in_flight(schedule), limits)


def _in_flight(schedule: Schedule) -> list[int]:
    """The most micro-batches between a forward and the last of their backward, of every stage."""
    most = [0] * schedule.num_stages
    for actions in schedule.ranks:
        for stage in stages_of(actions):
            ones = [int(s == stage) for s in range(schedule.num_stages)]
            most[stage] = max(most[stage], most_saved(actions, ones, [0] * schedule.num_stages))
    return most
