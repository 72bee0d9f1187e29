"""Memory of a placement before its stages are traced: what a rank holds all step long, and what micro-batches add.

rank 0 of a 1F1B line    weights, gradients, optimizer state, frozen weights, inputs      held
                         what frozen work made for this batch, and for the next           held, where that is done ahead
                         saved activations of 4 micro-batches in flight                   by the order of actions
                         the largest temporary of a block, or of frozen work              once

Frozen work of this batch runs before its micro-batch's forward; that of the next at any moment, on as few samples at
once as memory asks for.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxpipe.block_graph import BlockGraph
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.memory import ADAMW_BYTES
from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged
from passes.estimate import stage_bytes


def saved_bytes(costs: BlockCosts, staged: Staged, num_samples: int) -> tuple[int, ...]:
    """What one micro-batch leaves on every stage for its backward; what came in, where that is recomputed."""
    return tuple(
        costs.stage_saved_bytes(staged.blocks(stage), num_samples, stage in staged.recompute)
        for stage in range(staged.num_stages)
    )


def computed_again_bytes(costs: BlockCosts, staged: Staged, num_samples: int) -> tuple[int, ...]:
    """What a backward of one micro-batch computes anew in every stage that is recomputed; 0 for the others."""
    return tuple(
        costs.stage_saved_bytes(staged.blocks(stage), num_samples) if stage in staged.recompute else 0
        for stage in range(staged.num_stages)
    )


def most_saved(actions: Sequence[Action], saved: Sequence[int], again: Sequence[int] = ()) -> int:
    """The most bytes that saved activations take on a rank: from each F to the B, or the W, of its micro-batch; what an
    I computes `again` waits for the W, too."""
    split = {action.stage for action in actions if action.kind == "W"}
    level = most = 0
    for action in actions:
        more = again[action.stage] if again and action.stage in split else 0
        if action.kind == "F":
            level += saved[action.stage]
        elif action.kind == "I" and more:
            level += more
        elif action.kind == "W" or (action.kind in "BI" and action.stage not in split):
            level -= saved[action.stage] + more
        most = max(most, level)
    return most


def state_bytes(costs: BlockCosts, blocks: Collection[int]) -> int:
    """Weights that these blocks read, gradients and AdamW's averages of those that train; each weight once."""
    held = sum(costs.parameter_bytes[b] + costs.trained_bytes[b] for b in blocks)
    held += ADAMW_BYTES * sum(costs.trained_elements[b] for b in blocks)
    for weight in costs.shared_weights:
        again = max(0, sum(block in blocks for block in weight.blocks) - 1)
        held -= again * (weight.num_bytes + weight.trained * (weight.num_bytes + ADAMW_BYTES * weight.num_elements))
    return held


def frozen_weights(costs: BlockCosts, staged: Staged, rank: int) -> int:
    """Bytes of the frozen components that a rank may run."""
    return sum(size for component, size in enumerate(costs.component_bytes) if staged.may_run(component, rank))


_SLOWER = 1.05  # of a frozen component's seconds per sample: what fewer samples at once may cost


