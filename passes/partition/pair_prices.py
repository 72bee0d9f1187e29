"""Soft collocation where a crossing skip costs what the link between its two ranks makes it cost.

    2 nodes of 2 ranks    skip 0-3 crosses from rank 0 to rank 1: NVLink      to rank 2 or 3: Ethernet

The ranks are known only when the wave is. So: solve with every skip at its cheapest pair, which bounds all answers;
solve again with the skips that cross at the price of the pair they cross between, as long as that finds other waves;
then move the cuts of the best one, at the prices of all pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from fxpipe.errors import CompileError
from passes.partition.checks import require_amounts, require_positive
from passes.partition.descent import boundaries_of, improve, path_of
from passes.partition.layout import Layout
from passes.partition.levels import TOLERANCE, Floats, Path
from passes.partition.memory import StageMemory
from passes.partition.wave import WavePartition, wave

_ROUNDS = 6


@dataclass(frozen=True)
class PricedWave:
    """A wave whose rank loads have every crossing skip at the price of its own pair of ranks."""

    partition: WavePartition
    least_seconds: float  # no wave has a smaller largest rank load


def priced_wave(
    weights: Sequence[float],
    skips: Sequence[tuple[int, int]],
    num_ranks: int,
    pair_seconds: Callable[[int, int, int], float],
    cut_costs: Sequence[float] | None = None,
    memory: StageMemory | None = None,
) -> PricedWave:
    """The best wave found, never worse than the one with all skips collocated.

    `pair_seconds(skip, rank, other)` is what skip number `skip` costs either of two ranks it crosses between, rank <
    other. Where it is the same for all pairs the largest rank load is the smallest there is. Otherwise its distance
    from `least_seconds` says how far from that it can be. Other arguments as for `wave`.

    Raises:
        CompileError: nothing fits into memory, or an input is no amount.
    """
    require_positive(num_ranks=num_ranks)
    prices = _table(pair_seconds, len(skips), num_ranks)
    between = prices[:, ~np.eye(num_ranks, dtype=bool)]
    dearest = between.max(axis=1, initial=0.0)
    cheapest = between.min(axis=1, initial=np.inf) if num_ranks > 1 else dearest

    def solve(costs: Floats) -> WavePartition:
        return wave(weights, skips, num_ranks, False, cut_costs, costs.tolist(), memory)

    first = solve(cheapest)
    layout = Layout.of(weights, skips, range(num_ranks), False, cut_costs, prices, memory)
    paths = [*_repriced(solve, layout, first, cheapest), *_repriced(solve, layout, solve(dearest), dearest)]
    try:
        paths.append(path_of(wave(weights, skips, num_ranks, True, cut_costs, None, memory).boundaries))
    except CompileError:
        pass  # collocated, the skips need more memory than there is
    best, least = min(paths, key=lambda path: layout.evaluate(path)[0]), max(first.rank_loads)
    _, best = improve(layout, best, least * (1 + TOLERANCE))
    return PricedWave(_result(layout, best), least)


def _table(pair_seconds: Callable[[int, int, int], float], num_skips: int, num_ranks: int) -> Floats:
    """[skips, ranks, ranks]: seconds, symmetric, nothing within a rank."""
    table = np.zeros((num_skips, num_ranks, num_ranks))
    for skip, (rank, other) in product(range(num_skips), combinations(range(num_ranks), 2)):
        table[skip, rank, other] = table[skip, other, rank] = pair_seconds(skip, rank, other)
    require_amounts("pair_seconds", table.ravel().tolist())
    return table


def _repriced(
    solve: Callable[[Floats], WavePartition], layout: Layout, found: WavePartition, costs: Floats
) -> list[Path]:
    """Waves at the prices of the pairs between which skips crossed before, until one repeats."""
    seen: list[Path] = []
    while (path := path_of(found.boundaries)) not in seen and len(seen) < _ROUNDS:
        seen.append(path)
        start, end = layout.ranks(path)
        costs = np.where(start != end, layout.prices[np.arange(len(costs)), start, end], costs)
        found = solve(costs)
    return seen


def _result(layout: Layout, path: Path) -> WavePartition:
    _, loads, crossing = layout.evaluate(path)
    mean = float(layout.seconds[-1]) / len(loads)
    return WavePartition(
        boundaries=boundaries_of(path),
        rank_loads=tuple(loads.tolist()),
        max_over_mean=float(loads.max()) / mean if mean else 1.0,
        crossing=tuple(np.flatnonzero(crossing).tolist()),
    )
