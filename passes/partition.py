"""Cut a line of blocks into stages, each a run of neighbours, so that the busiest rank has least to do.

    blocks    0  1  2  3  4  5  6  7      skips 0-7 1-6 2-5
    linear    [ s0 ][ s1 ][ s2 ][ s3 ]    stage s on rank s: every skip crosses ranks
    wave      [s0][ s1 ][  s2 ][ s3 ]     stages s and 2N-1-s on rank s: s0 and s3 on rank 0, s1 and s2 on rank 1,
                                          every skip starts and ends on one rank

Empty stages are allowed; weights are seconds, skips pairs of blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_TOLERANCE = 1e-9  # relative; loads this close are equal, or rounding would overrule the second objective


def linear(weights: Sequence[float], num_stages: int, cut_costs: Sequence[float] | None = None) -> tuple[int, ...]:
    """The `num_stages` + 1 positions between stages whose largest stage is smallest, and of those the cheapest cuts.

    `weights` are seconds per block, `cut_costs[p]` what a cut before block p costs (any unit, one more than blocks).
    With fewer blocks than stages the last stages are empty. Dynamic programming over stages, O(stages * blocks^2).
    """
    prefix = _prefix(weights)
    num_blocks, used = len(weights), min(len(weights), num_stages)
    loads = np.where(np.tri(num_blocks + 1, k=-1, dtype=bool).T, prefix[None, :] - prefix[:, None], np.inf)
    largest = np.where(np.arange(num_blocks + 1) == 0, 0.0, np.inf)
    for _ in range(used):
        largest = np.maximum(largest[:, None], loads).min(axis=0)
    cut = np.zeros(num_blocks + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float)
    step = np.where(loads <= largest[-1] * (1 + _TOLERANCE), cut[:, None], np.inf)
    cost, sources = np.where(np.arange(num_blocks + 1) == 0, 0.0, np.inf), []
    for _ in range(used):
        sources.append((cost[:, None] + step).argmin(axis=0))
        cost = (cost[:, None] + step).min(axis=0)
    positions = [num_blocks]
    for source in reversed(sources):
        positions.append(int(source[positions[-1]]))
    return tuple(positions[::-1]) + (num_blocks,) * (num_stages - used)


def interleaved(
    weights: Sequence[float], num_ranks: int, chunks: int, cut_costs: Sequence[float] | None = None
) -> tuple[int, ...]:
    """`linear` for `chunks` stages per rank: stage s is on rank s % `num_ranks`."""
    return linear(weights, num_ranks * chunks, cut_costs)


def _prefix(weights: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=float))])


@dataclass(frozen=True)
class WavePartition:
    """2N stages on N ranks: stages d and 2N-1-d are on rank d."""

    boundaries: tuple[int, ...]  # 2N + 1 positions
    rank_loads: tuple[float, ...]  # seconds of each rank's blocks, and of the crossing skips it has one end of
    max_over_mean: float  # largest rank load over the mean without skip costs
    crossing: tuple[int, ...]  # indices of the skips with ends on two ranks


def wave(
    weights: Sequence[float],
    skips: Sequence[tuple[int, int]],
    num_ranks: int,
    hard: bool = True,
    cut_costs: Sequence[float] | None = None,
    skip_cost: Sequence[float] | None = None,
) -> WavePartition:
    """The wave whose largest rank load is smallest; of those with fewest crossing skips, empty stages, cut costs.

    `skips` are (producer block, consumer block), in any arrangement. `hard` puts both ends of each on one rank, which
    is always possible (one rank may take everything). Otherwise a crossing skip adds `skip_cost` seconds to both its
    ranks. Exact up to rounding; well under a second for 200 blocks on 64 ranks unless one block outweighs many ranks.

    Method: a state (i, j) leaves blocks [i, j) to the inner ranks; each rank makes one move to a smaller open interval.
    All skips are collocated if and only if no state has a skip with exactly one end inside, so `hard` keeps the closed
    states only. Bottleneck path over the moves no longer than a limit, which grows until a path exists.
    """
    line = _Line.of(weights, skips, skip_cost if skip_cost is not None and not hard else [0.0] * len(skips))
    cut = np.zeros(len(weights) + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float)
    total = float(line.prefix[-1])
    least = max(total / num_ranks, max(weights, default=0.0))
    slack = 0.005 * (least or line.paid_degree[-1])
    while (path := _best_path(line, num_ranks, hard, least + slack, cut)) is None:
        slack *= 2
    return _wave_partition(path, line, skips, total / num_ranks)


@dataclass(frozen=True)
class _Line:
    """Prefix sums of a line of blocks and its skips; `table[x, y]` sums the skips from blocks < x to blocks < y."""

    prefix: Floats
    degree: Floats  # ends of skips in blocks < x
    table: Floats
    paid_degree: Floats  # the same two, each skip counted with its cost
    paid_table: Floats

    @staticmethod
    def of(weights: Sequence[float], skips: Sequence[tuple[int, int]], cost: Sequence[float]) -> "_Line":
        size = len(weights) + 1
        count, paid = np.zeros((size, size)), np.zeros((size, size))
        for (start, end), seconds in zip(skips, cost, strict=True):
            at = min(start, end) + 1, max(start, end) + 1
            count[at] += 1
            paid[at] += seconds
        sums = [array for table in (count, paid) for array in (np.cumsum(table.sum(0) + table.sum(1)), _corner(table))]
        return _Line(_prefix(weights), *sums)

    def load(self, i: Ints, i2: Ints | int, j2: Ints, j: Ints) -> Floats:
        """Seconds of a rank that takes [i, i2) and [j2, j)."""
        blocks = self.prefix[i2] - self.prefix[i] + self.prefix[j] - self.prefix[j2]
        return blocks + _one_end(self.paid_degree, self.paid_table, i, i2, j2, j)

    def crossing(self, i: Ints, i2: Ints | int, j2: Ints, j: Ints) -> Floats:
        """Skips with exactly one end in [i, i2) or [j2, j)."""
        return _one_end(self.degree, self.table, i, i2, j2, j)


def _corner(table: Floats) -> Floats:
    return np.cumsum(np.cumsum(table, axis=0), axis=1)


def _one_end(degree: Floats, table: Floats, i: Ints, i2: Ints | int, j2: Ints, j: Ints) -> Floats:
    """All ends inside, less two for every skip with both; [i, i2) x [j2, j) are those from left to right."""
    ends = degree[i2] - degree[i] + degree[j] - degree[j2]
    left = table[i2, i2] - table[i, i2] - table[i2, i] + table[i, i]
    right = table[j, j] - table[j2, j] - table[j, j2] + table[j2, j2]
    both = left + right + table[i2, j] - table[i, j] - table[i2, j2] + table[i, j2]
    return np.asarray(ends - 2 * both)


@dataclass(frozen=True)
class _Moves:
    """Moves by target: those into state t are [starts[t], starts[t + 1]), at least the one of an idle rank."""

    source: Ints
    starts: Ints
    load: Floats
    price: Floats  # crossing skips, then empty stages, then cut costs

    def best(self, values: Floats) -> Floats:
        """The least value of the moves into every state."""
        return np.minimum.reduceat(values, self.starts[:-1])


def _best_path(line: _Line, num_ranks: int, hard: bool, limit: float, cut: Floats) -> list[tuple[int, int]] | None:
    """The states before, between and after the ranks' moves; None when none keeps all loads within `limit`."""
    left, right = _states(line, num_ranks, hard, limit)
    moves = _moves(line, left, right, limit, cut)
    start = np.where((left == 0) & (right == len(line.prefix) - 1), 0.0, np.inf)
    largest = start
    for _ in range(num_ranks):
        largest = moves.best(np.maximum(largest[moves.source], moves.load))
    bottleneck = largest[left == right].min()
    if bottleneck == np.inf:
        return None
    price = np.where(moves.load <= bottleneck * (1 + _TOLERANCE), moves.price, np.inf)
    values = [start]
    for _ in range(num_ranks):
        values.append(moves.best(values[-1][moves.source] + price))
    state = int(np.where(left == right, values[-1], np.inf).argmin())
    path = [state]
    for value in values[-2::-1]:
        into = slice(moves.starts[state], moves.starts[state + 1])
        state = int(moves.source[into][(value[moves.source[into]] + price[into]).argmin()])
        path.append(state)
    return [(int(left[state]), int(right[state])) for state in path[::-1]]


