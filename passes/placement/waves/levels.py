"""What the levels of a wave are made of and may weigh: the terms in which the solvers of this folder speak.

    blocks     0  1  2  3  4  5  6  7         a path: (0, 8) -> (2, 6) -> (4, 4)
    level 0   [----]            [----]        level 0 takes [0, 2) and [6, 8) and leaves [2, 6) open
    level 1         [----][----]              level 1 takes [2, 4) and [4, 6) and leaves nothing

A state (i, j) is an open interval [i, j). A path has one state more than levels; a level may take nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from passes.placement.memory import LevelMemory, prefix
from passes.placement.waves.skips import SkipSums

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Path = tuple[tuple[int, int], ...]
TOLERANCE = 1e-9  # relative; loads this close are equal, or rounding would overrule the next objective


@dataclass(frozen=True)
class Levels:
    """Blocks for `num_levels` levels, and the skips no level may tear."""

    weights: Floats  # seconds per block
    seconds: Floats  # of the blocks before each position
    closed: NDArray[np.bool_]  # [i, j], i <= j: no skip has exactly one end in [i, j)
    num_levels: int
    memory: LevelMemory | None

    @staticmethod
    def of(
        weights: Floats, skips: Sequence[tuple[int, int]], num_levels: int, memory: LevelMemory | None = None
    ) -> "Levels":
        torn = SkipSums.of(len(weights), skips, [1.0] * len(skips)).torn
        return Levels(weights, prefix(weights.tolist()), np.triu(torn == 0), num_levels, memory)

    @property
    def num_blocks(self) -> int:
        return len(self.weights)

    def loads(self, path: Path) -> tuple[float, ...]:
        """Seconds of every level's blocks."""
        p = self.seconds
        return tuple(float(p[i2] - p[i] + p[j] - p[j2]) for (i, j), (i2, j2) in pairwise(path))


def owners(path: Path) -> dict[int, int]:
    """The level of every block."""
    steps = enumerate(pairwise(path))
    return {b: level for level, ((i, j), (i2, j2)) in steps for b in (*range(i, i2), *range(j2, j))}


def boundaries_of(path: Path) -> tuple[int, ...]:
    """The positions between the stages: left ends inwards, then right ends outwards."""
    return (*(i for i, _ in path), *(j for _, j in path[-2::-1]))


def extents(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All integers of the ranges [starts, stops), one after another, with the index of the range each comes from."""
    counts = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
