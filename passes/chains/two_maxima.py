"""Cut several lines into S stages each, so that factor * (largest a) + (largest b) over all stages is least. Exact.

    b |  x                  x: cuts that nothing beats in both maxima
      |      x              least a without limit on b, then least b within that a: the leftmost x
      |          x          least a with b below that: the next one; and so on, until a alone is too much
      '-------------- a

The lines share nothing but the two maxima. Many problems at once: tables are [problems, first block, end].
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def least_sum(a: Sequence[Floats], b: Sequence[Floats], factor: Floats, num_stages: int) -> tuple[Floats, Floats]:
    """The two maxima of the best cuts of every problem.

    `a` and `b` have a table for every line, infinite where there is no stage; every line has a block for every stage.
    """
    lines = list(zip(a, b, strict=True))
    least_b = np.max([least_largest(values, num_stages) for values in b], axis=0)
    best_a, best_b = np.full_like(factor, np.inf), np.full_like(factor, np.inf)
    best, below = np.full_like(factor, np.inf), np.full_like(factor, np.inf)
    active = np.arange(len(factor))
    while len(active):
        limit = below[active, None, None]
        largest_a = _over_lines([(x[active], y[active] < limit) for x, y in lines], num_stages)
        open_ = factor[active] * largest_a + least_b[active] < best[active]
        active, largest_a = active[open_], largest_a[open_]
        limit = largest_a[:, None, None]
        largest_b = _over_lines([(y[active], x[active] <= limit) for x, y in lines], num_stages)
        value = factor[active] * largest_a + largest_b
        better = active[value < best[active]]
        best_a[better], best_b[better] = largest_a[value < best[active]], largest_b[value < best[active]]
        best[active] = np.minimum(best[active], value)
        below[active] = largest_b
    return best_a, best_b


def _over_lines(lines: Sequence[tuple[Floats, NDArray[np.bool_]]], num_stages: int) -> Floats:
    """The largest over the lines of their least largest value with the allowed stages only."""
    return np.asarray(np.max([least_largest(np.where(allowed, x, np.inf), num_stages) for x, allowed in lines], axis=0))


def least_largest(values: Floats, num_stages: int) -> Floats:
    """Of all cuts into stages, none empty, the least largest value of a stage: one for every problem."""
    best = _start(values)
    for _ in range(num_stages):
        best = np.maximum(best[:, :, None], values).min(axis=1)
    return np.asarray(best[:, -1])


def least_largest_cuts(values: Floats, num_stages: int) -> Ints:
    """Boundaries [problems, stages + 1] of cuts with that value."""
    best, sources = _start(values), []
    for _ in range(num_stages):
        larger = np.maximum(best[:, :, None], values)
        sources.append(larger.argmin(axis=1))
        best = larger.min(axis=1)
    positions = [np.full(len(values), values.shape[-1] - 1)]
    for source in reversed(sources):
        positions.append(source[np.arange(len(values)), positions[-1]])
    return np.stack(positions[::-1], axis=1)


def _start(values: Floats) -> Floats:
    best = np.full(values.shape[:2], np.inf)
    best[:, 0] = -np.inf
    return best
