"""Of the paths that tear no skip and keep a limit, the one with fewest empty stages, then the cheapest cuts.

    limit 4      [0 1][2 3|4 5][6 7]  and  [0][1 2 3|4 5 6][7]  both keep it: the cuts decide

Dynamic programming over levels. The best source of a state is a minimum over left ends i of a minimum over a *range*
of right ends j, which two entries of a table of minima over powers of two give.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.placement.memory import ROUNDING
from passes.placement.waves.levels import TOLERANCE, Floats, Ints, Levels, Path, extents


def best_tie(levels: Levels, limit: float, cut: Floats) -> Path:
    """The best path with no level above `limit` seconds, up to rounding; `cut[p]` is the cost of a cut before block p.

    There must be one. Every level of it fits its memory.
    """
    costs = cut / (1 + cut.sum())
    limit *= 1 + TOLERANCE
    usable = np.stack([_usable(levels, limit, level) for level in range(levels.num_levels + 1)])
    return _Search(levels, limit, costs, usable).best_path()


def _usable(levels: Levels, limit: float, level: int) -> NDArray[np.bool_]:
    """States that tear no skip, where what is outside fits into `level` levels and what is open into the others."""
    inner = levels.seconds[None, :] - levels.seconds[:, None]
    heavy = (inner > (levels.num_levels - level) * limit) | (levels.seconds[-1] - inner > level * limit)
    return np.asarray(levels.closed & ~heavy)


@dataclass(frozen=True)
class _Search:
    levels: Levels
    limit: float
    costs: Floats
    open: NDArray[np.bool_]  # [level, i, j]: the states worth looking at

    def best_path(self) -> Path:
        """The cheapest path over these states."""
        start = np.full(self.open[0].shape, np.inf)
        start[0, -1] = 0.0
        values = [start]
        for level in range(self.levels.num_levels):
            values.append(self._step(level, values[-1]))
        ends = values[-1].diagonal()
        at = int(ends.argmin())
        assert ends[at] < np.inf, "some path keeps the limit"
        path = [(at, at)]
        for level in reversed(range(self.levels.num_levels)):
            path.append(self._source(level, values[level], *path[-1]))
        return tuple(path[::-1])

    def _step(self, level: int, value: Floats) -> Floats:
        """The value of every state after one more level."""
        left, right = np.nonzero(self.open[level + 1])
        first = np.searchsorted(self.levels.seconds, self.levels.seconds[left] - self.limit, "left")
        some = np.concatenate([[0], np.cumsum(self.open[level].any(axis=1))])  # rows with states, before each row
        rows = np.flatnonzero(np.diff(some))
        target, row = extents(some[first], some[left + 1])
        i, i2, j2 = rows[row], left[target], right[target]
        last = self._last(level, i, i2, j2)
        exponent = _power(last - j2)
        minima = _powers_of_two(np.ascontiguousarray(value[rows].T), int(exponent.max(initial=0)))
        start, stop = np.minimum(j2 + 1, last), np.maximum(last + 1 - 2**exponent, 0)
        best = np.minimum(minima[exponent, start, row], minima[exponent, stop, row])
        taking, idle = self._prices(i, i2, j2)
        best = np.where(last > j2, best + taking, np.inf)
        best = np.minimum(best, np.where(last >= j2, value[i, j2] + idle, np.inf))
        after = np.full_like(value, np.inf)
        if len(target):
            reached = np.flatnonzero(np.diff(target, prepend=-1))
            after[left[target[reached]], right[target[reached]]] = np.minimum.reduceat(best, reached)
        return after

    def _source(self, level: int, value: Floats, i2: int, j2: int) -> tuple[int, int]:
        """The state before the level, on the cheapest path to (i2, j2)."""
        i = np.arange(np.searchsorted(self.levels.seconds, self.levels.seconds[i2] - self.limit, "left"), i2 + 1)
        last = self._last(level, i, np.full_like(i, i2), np.full_like(i, j2))
        owner, j = extents(np.full_like(i, j2), last + 1)
        taking, idle = self._prices(i, np.full_like(i, i2), np.full_like(i, j2))
        at = int((value[i[owner], j] + np.where(j == j2, idle[owner], taking[owner])).argmin())
        return int(i[owner[at]]), int(j[at])

    def _prices(self, i: Ints, i2: Ints, j2: Ints) -> tuple[Floats, Floats]:
        """Of a level that takes [i, i2), and something before its right end or nothing; no position is cut twice."""
        left, meet = np.where(i < i2, self.costs[i2], 1.0), i2 == j2
        return left + np.where(meet, 0.0, self.costs[j2]), np.where(meet & (i < i2), 1.0, left + 1.0)

    def _last(self, level: int, i: Ints, i2: Ints, j2: Ints) -> Ints:
        """The largest j so that [i, i2) and [j2, j) keep the limits; below j2 when there is none."""
        p = self.levels.seconds
        last = np.searchsorted(p, p[j2] + self.limit - (p[i2] - p[i]), "right") - 1
        if self.levels.memory is not None:
            left, right = self.levels.memory.left[level], self.levels.memory.right[level]
            spare = self.levels.memory.limits[level] * (1 + ROUNDING) - (left[i2] - left[i])
            last = np.minimum(last, np.searchsorted(right, right[j2] + spare, "right") - 1)
        return last


def _powers_of_two(values: Floats, largest: int) -> Floats:
    """[k, r]: the smallest of rows r, r + 1, ... of `values`, 2**k of them, for k up to `largest`."""
    minima = np.full((largest + 1, *values.shape), np.inf)
    minima[0] = values
    for k in range(largest):
        half = 2**k
        np.minimum(minima[k, :-half], minima[k, half:], out=minima[k + 1, :-half])
        minima[k + 1, -half:] = minima[k, -half:]
    return minima


def _power(counts: Ints) -> Ints:
    """The exponent of the largest power of two not above each count; 0 below 2."""
    return np.asarray(np.frexp(np.maximum(counts, 1))[1] - 1)
