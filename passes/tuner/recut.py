"""Stages of the same shape cut anew where memory decides: by what blocks hold, how often, and what a place has left.

1F1B over 4 ranks, 1 GiB a block and micro-batch     blocks 4 4 4 4     16 GiB 12 GiB 8 GiB 4 GiB
limit 12 GiB                                         blocks 3 4 4 5     12 GiB 12 GiB 8 GiB 5 GiB
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.errors import CompileError
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.staged import Staged, whole_stages
from fxpipe.simulate.op_lists import ADAMW_BYTES
from passes.case import Case
from passes.placement.memory import StageMemory
from passes.placement.place import place
from passes.tuner.bounds import in_flight
from passes.tuner.candidates import Candidate
from passes.tuner.recompute import Ordered

_MOST_CUT = 4
"""How often: what does not depend on single blocks, as temporaries, is that of the last cut."""


def cut_by_memory(
    case: Case, candidate: Candidate, staged: Staged, ordered: Ordered, limit_bytes: int
) -> Staged | None:
    """The fastest stages of the candidate's shape that fit; None where none are found.

    `staged` says what is recomputed, whole stages or blocks by themselves, and who holds frozen weights.
    """
    shape = candidate.shape
    if not shape.is_cut_by_memory or shape.places == 1:
        return None
    times = case.costs.at(microbatch_sizes(case.batch_size, candidate.microbatches)[0])
    for _ in range(_MOST_CUT):
        memory = _stage_memory(case, candidate, staged, ordered, limit_bytes)
        if memory is None:
            return None
        try:
            found = place(case, times, shape, candidate.microbatches, memory)
        except CompileError:
            return None
        cut = replace(staged.cut_at(found.boundaries), collocated=found.collocated)
        if max(ordered(cut)[1]) <= limit_bytes:
            return cut
        if cut == staged:
            return None
        staged = cut
    return None


def _stage_memory(
    case: Case, candidate: Candidate, staged: Staged, ordered: Ordered, limit_bytes: int
) -> StageMemory | None:
    """For a partition of the same shape; None where a place has no room at all, or all have too little.

    What does not depend on a block is that of the stages as they are: inputs, temporaries, frozen weights and work,
    and all that is kept of stages that are recomputed as a whole.
    """
    costs, shape = case.costs, candidate.shape
    num_samples = microbatch_sizes(case.batch_size, candidate.microbatches)[0]
    states = (0 if staged.offloaded else ADAMW_BYTES) / (len(shape.pipelines) if staged.sharded else 1)
    weights = [size / (len(shape.pipelines) if staged.gathered else 1) for size in costs.parameter_bytes]
    sums = 1 / (len(shape.pipelines) if staged.scattered else 1)
    held = [weights[b] + sums * costs.trained_bytes[b] + states * costs.trained_elements[b] for b in case.blocks]
    saved = _saved(case, staged, num_samples)
    schedule, needed = ordered(staged)
    most = in_flight(schedule.ranks)
    flying = [most[stage] for stage in range(staged.num_stages)]
    limits = [float(limit_bytes)] * shape.places
    for pipeline in shape.pipelines:
        for position, rank in enumerate(pipeline):
            mine = (stage for stage, ranks in enumerate(staged.stage_ranks) if rank in ranks)
            own = sum(held[b] + flying[stage] * saved[b] for stage in mine for b in staged.blocks(stage))
            limits[position] = min(limits[position], limit_bytes - needed[rank] + own)
    least = sum(held) + min(flying) * sum(saved)
    return StageMemory(held, saved, flying, limits) if 0 <= min(limits) and least <= sum(limits) else None


def _saved(case: Case, staged: Staged, num_samples: int) -> Sequence[int]:
    """What every block keeps of a micro-batch."""
    if staged.recompute and staged.recompute == whole_stages(staged.boundaries):
        return [0] * len(case.blocks)
    saved, kept = case.costs.saved_bytes(num_samples), case.costs.saved_bytes_recomputed(num_samples)
    again = {block for run in staged.recompute for block in range(*run)}
    return [min(kept[b], saved[b]) if b in again else saved[b] for b in case.blocks]
