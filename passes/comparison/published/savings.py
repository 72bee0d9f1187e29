"""How much idle time can shorten the tail at most: lets the exact filler drop states early.

A second in a bubble of w ranks saves less than a second of the tail, which D ranks share: w / D of it where time is
proportional to samples, up to all of it where a layer takes as long on one sample as on many. The best that any layer
offers, for every bubble still to come, can't be exceeded.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from passes.comparison.published.bubbles import Bubble
from passes.comparison.published.spans import State, width
from passes.fill.problem import FillProblem

Floats = NDArray[np.float64]


class LeastTail:
    """A lower bound on the tail of a state, in seconds, which every step of filling lowers smoothly."""

    def __init__(self, problem: FillProblem) -> None:
        self._batch_size = problem.batch_size
        tables = [smooth_tables(problem, c) for c in range(len(problem.components))]
        self._tables = [[table.tolist() for table in of_layers] for of_layers in tables]
        # Seconds of all layers from each on.
        self._rest = [[*accumulate((t[-1] for t in reversed(of_layers)), initial=0.0)][::-1] for of_layers in tables]

    def __call__(self, state: State) -> float:
        total = 0.0
        for tables, rest, (layer, done) in zip(self._tables, self._rest, state, strict=True):
            if layer < len(tables):
                total += tables[layer][self._batch_size - done] + rest[layer + 1]
        return total


def smooth_tables(problem: FillProblem, component: int) -> list[Floats]:
    """By layer: at most its seconds in the tail, by number of samples left, as if fractions of them could be shared.

    In whole samples the 33rd sample costs eight ranks a whole step and the next seven nothing: too jagged to say what
    one sample saves.
    """
    ways = width(problem, component, range(problem.num_ranks))
    left = np.arange(problem.batch_size + 1)
    found = []
    for table in problem.seconds[component]:
        smooth = np.interp(np.maximum(left / ways, 1.0), left, table)
        smooth[0] = 0.0
        found.append(smooth)
    return found


def possible_savings(problem: FillProblem, bubbles: Sequence[Bubble]) -> list[float]:
    """Seconds by which the tail can shrink in this bubble and all after it, by position; zero at the end."""
    tables = [smooth_tables(problem, c) for c in range(len(problem.components))]

    @cache
    def rate(widths: tuple[int, ...]) -> float:
        pairs = zip(tables, problem.seconds, widths, range(len(tables)), strict=True)
        rates = (
            _rate(np.array(table), smooth, ways, () if problem.components[c].whole else sizes)
            for of_layers, seconds, ways, c in pairs
            if ways
            for smooth, table in zip(of_layers, seconds, strict=True)
        )
        return max(rates, default=0.0)

    sizes = problem.local_batches if problem.partial else ()
    components = range(len(problem.components))
    saved = [b.seconds * rate(tuple(width(problem, c, b.ranks) for c in components)) for b in reversed(bubbles)]
    return [*accumulate(saved, initial=0.0)][::-1]


def _rate(table: Floats, smooth: Floats, ways: int, sizes: Sequence[int]) -> float:
    """The most seconds of tail that a second of this layer saves, on all that is left or on a part of it."""
    left = np.arange(1, len(table))
    rates = [_ratio(smooth[1:], table[-(-left // ways)])]
    for size in sizes:
        cut = size * ways
        if cut + 1 < len(table):
            rates.append(_ratio((smooth[cut + 1 :] - smooth[1:-cut]).max(), table[size]))
    return max(rates)


def _ratio(saved: Floats | np.float64, spent: Floats | np.float64) -> float:
    """The largest saved / spent; saving nothing is no use even where it takes no time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.where(np.asarray(saved) > 0, np.divide(saved, spent), 0.0)))
