"""A smaller batch in a plan's order: the micro-batches of its first samples, the last of them cut.

    8 samples in micro-batches of 2            3 of them
    rank 0: 0F0 0F2 0B0 0B2 0R0         ->     rank 0: 0F0 0B0 0R0     samples 0, 1
    rank 1: 0F1 0F3 0B1 0B3 0R1                rank 1: 0F1 0B1 0R1     sample 2

Every sample stays on its ranks, every rank has no more of them than it was planned for, and what is left of an order in
which nothing waits forever is one, too. Ranks without samples are idle, but for sums of every micro-batch's gradients,
to which they give zeros.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from fxpipe.plan.actions import Action
from fxpipe.plan.schedule import Schedule


def first_samples(order: Schedule, sizes: Sequence[int], batch_size: int) -> tuple[Schedule, tuple[int, ...]]:
    """The order of a batch of so many samples, at most the sum of `sizes`, and the sizes of its micro-batches."""
    ends = accumulate(sizes)
    left = (min(size, batch_size - end + size) for size, end in zip(sizes, ends, strict=True))
    fewer = tuple(size for size in left if size > 0)
    kept = replace(order.where(lambda a: a.kind == "R" or a.microbatch < len(fewer)), num_microbatches=len(fewer))

    def is_summed(action: Action) -> bool:
        """Whether several ranks still have gradients of a stage, this one among them."""
        ranks = kept.stage_ranks[action.stage]
        return len(ranks) > 1 and action.microbatch in ranks

    return kept if order.is_scattered else kept.where(lambda a: a.kind != "R" or is_summed(a)), fewer