def _states(line: _Line, num_ranks: int, hard: bool, limit: float) -> tuple[Ints, Ints]:
    """Open intervals, row by row, that some number d of ranks can leave: they hold at most d limits, the rest N - d."""
    left, right = np.triu_indices(len(line.prefix))
    outer = line.prefix[left] + line.prefix[-1] - line.prefix[right]
    fewest = np.ceil(outer / limit * (1 - _TOLERANCE)) if limit else np.zeros_like(outer)
    keep = line.prefix[right] - line.prefix[left] <= (num_ranks - fewest) * limit * (1 + _TOLERANCE)
    if hard:
        keep &= line.crossing(left, right, right, right) == 0
    return left[keep], right[keep]


def _moves(line: _Line, left: Ints, right: Ints, limit: float, cut: Floats) -> _Moves:
    parts = [*_moves_by_row(line, left, right, limit, cut)]
    target, source, load, price = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _Moves(source, np.searchsorted(target, np.arange(len(left) + 1)), load, price)


def _moves_by_row(
    line: _Line, left: Ints, right: Ints, limit: float, cut: Floats
) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
    """Target, source, load and price of the moves into the states of each left end."""
    rows = np.searchsorted(left, np.arange(len(line.prefix) + 1))
    lightest = np.searchsorted(line.prefix, line.prefix - limit * (1 + _TOLERANCE))
    scale = 1 / (1 + cut.sum())  # cuts together weigh less than one empty stage
    for i2 in range(len(line.prefix)):
        targets = np.arange(rows[i2], rows[i2 + 1])
        sources = np.arange(rows[lightest[i2]], rows[i2 + 1])
        target, source = (side.ravel() for side in np.meshgrid(targets, sources, indexing="ij"))
        j2, j, i = right[target], right[source], left[source]
        near = (j2 <= j) & (line.prefix[i2] - line.prefix[i] + line.prefix[j] - line.prefix[j2] <= limit)
        target, source, i, j, j2 = (array[near] for array in (target, source, i, j, j2))
        load = line.load(i, i2, j2, j)
        empty = (i == i2) * 1.0 + (j == j2)
        cuts = cut[i2] * (i < i2) + cut[j2] * ((j2 < j) & (i2 < j2))
        price = line.crossing(i, i2, j2, j) * 4 * len(line.prefix) + empty + cuts * scale
        yield target[load <= limit], source[load <= limit], load[load <= limit], price[load <= limit]


def _wave_partition(
    path: list[tuple[int, int]], line: _Line, skips: Sequence[tuple[int, int]], mean: float
) -> WavePartition:
    steps = [(i, i2, j2, j) for (i, j), (i2, j2) in pairwise(path)]
    loads = tuple(float(line.load(*(np.asarray(position) for position in step))) for step in steps)
    owner = {block: rank for rank, (i, i2, j2, j) in enumerate(steps) for block in (*range(i, i2), *range(j2, j))}
    return WavePartition(
        boundaries=(*(i for i, _ in path), *(j for _, j in path[-2::-1])),
        rank_loads=loads,
        max_over_mean=max(loads) / mean if mean else 1.0,
        crossing=tuple(k for k, (start, end) in enumerate(skips) if owner[start] != owner[end]),
    )
