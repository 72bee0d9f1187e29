"""Count skips between runs of blocks in constant time, by sums over prefixes.

blocks    0  1 [2  3] 4  5 [6  7]     skips 0-7 1-6 2-5 3-4
level 2..4 and 6..8: one end inside of all four, both ends of none
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SkipSums:
    """`ends[x]` sums the ends in blocks < x, `table[x, y]` the skips between blocks < x and blocks < y; blocks + 1.

    `torn[x, y]` sums the skips with exactly one end in [x, y), for x <= y.
    """

    ends: Floats
    table: Floats
    torn: Floats

    @staticmethod
    def of(num_blocks: int, skips: Sequence[tuple[int, int]], worth: Sequence[float]) -> "SkipSums":
        """Each skip counts with its worth."""
        table = np.zeros((num_blocks + 1, num_blocks + 1))
        for (start, end), amount in zip(skips, worth, strict=True):
            table[min(start, end) + 1, max(start, end) + 1] += amount
        ends = np.cumsum(table.sum(0) + table.sum(1))
        table = np.cumsum(np.cumsum(table, axis=0), axis=1)
        both = table.diagonal()[None, :] - table - table.T + table.diagonal()[:, None]
        return SkipSums(ends, table, ends[None, :] - ends[:, None] - 2 * both)

    def one_end(self, i: Ints, i2: Ints, j2: Ints, j: Ints) -> Floats:
        """Skips with exactly one end in [i, i2) or [j2, j), where i <= i2 <= j2 <= j."""
        between = self.table[i2, j] - self.table[i, j] - self.table[i2, j2] + self.table[i, j2]
        return np.asarray(self.torn[i, i2] + self.torn[j2, j] - 2 * between)
