"""Data parallel training as a schedule: every rank is a pipeline of its own, its stages are buckets of gradients.

    rank 0: 0T0 0F0 1F0 2F0 2B0 2R0 1B0 1R0 0B0 0R0        each bucket is reduced as soon as it is full, while earlier
    rank 1: 0T1 0F1 1F1 2F1 2B1 2R1 1B1 1R1 0B1 0R1        blocks' backward goes on

Several micro-batches a rank accumulate; reductions are in the last one's backward.

Source: Li et al., "PyTorch Distributed", VLDB 2020 (buckets of 25 MiB).
"""

from collections.abc import Iterator

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Run, Staged
from passes.case import Case
from passes.placement import buckets
from passes.schedules.replicas import tile


def replicated(case: Case, recompute: bool) -> Staged:
    """Every bucket a stage on all ranks; recomputed block by block, as under activation checkpointing."""
    boundaries, ranks = buckets.buckets(case.costs, buckets.BUCKET_BYTES), tuple(range(case.world_size))
    runs: tuple[Run, ...] = tuple((block, block + 1) for block in case.blocks) if recompute else ()
    return Staged(boundaries, (ranks,) * (len(boundaries) - 1), "data parallel", False, case.world_size, runs)


def accumulated(case: Case, staged: Staged, num_microbatches: int) -> Schedule:
    """Every rank its share of the micro-batches, one after the other."""
    work = case.work.of(staged, num_microbatches // staged.world_size)
    alone = Schedule(staged.schedule, staged.num_stages, work.num_microbatches, (tuple(_in_turn(work)),))
    return tile(alone, [(rank,) for rank in range(staged.world_size)], work, scattered=staged.scattered)


def _in_turn(work: Work) -> Iterator[Action]:
    for microbatch in range(work.num_microbatches):
        for component in range(work.num_components):
            yield Action(component, "T", microbatch)
        for stage in work.stages:
            yield Action(stage, "F", microbatch)
        for stage in reversed(work.stages):
            if stage in work.backward:
                yield Action(stage, "B", microbatch)