@dataclass(frozen=True, eq=False)
class Room:
    """What ranks need for a step of `batch_size` samples; `filled`: frozen work of the next batch is done in it."""

    costs: BlockCosts
    batch_size: int
    filled: bool = False

    def held_bytes(self, staged: Staged, rank: int, stages: Sequence[int], num_samples: int) -> int:
        """What a rank with these stages holds, whatever the order, for micro-batches of `num_samples`."""
        costs, blocks = self.costs, [b for stage in stages for b in staged.blocks(stage)]
        held = state_bytes(costs, blocks) + costs.given_bytes(blocks, self.batch_size)
        held += frozen_weights(costs, staged, rank)
        if self.filled and blocks:
            replicas = min(len(staged.stage_ranks[stage]) for stage in stages)
            held += 2 * costs.made_bytes(blocks, -(-self.batch_size // replicas))
        return held + self._temporary_bytes(staged, stages, num_samples)

    def peak_bytes(self, staged: Staged, schedule: Schedule, num_samples: int) -> list[int]:
        """The most bytes on every rank of `schedule`, which may be that of the first pipeline."""
        saved = saved_bytes(self.costs, staged, num_samples)
        again = computed_again_bytes(self.costs, staged, num_samples)
        return [
            self.held_bytes(staged, rank, stages_of(actions), num_samples) + most_saved(actions, saved, again)
            for rank, actions in zip(ranks_of(staged, schedule), schedule.ranks, strict=True)
        ]

    def for_activations(self, staged: Staged, places: Sequence[int], num_samples: int, limit: int) -> tuple[int, ...]:
        """What `limit` leaves for saved activations on every place of a pipeline; `places` are those of the stages.
        Beside them frozen work of the next batch is to run about as fast as it can."""
        ahead, found = self._ahead_bytes(num_samples), []
        for place in range(max(places) + 1):
            stages = [s for s, p in enumerate(places) if p == place]
            held = self.held_bytes(staged, staged.stage_ranks[stages[0]][0], stages, num_samples)
            found.append(limit - held - max(0, ahead - self._temporary_bytes(staged, stages, num_samples)))
        return tuple(found)

    def for_frozen_work(self, staged: Staged, schedule: Schedule, num_samples: int, limit: int) -> tuple[int, int]:
        """What `limit` leaves on the fullest rank for an operation of frozen work: at any moment, and after the rest,
        when nothing is saved any more."""
        saved = saved_bytes(self.costs, staged, num_samples)
        again = computed_again_bytes(self.costs, staged, num_samples)
        always, after = limit, limit
        for rank, actions in zip(ranks_of(staged, schedule), schedule.ranks, strict=True):
            stages = stages_of(actions)
            left = limit - self.held_bytes(staged, rank, stages, num_samples)
            left += self._temporary_bytes(staged, stages, num_samples)
            always, after = min(always, left - most_saved(actions, saved, again)), min(after, left)
        return always, after

    def _temporary_bytes(self, staged: Staged, stages: Sequence[int], num_samples: int) -> int:
        """The largest operation, with what is recomputed for one backward."""
        costs, largest = self.costs, self.costs.temporary_bytes(num_samples)
        again, saved = computed_again_bytes(costs, staged, num_samples), saved_bytes(costs, staged, num_samples)
        training = max((largest[b] for s in stages for b in staged.blocks(s)), default=0)
        training += max((again[s] for s in stages), default=0)
        frozen = max(costs.component_temporary_bytes(num_samples), default=0)
        frozen -= min((saved[s] for s in stages), default=0)
        return max(training, frozen, *(costs.component_temporary_bytes(1) if self.filled else ()))

    def _ahead_bytes(self, num_samples: int) -> int:
        """The largest operation of the next batch's frozen work, on as few samples as take hardly longer each."""
        if not self.filled:
            return 0
        costs, most = self.costs, 0
        for component, seconds in enumerate(costs.at(num_samples).component_seconds):
            size, worth = num_samples, _SLOWER * seconds / num_samples
            while size > 1 and costs.at(size // 2).component_seconds[component] <= worth * (size // 2):
                size //= 2
            most = max(most, costs.component_temporary_bytes(size)[component])
        return most


def ranks_of(staged: Staged, schedule: Schedule) -> list[int]:
    """The ranks of a schedule: all, or those of the first of several equal pipelines."""
    if len(schedule.ranks) == staged.world_size:
        return list(range(staged.world_size))
    return sorted({replicas[0] for replicas in staged.stage_ranks})


def stages_of(actions: Sequence[Action]) -> list[int]:
    """The stages that a rank's actions run."""
    return sorted({action.stage for action in actions if action.kind == "F"})


def wire_bytes(graph: BlockGraph, costs: BlockCosts, staged: Staged, batch_size: int) -> int:
    """Bytes all ranks send in a step: values and their gradients, and rings for the reductions."""
    ranks = staged.stage_ranks
    moved = sum(2 * size for (a, b), size in stage_bytes(graph, staged).items() if ranks[a] != ranks[b])
    reduced = sum(
        2 * (len(ranks[stage]) - 1) * sum(costs.trained_bytes[b] for b in staged.blocks(stage))
        for stage in range(staged.num_stages)
    )
    return moved * batch_size + reduced
