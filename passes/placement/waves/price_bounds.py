"""Bounds on the price of the states of a wave, from levels whose two stages keep the limit each, not together.

    exact      left + right <= limit            a minimum over pairs of stages
    relaxed    left <= limit, right <= limit    a minimum over right stages, then one over left stages

The price of a path is the number of its empty stages, and its cuts scaled to less than one empty stage together. A
relaxed path pays for the position it ends at on both sides; the price to go gives that back.
"""

import numpy as np
from numpy.typing import NDArray

from passes.placement.waves.levels import Floats, Ints, Levels


def price_bounds(levels: Levels, open_states: NDArray[np.bool_], limit: float, costs: Floats) -> Floats:
    """[levels + 1, i, j]: no path through the state (i, j) after so many levels is cheaper; infinite for no path.

    `open_states` are those paths may use; `costs` the scaled costs of a cut before each block.
    """
    size, num_levels, p = levels.num_blocks + 1, levels.num_levels, levels.seconds
    below = np.searchsorted(p, p - limit, "left"), np.arange(size)
    above = np.arange(size) + 1, np.searchsorted(p, p + limit, "right")
    column = costs[:, None]
    so_far, to_go = (np.full((num_levels + 1, size, size), np.inf) for _ in range(2))
    so_far[0, 0, -1] = 0.0
    for level in range(num_levels):
        start = _turned(so_far[level])  # the position that moves comes first
        right = _turned(np.minimum(start + 1.0, least(start, *above) + column))
        left = np.minimum(right + 1.0, least(right, *below) + column)
        np.copyto(so_far[level + 1], left, where=open_states[level + 1])
    np.fill_diagonal(to_go[-1], -costs)
    for level in reversed(range(num_levels)):
        end = to_go[level + 1]
        left = _turned(np.minimum(end + 1.0, least(end + column, *above)))
        right = _turned(np.minimum(left + 1.0, least(left + column, *below)))
        np.copyto(to_go[level], right, where=open_states[level])
    return np.asarray(so_far + to_go)


def _turned(values: Floats) -> Floats:
    return np.ascontiguousarray(values.T)


def least(values: Floats, starts: Ints, stops: Ints) -> Floats:
    """Row r: the smallest of values[starts[r]:stops[r]], column by column; infinite where there are none."""
    exponent = power(stops - starts)
    minima = powers_of_two(values, int(exponent.max()))
    first, last = np.minimum(starts, len(values) - 1), np.maximum(stops - 2**exponent, 0)
    found = np.minimum(minima[exponent, first], minima[exponent, last])
    found[stops <= starts] = np.inf
    return np.asarray(found)


def powers_of_two(values: Floats, largest: int) -> Floats:
    """[k, r]: the smallest of rows r, r + 1, ... of `values`, 2**k of them, for k up to `largest`."""
    minima = np.full((largest + 1, *values.shape), np.inf)
    minima[0] = values
    for k in range(largest):
        half = 2**k
        np.minimum(minima[k, :-half], minima[k, half:], out=minima[k + 1, :-half])
        minima[k + 1, -half:] = minima[k, -half:]
    return minima


def power(counts: Ints) -> Ints:
    """The exponent of the largest power of two not above each count; 0 below 2."""
    return np.asarray(np.frexp(np.maximum(counts, 1))[1] - 1)
