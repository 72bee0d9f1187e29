"""Memory of a placement before its stages are traced: what a rank holds all step long, and what micro-batches add.

rank 0 of a 1F1B line    weights, gradients, optimizer state, frozen weights, inputs      held
                         what frozen work made for this batch, and for the next           held, where that is done ahead
                         saved activations of 4 micro-batches in flight                   by the order of actions
                         the largest temporary of a block, or of frozen work              once

Frozen work of this batch runs before its micro-batch's forward; that of the next at any moment, on as few samples at
once as memory asks for.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from fxpipe.block_graph import BlockGraph
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.memory import ADAMW_BYTES
from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged
from passes.estimate import stage_bytes

_SLOWER = 1.05  # of a frozen component's seconds per sample: what fewer samples at once may cost


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


def saved_levels(
    actions: Sequence[Action], saved: Callable[[Action], int], again: Callable[[Action], int]
) -> Iterator[tuple[int, int]]:
    """Bytes of saved activations on a rank during and after each of its actions: they are held from each F to the B, or
    the W, of its micro-batch; what an I computes `again` waits for the W, too."""
    split = {action.stage for action in actions if action.kind == "W"}
    level = 0
    for action in actions:
        if action.kind == "F":
            level += saved(action)
        during = level
        if action.kind == "W":
            level -= saved(action) + again(action)
        elif action.kind in "BI":
            level += again(action) if action.stage in split else -saved(action)
        yield during, level


def most_saved(actions: Sequence[Action], saved: Sequence[int], again: Sequence[int]) -> int:
    """The most of `saved_levels`; both are per stage."""
    levels = saved_levels(actions, lambda a: saved[a.stage], lambda a: again[a.stage])
    return max((max(during, after) for during, after in levels), default=0)


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


@dataclass(frozen=True, eq=False)
class Room:
    """What ranks need for a step of `batch_size` samples; `filled`: frozen work of the next batch is done in it."""

    costs: BlockCosts
    batch_size: int
    filled: bool = False

    def held_bytes(self, staged: Staged, rank: int, stages: Sequence[int]) -> int:
        """What a rank with these stages holds all step long, whatever the order."""
        costs, blocks = self.costs, [b for stage in stages for b in staged.blocks(stage)]
        held = state_bytes(costs, blocks) + costs.given_bytes(blocks, self.batch_size)
        held += frozen_weights(costs, staged, rank)
        if self.filled and blocks:
            replicas = min(len(staged.stage_ranks[stage]) for stage in stages)
            held += 2 * costs.made_bytes(blocks, -(-self.batch_size // replicas))
        return held

    def peak_bytes(self, staged: Staged, schedule: Schedule, num_samples: int) -> list[int]:
        """The most bytes on every rank of `schedule`, which may be that of the first pipeline."""
        costs = self.costs
        saved, again = saved_bytes(costs, staged, num_samples), computed_again_bytes(costs, staged, num_samples)
        largest, frozen, ahead = self._largest(staged, num_samples), self._frozen(num_samples), self._frozen_ahead
        found = []
        for rank, actions in zip(ranks_of(staged, schedule), schedule.ranks, strict=True):
            training = [action for action in actions if action.kind in "FBIW"]
            levels = saved_levels(training, lambda a: saved[a.stage], lambda a: again[a.stage])
            most = 0
            for action, (during, after) in zip(training, levels, strict=True):
                temporary = largest[action.stage] + again[action.stage] * (action.kind in "BI")
                if action.kind == "F":
                    temporary = max(temporary, frozen - saved[action.stage])
                most = max(most, during + max(temporary, ahead), after + ahead)
            found.append(self.held_bytes(staged, rank, stages_of(actions)) + most)
        return found

    def for_activations(self, staged: Staged, places: Sequence[int], num_samples: int, limit: int) -> tuple[int, ...]:
        """What `limit` leaves for saved activations on every place of a pipeline; `places` are those of the stages."""
        return tuple(
            limit
            - self.held_bytes(staged, staged.stage_ranks[stages[0]][0], stages)
            - self.temporary_bytes(staged, stages, num_samples)
            for stages in _of_places(places)
        )

    def for_ahead(self, staged: Staged, places: Sequence[int], num_samples: int) -> tuple[int, ...]:
        """What of that is better left on every place, for frozen work of the next batch to run about as fast as it can:
        its largest operation, on as few samples as take hardly longer each, is larger than any other by so much."""
        if not self.filled:
            return (0,) * (max(places) + 1)
        costs, most = self.costs, 0
        for component, seconds in enumerate(costs.at(num_samples).component_seconds):
            size, worth = num_samples, _SLOWER * seconds / num_samples
            while size > 1 and costs.at(size // 2).component_seconds[component] <= worth * (size // 2):
                size //= 2
            most = max(most, costs.component_temporary_bytes(size)[component])
        temporary = (self.temporary_bytes(staged, stages, num_samples) for stages in _of_places(places))
        return tuple(max(0, most - size) for size in temporary)

    def for_frozen_work(self, staged: Staged, schedule: Schedule, num_samples: int, limit: int) -> tuple[int, int]:
        """What `limit` leaves on the fullest rank for an operation of frozen work: at any moment, and after the rest,
        when nothing is saved any more."""
        saved = saved_bytes(self.costs, staged, num_samples)
        again = computed_again_bytes(self.costs, staged, num_samples)
        always, after = limit, limit
        for rank, actions in zip(ranks_of(staged, schedule), schedule.ranks, strict=True):
            left = limit - self.held_bytes(staged, rank, stages_of(actions))
            always, after = min(always, left - most_saved(actions, saved, again)), min(after, left)
        return always, after

    def temporary_bytes(self, staged: Staged, stages: Sequence[int], num_samples: int) -> int:
        """The most that actions of these stages need for a moment beside what is saved: the largest operation, with
        what is recomputed for one backward; or frozen work, before its micro-batch is among what is saved."""
        costs, largest = self.costs, self._largest(staged, num_samples)
        again, saved = computed_again_bytes(costs, staged, num_samples), saved_bytes(costs, staged, num_samples)
        training = max((largest[s] for s in stages), default=0) + max((again[s] for s in stages), default=0)
        frozen = self._frozen(num_samples) - min((saved[s] for s in stages), default=0)
        return max(training, frozen, self._frozen_ahead)

    def _largest(self, staged: Staged, num_samples: int) -> list[int]:
        """The largest operation of every stage."""
        largest = self.costs.temporary_bytes(num_samples)
        return [max((largest[b] for b in staged.blocks(s)), default=0) for s in range(staged.num_stages)]

    def _frozen(self, num_samples: int) -> int:
        """The largest operation of frozen work for a micro-batch."""
        return max(self.costs.component_temporary_bytes(num_samples), default=0)

    @property
    def _frozen_ahead(self) -> int:
        """The least that frozen work of the next batch needs at once, on one sample."""
        return max(self.costs.component_temporary_bytes(1), default=0) if self.filled else 0


def _of_places(places: Sequence[int]) -> list[list[int]]:
    """The stages of every place."""
    return [[s for s, p in enumerate(places) if p == place] for place in range(max(places) + 1)]


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
