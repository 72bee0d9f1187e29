"""Levels that share ranks: what moving one state of a path does to the load and memory of every rank.

path    ... (2, 9) -> (4, 7) -> (5, 6) ...      (4, 7) may become any (i, j) with 2 <= i <= 5 and 6 <= j <= 9
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.placement.memory import ROUNDING, LevelMemory, StageMemory, prefix
from passes.placement.waves.levels import Floats, Ints, Path

Key = tuple[
    float, float, float, float
]  # bytes too many; largest rank load and squares of all, in 1e-12 of the total; cuts


@dataclass(frozen=True)
class WaveLayout:
    """Blocks, skips and the rank of every level. A skip may not cross ranks if `hard`, else its two ranks pay."""

    seconds: Floats  # of the blocks before each position
    ends: Ints  # [2, skips]: blocks
    prices: Floats  # [skips, ranks, ranks]: seconds a skip costs either of two ranks; nothing within one
    cut: Floats
    rank_of: Ints  # per level
    memory: LevelMemory | None  # of every level, with the limits of its rank
    hard: bool

    @staticmethod
    def of(
        weights: Sequence[float],
        skips: Sequence[tuple[int, int]],
        rank_of: Sequence[int],
        hard: bool,
        cut_costs: Sequence[float] | None,
        prices: Floats | None,
        memory: StageMemory | None,
    ) -> "WaveLayout":
        """Without `prices` crossing is free."""
        num_ranks = max(rank_of) + 1
        return WaveLayout(
            seconds=prefix(weights),
            ends=np.array(skips, dtype=np.int64).reshape(-1, 2).T,
            prices=np.zeros((len(skips), num_ranks, num_ranks)) if prices is None else prices,
            cut=np.zeros(len(weights) + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float),
            rank_of=np.array(rank_of),
            memory=None if memory is None else memory.levels(rank_of),
            hard=hard,
        )

    def evaluate(self, path: Path) -> tuple[Key, Floats, NDArray[np.bool_]]:
        """The path's key, the loads of its ranks, and which skips cross them."""
        keys, loads, crossing = self._changed(path, 0, np.array([0]), np.array([path[0][1]]))
        return keys[0], loads[0], crossing[0]

    def best(self, path: Path, at: int, left: Ints, right: Ints) -> tuple[Key, Path] | None:
        """The path with the best of the states (left, right) at `at`; None if each makes a skip cross that must not."""
        keys, _, crossing = self._changed(path, at, left, right)
        allowed = [n for n in range(len(left)) if not (self.hard and crossing[n].any())]
        if not allowed:
            return None
        best = min(allowed, key=keys.__getitem__)
        return keys[best], (*path[:at], (int(left[best]), int(right[best])), *path[at + 1 :])

    def ranks(self, path: Path) -> tuple[Ints, Ints]:
        """Of the two ends of every skip."""
        ranks = self.rank_of[self._levels(path, 0, np.array([0]), np.array([path[0][1]]))[0]]
        return ranks[0], ranks[1]

    @property
    def num_blocks(self) -> int:
        return len(self.seconds) - 1

    @property
    def unit(self) -> float:
        """Seconds that loads are rounded to: the order of additions must not decide."""
        return 1e-12 * float(self.seconds[-1] + self.prices.max(initial=0.0)) or 1.0

    def _changed(self, path: Path, at: int, left: Ints, right: Ints) -> tuple[list[Key], Floats, NDArray[np.bool_]]:
        """For every state to put at `at`: the key, loads [states, ranks], and crossing skips [states, skips]."""
        i, j = (np.repeat(column[None, :], len(left), axis=0) for column in np.array(path).T)
        i[:, at], j[:, at] = left, right
        shares = np.eye(int(self.rank_of.max()) + 1)[self.rank_of]
        loads = (np.diff(self.seconds[i], axis=1) - np.diff(self.seconds[j], axis=1)) @ shares
        ranks = self.rank_of[self._levels(path, at, left, right)]
        crossing = ranks[:, 0] != ranks[:, 1]
        paid = self.prices[np.arange(len(self.prices)), ranks[:, 0], ranks[:, 1]]
        for end in range(2):
            np.add.at(loads, (np.arange(len(left))[:, None], ranks[:, end]), paid)
        turns = np.append(self.rank_of[1:] != self.rank_of[:-1], False)
        cuts = ((self.cut[i] + self.cut[j])[:, 1:] * turns).sum(axis=1)
        excess = self._excess(i, j, shares)
        largest, squares = np.round(loads.max(axis=1) / self.unit), np.round((loads**2).sum(axis=1) / self.unit)
        return list(zip(excess, largest, squares, cuts, strict=True)), loads, crossing

    def _levels(self, path: Path, at: int, left: Ints, right: Ints) -> Ints:
        """[states, 2, skips]: the level of both ends of every skip: how many states after the first hold it."""
        i, j = np.array(path).T[:, 1:, None, None]
        held = ((i <= self.ends) & (self.ends < j)).sum(axis=0)
        i, j = left[:, None, None], right[:, None, None]
        new = (i <= self.ends) & (self.ends < j)
        old = (path[at][0] <= self.ends) & (self.ends < path[at][1])
        return np.asarray(held + new - old if at else np.repeat(held[None], len(left), axis=0))

    def _excess(self, i: Ints, j: Ints, shares: Floats) -> Floats:
        """The most bytes a rank is over its limit, for every row of states."""
        if self.memory is None:
            return np.zeros(len(i))
        left, right, level = self.memory.left, self.memory.right, np.arange(len(self.rank_of))
        used = left[level, i[:, 1:]] - left[level, i[:, :-1]] + right[level, j[:, :-1]] - right[level, j[:, 1:]]
        limits = np.zeros(shares.shape[1])
        limits[self.rank_of] = self.memory.limits * (1 + ROUNDING)
        return np.asarray(np.maximum(used @ shares - limits, 0.0).max(axis=1))
