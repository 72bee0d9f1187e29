"""Cut chains into S stages by dynamic programming, layer by layer from the last stage, for many problems at once.

best[k][q]       least value of the last k stages, when q blocks more than needed come before them
                 = min over b of  value(a stage of 1 + b blocks)  (+ or max)  best[k - 1][q + b]

blocks   0 1 2 3 4 5 6     S = 3, k = 2, q = 1: blocks [2, 7) in two stages; every stage has at most L - S + 1 = 5
         [0 ][.........]   table[b, problem, i]: a stage of 1 + b blocks that begins at block i
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.chains.boxes import TIE, Boxes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Masks = dict[int, tuple[int, Bools]]
"""By number of stages from the end: the first q of a mask, and the mask [lengths, nodes, q]."""

Extent = tuple[int, Sequence[tuple[int, int]]]
"""The most blocks in an allowed stage, and for k = 1, 2, .. stages from the end the range of q that any can reach."""

_LARGEST = np.finfo(np.float64).max


def band(num_blocks: int, num_stages: int) -> tuple[Ints, Ints, Bools]:
    """First block [1, L] and end [L - S + 1, L] of the stages in a table, ends cut off at L; and which need no cutting
    off."""
    start = np.arange(num_blocks)[None, :]
    stop = start + np.arange(1, num_blocks - num_stages + 2)[:, None]
    return start, np.minimum(stop, num_blocks), stop <= num_blocks


@dataclass(frozen=True)
class ChainProblems:
    """P problems on L blocks: the main table's sum or maximum over S stages, plus the maxima of the other tables.

    Tables have the shape [L - S + 1, P, L]; the main one is infinite where there is no such stage.
    """

    num_stages: int
    main: Floats
    main_adds: bool
    criteria: Sequence[Floats]
    too_large: Mapping[int, Bools] = field(default_factory=dict)
    """By number of stages from here to the end: which entries of the tables do not fit into memory, if any."""


@dataclass(frozen=True)
class _Nodes:
    """Some of the problems, with the stages that their limits allow."""

    problems: ChainProblems
    problem: Ints
    main: Floats
    criteria: Sequence[Floats]
    allowed: Bools  # [L - S + 1, N, L], as the tables
    extent: Extent

    @staticmethod
    def of(problems: ChainProblems, problem: Ints, limit: Floats, ceiling: Floats | None = None) -> "_Nodes":
        main, criteria = problems.main[:, problem], [table[:, problem] for table in problems.criteria]
        allowed = main < np.inf if ceiling is None else main <= np.minimum(ceiling, _LARGEST)[:, None]
        for k, table in enumerate(criteria):
            allowed &= table <= limit[:, k, None]
        return _Nodes(problems, problem, main, criteria, allowed, _extent(allowed, problems.num_stages))

    def layers(self, table: Floats, adds: bool, skip: Masks | None = None, note: Masks | None = None) -> Floats:
        """The best value of every node, infinite where there is no solution.

        Stages in `skip` are not used, if given; `note` receives those in none of the best solutions.
        """
        num, most = len(table), self.problems.num_stages
        width, ranges = self.extent
        values = np.where(self.allowed[:width], table[:width], np.inf)
        best = np.full((most + 1, len(self.problem), 2 * num), np.inf)
        best[0, :, num - 1] = 0.0 if adds else -np.inf
        after = _windows(best, num)
        combine = np.add if adds else np.maximum
        for k, (low, end) in enumerate(ranges, start=1):
            here = slice(most - k + low, most - k + end)
            total = combine(values[:, :, here], after[k - 1, :width, :, low:end])
            if k in self.problems.too_large:
                np.copyto(total, np.inf, where=self.problems.too_large[k][:width, self.problem, here])
            if skip is not None:
                first, mask = skip[k]
                np.copyto(total, np.inf, where=mask[:width, :, low - first : end - first])
            least = np.minimum.reduce(total, axis=0)
            best[k, :, low:end] = least
            if note is not None:
                note[k] = low, total > high(least)
        return np.asarray(best[most, :, 0])

    def take(self, some: Bools) -> "_Nodes":
        criteria = [table[:, some] for table in self.criteria]
        main, allowed = self.main[:, some], self.allowed[:, some]
        return _Nodes(self.problems, self.problem[some], main, criteria, allowed, self.extent)


def _extent(allowed: Bools, num_stages: int) -> Extent:
    """Of all nodes together: k stages from the end begin no earlier than k longest stages would, and no later than
    S - k longest ones from the first block would end."""
    num, _, size = allowed.shape
    lengths = (allowed.any(axis=1) * np.arange(1, num + 1)[:, None]).max(axis=0)
    far = np.maximum.accumulate(np.arange(size) + lengths).tolist()  # the furthest end of stages up to here
    late, early = [0], [size]
    for _ in range(num_stages - 1):
        late.append(far[min(late[-1], size - 1)])
        early.append(bisect_left(far, early[-1]))
    ranges = []
    for k in range(1, num_stages + 1):
        low = max(0, (early[k] if k < num_stages else 0) - (num_stages - k))
        end = min(num if k < num_stages else 1, late[num_stages - k] - (num_stages - k) + 1)
        ranges.append((low, max(end, low)))
    return max(int(lengths.max()), 1), ranges


def _windows(best: Floats, num: int) -> Floats:
    """[k, b, node, q]: best[k, node, q + b]; `sliding_window_view` does the same in ten times the time."""
    layer, node, one = best.strides
    return np.ndarray((len(best), num, best.shape[1], num), best.dtype, best, strides=(layer, one, node, one))


def high(value: Floats) -> Floats:
    """A hair above: what equals the value but for rounding is within."""
    return value + TIE * np.abs(value)


def evaluate(problems: ChainProblems, boxes: Boxes, ceiling: Floats) -> tuple[Floats, Floats]:
    """The least main value of every box, and among its solutions the least of each criterion in turn."""
    criteria = np.full(boxes.lower.shape, np.inf)
    if not len(ceiling):
        return ceiling, criteria
    nodes = _Nodes.of(problems, boxes.problem, boxes.limit, None if problems.main_adds else ceiling)
    skip = Masks() if problems.main_adds else None
    main = high(nodes.layers(nodes.main, problems.main_adds, note=skip))
    main[main >= ceiling] = np.inf
    some = np.isfinite(main)
    if not some.all():
        nodes = nodes.take(some)
        skip = {k: (low, mask[:, some]) for k, (low, mask) in skip.items()} if skip is not None else None
    if len(nodes.problem):
        criteria[some] = _each_in_turn(nodes, main[some], skip)
    return main, criteria


def _each_in_turn(nodes: _Nodes, main: Floats, skip: Masks | None) -> Floats:
    """The least of the first criterion under the least main value, the least of the second under both, .."""
    if skip is None:
        nodes.allowed[...] &= nodes.main <= main[:, None]
    found = []
    for table in nodes.criteria:
        found.append(high(nodes.layers(table, False, skip)))
        nodes.allowed[...] &= table <= found[-1][:, None]
    return np.stack(found, axis=1)


def lower_bounds(problems: ChainProblems, known: Floats) -> tuple[Floats, Floats]:
    """The least main value and the least of every criterion, each on its own: [P] and [P, criteria].

    They hold for solutions that beat the `known` values [P]; infinite where there can be none.
    """
    tables = [problems.main, *problems.criteria]
    least = np.stack([table.min(axis=(0, 2)) for table in tables], axis=1)
    if problems.main_adds:
        least[:, 0] *= problems.num_stages
    limit = high(known[:, None] - (least.sum(axis=1, keepdims=True) - least))
    ceiling = None if problems.main_adds else limit[:, 0]
    nodes = _Nodes.of(problems, np.arange(len(known)), limit[:, 1:], ceiling)
    main = nodes.layers(nodes.main, problems.main_adds)
    return main, np.stack([nodes.layers(table, False) for table in nodes.criteria], axis=1)


def paths(problems: ChainProblems, problem: Ints, limit: Floats) -> list[tuple[int, ...]]:
    """The boundaries of a solution with the least main value within limits that admit one."""
    nodes, skip, every = _Nodes.of(problems, problem, limit), Masks(), np.arange(len(problem))
    nodes.layers(nodes.main, problems.main_adds, note=skip)
    spare, positions = np.zeros_like(problem), [np.zeros_like(problem)]
    for k in range(problems.num_stages, 0, -1):
        low, mask = skip[k]
        longer = mask[:, every, spare - low].argmin(axis=0)
        spare += longer
        positions.append(positions[-1] + 1 + longer)
    return [tuple(path) for path in np.stack(positions, axis=1).tolist()]
