"""The most bytes a rank of data parallel training needs, from block costs: state, inputs, and a micro-batch."""

from passes.comparison.data_parallel import local_sizes
from passes.rehearsal.case import Case
from passes.rehearsal.memory import frozen_bytes
from passes.room import state_bytes


def ddp_peak_bytes(case: Case, num_microbatches: int, recompute: bool = False) -> int:
    """The whole state, and the fullest moment of a micro-batch."""
    return state_bytes(case.costs, case.blocks) + _local_step_bytes(case, num_microbatches, recompute)


def zero_peak_bytes(case: Case, num_microbatches: int, recompute: bool = False) -> int:
    """A share of the state, the weights of two gathered blocks, and one's gradients before they are scattered."""
    gathered = sum(sorted(case.costs.parameter_bytes)[-2:]) + max(case.costs.trained_bytes)
    share = -(-state_bytes(case.costs, case.blocks) // case.world_size)
    return share + gathered + _local_step_bytes(case, num_microbatches, recompute)


def _local_step_bytes(case: Case, num_microbatches: int, recompute: bool) -> int:
    """What a rank holds beside its state: frozen weights, inputs, and what a micro-batch leaves for its backward.

    Recomputed block by block, as under activation checkpointing: every block keeps its inputs, one block all it saves.
    """
    costs, sizes = case.costs, local_sizes(case, num_microbatches)[0]
    size = max(sizes)
    saved = costs.stage_saved_bytes(case.blocks, size)
    if recompute:
        value_bytes = costs.values.sizes.at(size)
        kept = frozenset[int]().union(*costs.values.read)
        saved = int(sum(value_bytes[value] for value in kept)) + max(costs.saved_bytes(size))
    training = saved + max(costs.temporary_bytes(size))
    inputs = costs.given_bytes(case.blocks, sum(sizes))
    return sum(costs.component_bytes) + inputs + max(training, frozen_bytes(case, size))
