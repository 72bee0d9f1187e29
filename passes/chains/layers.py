"""Cut chains into S stages by dynamic programming, layer by layer from the last stage, for many problems at once.

best[k][q]       least value of the last k stages, when q blocks more than needed come before them
                 = min over b of  value(a stage of 1 + b blocks)  (+ or max)  best[k - 1][q + b]

blocks   0 1 2 3 4 5 6     S = 3, k = 2, q = 1: blocks [2, 7) in two stages; every stage has at most L - S + 1 = 5
         [0 ][.........]   table[b, problem, i]: a stage of 1 + b blocks that begins at block i
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from passes.chains.boxes import TIE, Boxes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Masks = dict[int, Bools]


def band(num_blocks: int, num_stages: int) -> tuple[Ints, Ints]:
    """First block [1, L] and end [L - S + 1, L] of the stages in a table; ends beyond L are set to L."""
    start = np.arange(num_blocks)[None, :]
    lengths = np.arange(1, num_blocks - num_stages + 2)[:, None]
    return start, np.minimum(start + lengths, num_blocks)


@dataclass(frozen=True)
class ChainProblems:
    """P problems on L blocks: the main table's sum or maximum over S stages, plus the maxima of the other tables.

    Tables have the shape [L - S + 1, P, L]; entries of stages that end beyond L are not used.
    """

    num_stages: int
    main: Floats
    main_adds: bool
    criteria: Sequence[Floats]
    fits: Callable[[int, Ints], Bools] | None = None
    """(stages from here to the end, problems) -> which entries of the tables fit into memory."""


@dataclass(frozen=True)
class _Nodes:
    """Some of the problems, with the stages that their limits allow."""

    problems: ChainProblems
    problem: Ints
    main: Floats
    criteria: Sequence[Floats]
    allowed: Bools  # [L - S + 1, N, L], as the tables

    @staticmethod
    def of(problems: ChainProblems, problem: Ints, limit: Floats, ceiling: Floats | None = None) -> "_Nodes":
        main, criteria = problems.main[:, problem], [table[:, problem] for table in problems.criteria]
        allowed = np.ones(main.shape, dtype=bool) if ceiling is None else main <= ceiling[:, None]
        for k, table in enumerate(criteria):
            allowed &= table <= limit[:, k, None]
        return _Nodes(problems, problem, main, criteria, allowed)

    def layers(self, table: Floats, adds: bool, skip: Masks | None = None, note: Masks | None = None) -> Floats:
        """Best values [S + 1, N, 2 (L - S + 1)], infinite where there is no solution; the result is `[S, :, 0]`.

        Stages in `skip` are not used, if given; `note` receives those in none of the best solutions.
        """
        num, most = len(table), self.problems.num_stages
        width = max(np.flatnonzero(self.allowed.any(axis=(1, 2))), default=0) + 1
        values = np.where(self.allowed[:width], table[:width], np.inf)
        best = np.full((most + 1, len(self.problem), 2 * num), np.inf)
        best[0, :, num - 1] = 0.0 if adds else -np.inf
        after = sliding_window_view(best, num, axis=-1).transpose(0, 2, 1, 3)
        for k in range(1, most + 1):
            here = slice(most - k, most - k + (num if k < most else 1))
            part = slice(here.stop - here.start)
            rest = after[k - 1, :width, :, part]
            total = values[:, :, here] + rest if adds else np.maximum(values[:, :, here], rest)
            if self.problems.fits is not None:
                np.copyto(total, np.inf, where=~self.problems.fits(k, self.problem)[:width, :, here])
            if skip is not None:
                np.copyto(total, np.inf, where=skip[k][:width])
            best[k, :, part] = total.min(axis=0)
            if note is not None:
                note[k] = total > high(best[k, :, part])
        return best


def high(value: Floats) -> Floats:
    """A hair above: what equals the value but for rounding is within."""
    return value + TIE * np.where(np.isfinite(value), np.abs(value), 0.0)


def evaluate(problems: ChainProblems, boxes: Boxes, ceiling: Floats) -> tuple[Floats, Floats]:
    """The least main value of every box, and among its solutions the least of each criterion in turn."""
    if not len(boxes.problem):
        return boxes.main, boxes.lower
    nodes = _Nodes.of(problems, boxes.problem, boxes.limit, None if problems.main_adds else ceiling)
    skip = Masks() if problems.main_adds else None
    main = high(nodes.layers(nodes.main, problems.main_adds, note=skip)[-1, :, 0])
    if skip is None:
        nodes.allowed[...] &= nodes.main <= main[:, None]
    found = []
    for table in nodes.criteria:
        found.append(high(nodes.layers(table, False, skip)[-1, :, 0]))
        nodes.allowed[...] &= table <= found[-1][:, None]
    return main, np.stack(found, axis=1)


def lower_bounds(problems: ChainProblems) -> tuple[Floats, Floats]:
    """The least main value and the least of every criterion, each on its own: [P] and [P, criteria]."""
    problem = np.arange(problems.main.shape[1])
    nodes = _Nodes.of(problems, problem, np.full((len(problem), len(problems.criteria)), np.inf))
    main = nodes.layers(nodes.main, problems.main_adds)[-1, :, 0]
    return main, np.stack([nodes.layers(table, False)[-1, :, 0] for table in nodes.criteria], axis=1)


def paths(problems: ChainProblems, problem: Ints, limit: Floats) -> list[tuple[int, ...]]:
    """The boundaries of a solution with the least main value within limits that admit one."""
    nodes, skip = _Nodes.of(problems, problem, limit), Masks()
    nodes.layers(nodes.main, problems.main_adds, note=skip)
    return [_walk(skip, node, problems.num_stages) for node in range(len(problem))]


def _walk(skip: Masks, node: int, num_stages: int) -> tuple[int, ...]:
    positions, spare = [0], 0
    for k in range(num_stages, 0, -1):
        longer = int(skip[k][:, node, spare].argmin())
        positions.append(positions[-1] + 1 + longer)
        spare += longer
    return tuple(positions)
