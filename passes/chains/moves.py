"""Stages with any number of replicas as moves, and what can be reached by S of them with D devices.

a move: blocks [start, stop) on r devices          after k moves from the end: position start, devices used
reachable devices of a position are the bits of a word:  bit d = d devices beyond one per stage
    word[start]  |=  word[stop] << (r - 1)         all numbers of devices in one operation
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Moves:
    """Stages to choose S of, in line, with D devices in all; sorted by replicas, then by start."""

    start: Ints
    stop: Ints
    replicas: Ints
    num_blocks: int
    num_stages: int
    num_devices: int
    fits: Bools | None = None  # [S, moves]: whether it may be the k-th stage from the end

    def take(self, index: Bools | Ints) -> "Moves":
        fits = None if self.fits is None else self.fits[:, index]
        return replace(self, start=self.start[index], stop=self.stop[index], replicas=self.replicas[index], fits=fits)

    def feasible(self) -> bool:
        """Whether S moves lead from the first block to the end with exactly D devices."""
        spare = self.num_devices - self.num_stages
        kind = np.uint64 if spare < 64 else object  # Python's integers have as many bits as it takes
        order = np.argsort(self.start, kind="stable")
        stop, shift = self.stop[order], (self.replicas[order] - 1).astype(kind)
        starts, first = np.unique(self.start[order], return_index=True)
        if not len(starts) or starts[0] != 0:
            return False
        words = np.zeros(self.num_blocks + 1, dtype=kind)
        words[-1] = 1
        for k in range(self.num_stages):
            values = words[stop] << shift
            if self.fits is not None:
                values[~self.fits[k, order]] = 0
            words = np.zeros_like(words)
            words[starts] = np.bitwise_or.reduceat(values, first)
        return bool(int(words[0]) >> spare & 1)

    def least_maximum(self, values: Floats) -> float:
        """The least possible maximum of `values` [moves] over S moves; infinite where there is no way."""
        order = np.unique(values)
        found = first_true(len(order), lambda i: self.take(values <= order[i]).feasible())
        return float(order[found]) if found < len(order) else np.inf

    def least_sum(self, values: Floats) -> tuple[float, Ints]:
        """The least sum of `values` [moves] over S moves, and the moves, the first block's first."""
        best = np.full((self.num_stages + 1, self.num_blocks + 1, self.num_devices + 1), np.inf)
        best[0, -1, 0] = 0.0
        for k in range(1, self.num_stages + 1):
            for r, group in self._groups():
                cost = values[group]
                if self.fits is not None:
                    cost = np.where(self.fits[k - 1, group], cost, np.inf)
                total = best[k - 1, self.stop[group], : self.num_devices + 1 - r] + cost[:, None]
                starts, first = np.unique(self.start[group], return_index=True)
                least = np.minimum.reduceat(total, first, axis=0)
                best[k, starts, r:] = np.minimum(best[k, starts, r:], least)
        value = float(best[-1, 0, -1])
        return value, self._walk(best, values) if np.isfinite(value) else np.empty(0, dtype=np.int64)

    def _groups(self) -> Iterator[tuple[int, slice]]:
        """Replicas, and where their moves are."""
        for r in np.unique(self.replicas).tolist():
            yield r, slice(*np.searchsorted(self.replicas, [r, r + 1]))

    def _walk(self, best: Floats, values: Floats) -> Ints:
        position, devices, path = 0, self.num_devices, []
        for k in range(self.num_stages, 0, -1):
            usable = (self.start == position) & (self.replicas <= devices)
            if self.fits is not None:
                usable &= self.fits[k - 1]
            here = np.flatnonzero(usable)
            rest = best[k - 1, self.stop[here], devices - self.replicas[here]]
            chosen = here[(rest + values[here]).argmin()]
            path.append(chosen)
            position, devices = self.stop[chosen], devices - self.replicas[chosen]
        return np.array(path)

    def covering(self, values: Floats) -> float:
        """A lower bound of `least_maximum`: some move must cover the block whose cheapest cover is dearest."""
        size = self.num_blocks
        table = np.full((size, size + 1), np.inf)
        np.minimum.at(table, (self.start, self.stop), values)
        table = np.minimum.accumulate(table, axis=0)
        table = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        return float(table[np.arange(size), np.arange(size) + 1].max())


def first_true(count: int, test: Callable[[int], bool]) -> int:
    """The first of 0, 1, .. `count` - 1 that passes a test which all after it pass; `count` if none does.

    Small numbers are tried first: here they are the ones with few moves, quick to test.
    """
    low, high, step = 0, min(63, count - 1), 64
    while low < count and not test(high):
        low, high, step = high + 1, min(high + step, count - 1), 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle + 1, high)
    return low
