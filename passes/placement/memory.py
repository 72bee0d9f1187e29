"""Memory of a stage, as a limit on what a partition may put on a rank.

stage of blocks 3, 4, 5, two micro-batches in flight      held 3 + 4 + 5
                                                        + 2 x activations of 3 + 4 + 5   <= limit of its rank
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.placement.checks import require_amounts

Floats = NDArray[np.float64]
ROUNDING = 1e-12  # relative; what a limit of memory may be exceeded by, less than a byte
_REMEDIES = "take more ranks, smaller micro-batches, or recompute activations"


@dataclass(frozen=True)
class StageMemory:
    """What blocks hold, how often, and what a rank has room for.

    A rank that owns two stages, as in a wave, holds both. The first stage of 2N keeps its activations longest.
    """

    held_bytes: Sequence[float]  # per block, once: weights, gradients, optimizer states
    activation_bytes: Sequence[float]  # per block and micro-batch in flight
    in_flight: Sequence[float]  # per stage, the most micro-batches between its forward and its backward
    limit_bytes: float | Sequence[float]  # per rank, or one for all: what is left for stages

    def check(self, num_blocks: int, num_stages: int, num_ranks: int) -> None:
        """Raises CompileError when a table has another length, or an entry that is no amount."""
        require_amounts("held_bytes", self.held_bytes, num_blocks)
        require_amounts("activation_bytes", self.activation_bytes, num_blocks)
        require_amounts("in_flight", self.in_flight, num_stages)
        require_amounts("limit_bytes", self._limits(num_ranks).tolist(), num_ranks)

    def levels(self, rank_of: Sequence[int]) -> "LevelMemory":
        """For levels on these ranks: level d owns stages d and 2 * levels - 1 - d, and has the limit of its rank."""
        count = np.asarray(self.in_flight, dtype=float)[:, None]
        totals = prefix(self.held_bytes) + count * prefix(self.activation_bytes)
        limits = self._limits(max(rank_of) + 1)[list(rank_of)]
        return LevelMemory(totals[: len(rank_of)], totals[: len(rank_of) - 1 : -1], limits)

    def stages(self, num_stages: int) -> tuple[Floats, Floats]:
        """Of a line with stage s on rank s: prefix sums [stages, blocks + 1], and limits [stages], in bytes."""
        count = np.asarray(self.in_flight, dtype=float)[:, None]
        return prefix(self.held_bytes) + count * prefix(self.activation_bytes), self._limits(num_stages)

    def _limits(self, num_ranks: int) -> Floats:
        limits = np.asarray(self.limit_bytes, dtype=float)
        return np.full(num_ranks, float(limits)) if limits.ndim == 0 else limits


@dataclass(frozen=True)
class LevelMemory:
    """Bytes of the blocks before each position, on either side of a level: [levels, blocks + 1]; limits [levels]."""

    left: Floats
    right: Floats
    limits: Floats

    def with_limits(self, limits: Floats) -> "LevelMemory":
        return LevelMemory(self.left, self.right, limits)

    def used(self, path: Sequence[tuple[int, int]]) -> Floats:
        """Bytes of every level, where `path` has the open interval before, between and after the levels."""
        i, j = np.array(path).T
        level = np.arange(len(self.limits))
        return np.asarray(
            self.left[level, i[1:]] - self.left[level, i[:-1]] + self.right[level, j[:-1]] - self.right[level, j[1:]]
        )


def prefix(amounts: Sequence[float]) -> Floats:
    """Sums of the amounts before each position, one more than amounts."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=float))])


def least_fitting(limits: Floats, largest: float, used: Callable[[Floats], Floats | None]) -> Floats:
    """The smallest limits that fit: all the same where `limits` are, else the same multiple of each.

    `used` gives the bytes taken by a partition within given limits, None where there is none; `largest` are bytes that
    one rank needs to take everything. Bisection, to a relative 1e-9, so that the bytes of the last partition decide.
    """
    share = limits / limits.max() if limits.max() > 0 and limits.min() < limits.max() else np.ones(len(limits))
    lower, upper = 0.0, largest
    best = used(share * upper)
    if best is None:  # a rank without room is in the way at any multiple
        share = np.ones(len(limits))
        best = used(share * upper)
    assert best is not None, "one rank with room for all takes all"
    while upper - lower > 1e-9 * upper:
        middle = (lower + upper) / 2
        found = used(share * middle)
        if found is None:
            lower = middle
        else:
            best, upper = (
                found,
                min(middle, float(np.divide(found, share, where=share > 0, out=np.zeros_like(found)).max())),
            )
    return share * upper


def refuse(limits: Floats, needed: Floats, what: str) -> CompileError:
    """The error of a partition that does not fit, with the smallest limits that would do."""
    if np.ptp(needed) == 0:
        return CompileError(
            f"no {what} fits into {gibibytes(limits.min())} per rank; the smallest limit that would do is "
            f"{gibibytes(needed[0])} ({needed[0]:.0f} bytes); {_REMEDIES}"
        )
    return CompileError(
        f"no {what} fits into the ranks' limits; the smallest that would do are {needed.max() / limits.max():.4f} "
        f"times as large, {', '.join(gibibytes(bytes_) for bytes_ in needed)}; {_REMEDIES}"
    )


def gibibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
