"""A wave whose skips may cross levels, for a price: what levels weigh, and the problem once it is known which cross.

skips 0-5 1-4 2-3, of which 0-5 crosses      blocks 0 and 5 weigh its seconds more; 1-4 and 2-3 must not be torn
"""

from dataclasses import dataclass

import numpy as np

from passes.placement.waves.levels import Levels, Path, owners
from passes.placement.waves.skips import SkipSums

Skips = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Soft:
    """Blocks, skips and what a crossing one costs either of its levels."""

    free: Levels  # with no skip
    hard: Levels  # with all of them
    skips: Skips
    costs: tuple[float, ...]
    paid: SkipSums
    count: SkipSums

    @staticmethod
    def of(free: Levels, skips: Skips, costs: tuple[float, ...]) -> "Soft":
        paid, count = (SkipSums.of(free.num_blocks, skips, worth) for worth in (costs, (1.0,) * len(skips)))
        hard = Levels.of(free.weights, skips, free.num_levels, free.memory)
        return Soft(free, hard, skips, costs, paid, count)

    def given(self, crossing: tuple[int, ...]) -> Levels:
        """The hard problem of all other skips, where the ends of these pay for them."""
        rest = [skip for k, skip in enumerate(self.skips) if k not in crossing]
        weights = self.free.weights.copy()
        for k in crossing:
            for block in set(self.skips[k]):
                weights[block] += self.costs[k]
        return Levels.of(weights, rest, self.free.num_levels, self.free.memory)

    def crossing(self, path: Path) -> tuple[int, ...]:
        """Indices of the skips with ends on two levels."""
        owner = owners(path)
        return tuple(k for k, (start, end) in enumerate(self.skips) if owner[start] != owner[end])

    def largest(self, path: Path) -> float:
        return max(self.loads(path))

    def loads(self, path: Path) -> tuple[float, ...]:
        """Seconds of every level, crossing skips included."""
        i, j = np.array(path).T
        return tuple((np.array(self.free.loads(path)) + self.paid.one_end(i[:-1], i[1:], j[1:], j[:-1])).tolist())

    def torn(self, path: Path) -> float:
        """Twice the number of crossing skips."""
        i, j = np.array(path).T
        return float(self.count.one_end(i[:-1], i[1:], j[1:], j[:-1]).sum())
