"""Placements with several stages per rank.

interleaved, 2 ranks x 2    rank 0: 0 2    rank 1: 1 3
one wave (a V)              rank 0: 0 3    rank 1: 1 2
two waves                   rank 0: 0 3 4 7    rank 1: 1 2 5 6
"""

from fxpipe.errors import CompileError


def interleaved_ranks(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of every stage, round after round in the same direction."""
    _positive(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    return tuple(range(num_ranks)) * stages_per_rank


def wave_ranks(num_ranks: int, num_waves: int = 1) -> tuple[int, ...]:
    """The rank of every stage of `num_waves` waves, 2 * num_ranks stages each (Hanayo: Liu et al., SC 2023).

    The map is its own mirror image, so that a skip between mirrored stages stays on its rank. ZB-V is one wave with
    backwards split in I and W.
    """
    _positive(num_ranks=num_ranks, num_waves=num_waves)
    return (*range(num_ranks), *reversed(range(num_ranks))) * num_waves


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise CompileError(f"{name}={count}; it must be at least 1")
