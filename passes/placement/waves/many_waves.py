"""Cut a line of blocks into 2WN stages for W waves over N ranks: a rank owns W stages of each half, mirrored.

    2 ranks, 2 waves    stages  0 1 2 3 4 5 6 7
                        ranks   0 1 1 0 0 1 1 0      levels (0, 7) (1, 6) (2, 5) (3, 4) on ranks 0 1 1 0

The zig-zag is its own mirror image, so skips between mirrored stages stay on their rank (Hanayo: Liu et al., SC 2023).
A wave over W * N levels has exactly the least largest *level*. A rank's load is the sum of its levels: that one is
improved by local search, which moves the cuts of one level at a time and restarts from changed cuts:

path    ... (2, 9) -> (4, 7) -> (5, 6) ...      (4, 7) may become any (i, j) with 2 <= i <= 5 and 6 <= j <= 9
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.placement.memory import ROUNDING, LevelMemory, StageMemory, prefix
from passes.placement.waves.levels import TOLERANCE, Floats, Ints, Path, boundaries_of
from passes.placement.waves.wave import WavePartition, wave

_NEAR = 6  # blocks a cut moves at once
_CHANGED = 6  # states changed to start again, at most
TRIALS = 1000  # states moved

Key = tuple[float, float, float, float]
"""Bytes too many; largest rank load and squares of all, in 1e-12 of the total; cuts."""


def waves(
    weights: Sequence[float],
    skips: Sequence[tuple[int, int]],
    num_ranks: int,
    num_waves: int,
    hard: bool = True,
    cut_costs: Sequence[float] | None = None,
    skip_cost: Sequence[float] | None = None,
    memory: StageMemory | None = None,
    slack: float = 0.0,
) -> WavePartition:
    """`num_waves` waves over the ranks, the largest rank load as small as a local search gets it.

    Arguments as for `wave`; `memory` has `in_flight` for 2 * num_waves * num_ranks stages, and limits per rank, which
    the stages of a rank share. One wave is exact, and alone has `slack`; of more, the least largest level is where the
    search starts, always with all skips collocated if `hard`. The same arguments give the same partition.

    Raises:
        CompileError: no partition was found that fits into memory.
    """
    if num_waves == 1:
        return wave(weights, skips, num_ranks, hard, cut_costs, skip_cost, memory, slack)
    rank_of = np.array(((*range(num_ranks), *reversed(range(num_ranks))) * num_waves)[: num_ranks * num_waves])
    start = wave(weights, skips, len(rank_of), hard, cut_costs, skip_cost).boundaries
    costs = np.zeros(len(skips)) if hard or skip_cost is None else np.asarray(skip_cost, dtype=float)
    layout = _Layout(
        seconds=prefix(weights),
        ends=np.array(skips, dtype=np.int64).reshape(-1, 2).T,
        costs=costs,
        cut=np.zeros(len(weights) + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float),
        rank_of=rank_of,
        memory=None if memory is None else memory.levels(rank_of.tolist()),
        hard=hard,
    )
    path = tuple(zip(start[: len(rank_of) + 1], start[: len(rank_of) - 1 : -1], strict=True))
    mean = sum(weights) / num_ranks
    key, path = _improved(layout, path, max(mean, max(weights, default=0.0)) * (1 + TOLERANCE))
    if key[0] > 0:
        raise CompileError(f"no {num_waves} waves were found that fit into the memory of their ranks")
    _, loads, crossing = layout.evaluate(path)
    largest = float(loads.max()) / mean if mean else 1.0
    return WavePartition(boundaries_of(path), tuple(loads.tolist()), largest, tuple(np.flatnonzero(crossing).tolist()))


@dataclass(frozen=True)
class _Layout:
    """Blocks, skips and the rank of every level. A skip may not cross ranks if `hard`, else its two ranks pay."""

    seconds: Floats  # of the blocks before each position
    ends: Ints  # [2, skips]: blocks
    costs: Floats  # seconds a crossing skip costs either of its ranks
    cut: Floats
    rank_of: Ints  # per level
    memory: LevelMemory | None  # of every level, with the limits of its rank
    hard: bool

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

    @property
    def unit(self) -> float:
        """Seconds that loads are rounded to: the order of additions must not decide."""
        return 1e-12 * float(self.seconds[-1] + self.costs.max(initial=0.0)) or 1.0

    def _changed(self, path: Path, at: int, left: Ints, right: Ints) -> tuple[list[Key], Floats, NDArray[np.bool_]]:
        """For every state to put at `at`: the key, loads [states, ranks], and crossing skips [states, skips]."""
        i, j = (np.repeat(column[None, :], len(left), axis=0) for column in np.array(path).T)
        held = ((i[0, 1:, None, None] <= self.ends) & (self.ends < j[0, 1:, None, None])).sum(axis=0)
        old = (path[at][0] <= self.ends) & (self.ends < path[at][1])
        new = (left[:, None, None] <= self.ends) & (self.ends < right[:, None, None])
        ranks = self.rank_of[held + new - old]  # of both ends of every skip: how many states after the first hold it
        crossing = ranks[:, 0] != ranks[:, 1]
        i[:, at], j[:, at] = left, right
        shares = np.eye(int(self.rank_of.max()) + 1)[self.rank_of]
        loads = (np.diff(self.seconds[i], axis=1) - np.diff(self.seconds[j], axis=1)) @ shares
        for end in range(2):
            np.add.at(loads, (np.arange(len(left))[:, None], ranks[:, end]), crossing * self.costs)
        turns = np.append(self.rank_of[1:] != self.rank_of[:-1], False)
        cuts = ((self.cut[i] + self.cut[j])[:, 1:] * turns).sum(axis=1)
        largest, squares = np.round(loads.max(axis=1) / self.unit), np.round((loads**2).sum(axis=1) / self.unit)
        return list(zip(self._excess(i, j, shares), largest, squares, cuts, strict=True)), loads, crossing

    def _excess(self, i: Ints, j: Ints, shares: Floats) -> Floats:
        """The most bytes a rank is over its limit, for every row of states."""
        if self.memory is None:
            return np.zeros(len(i))
        left, right, level = self.memory.left, self.memory.right, np.arange(len(self.rank_of))
        used = left[level, i[:, 1:]] - left[level, i[:, :-1]] + right[level, j[:, :-1]] - right[level, j[:, 1:]]
        limits = np.zeros(shares.shape[1])
        limits[self.rank_of] = self.memory.limits * (1 + ROUNDING)
        return np.asarray(np.maximum(used @ shares - limits, 0.0).max(axis=1))


def _improved(layout: _Layout, start: Path, least: float) -> tuple[Key, Path]:
    """The best path found from `start`, and its key; ends early when no rank load is above `least` seconds."""
    chance = random.Random(0)
    key, path, trials = _descend(layout, layout.evaluate(start)[0], start, TRIALS)
    while trials > 0 and (key[0] > 0 or key[1] * layout.unit > least):
        changed = key, path
        for _ in range(chance.randint(1, _CHANGED)):
            at = chance.randrange(1, len(path))
            left, right = _states(changed[1], at)
            pick = chance.randrange(len(left))
            changed = layout.best(changed[1], at, left[pick : pick + 1], right[pick : pick + 1]) or changed
            trials -= 1
        other_key, other, trials = _descend(layout, *changed, trials)
        key, path = min((key, path), (other_key, other))
    return key, path


def _descend(layout: _Layout, key: Key, path: Path, trials: int) -> tuple[Key, Path, int]:
    """Move one state after another as long as that helps; what is left of the trials."""
    still = 0
    while trials > 0 and still < len(path) - 1:
        at = 1 + trials % (len(path) - 1)
        found = layout.best(path, at, *_states(path, at))
        trials, still = trials - 1, still + 1
        if found is not None and found[0] < key:
            key, path, still = *found, 0
    return key, path, trials


def _states(path: Path, at: int) -> tuple[Ints, Ints]:
    """The states near the one at `at` and between its neighbours; the last one is empty."""
    (i0, j0), (i, j) = path[at - 1 : at + 1]
    if at == len(path) - 1:
        meet = np.arange(max(i0, i - _NEAR), min(j0, i + _NEAR) + 1)
        return meet, meet
    i1, j1 = path[at + 1]
    left = np.arange(max(i0, i - _NEAR), min(i1, i + _NEAR) + 1)
    right = np.arange(max(j1, j - _NEAR), min(j0, j + _NEAR) + 1)
    return np.repeat(left, len(right)), np.tile(right, len(left))
