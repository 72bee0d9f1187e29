"""Cut a line of blocks into 2N stages on N ranks, stages d and 2N-1-d on rank d, so that skips stay on their rank.

    blocks    0  1  2  3  4  5  6  7      skips 0-7 1-6 2-5
    wave      [s0][ s1 ][  s2 ][ s3 ]     s0 and s3 on rank 0, s1 and s2 on rank 1
    hard      all skips collocated        soft      a skip may cross ranks if it pays its transfer

PULSE (arXiv 2606.19163) collocates nested skips; here skips lie in any arrangement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpipe.errors import CompileError
from passes.placement.memory import LevelMemory, StageMemory
from passes.placement.waves.crossing import least_soft_path
from passes.placement.waves.fronts import least_path
from passes.placement.waves.levels import Levels, Path, boundaries_of
from passes.placement.waves.soft import Soft
from passes.placement.waves.ties import best_tie


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
    memory: StageMemory | None = None,
    slack: float = 0.0,
) -> WavePartition:
    """The wave whose largest rank load is smallest, then with fewest crossing skips, exact up to rounding.

    Of all such waves in which the same skips cross, the one with fewest empty stages, then cut costs, exact as well.

    Args:
        weights: seconds per block.
        skips: (producer block, consumer block), in any arrangement.
        hard: both ends of each skip on one rank; without memory limits always possible, one rank may take everything.
            Otherwise a crossing skip adds its seconds in `skip_cost` to both its ranks.
        cut_costs: what a cut before each block costs, any unit, one more than blocks.
        memory: what the 2N stages may hold; limits per rank.
        slack: loads up to 1 + slack times the mean count as equal: then the cheapest cuts decide.

    Raises:
        CompileError: nothing fits into memory.

    Terms: a state (i, j) leaves blocks [i, j) to the inner ranks, each rank makes one move to a smaller open interval.
    All skips are collocated if and only if no state has a skip with exactly one end inside.
    """
    skips = tuple((int(start), int(end)) for start, end in skips)
    costs = tuple(skip_cost) if skip_cost is not None and not hard else (0.0,) * len(skips)
    cut = np.zeros(len(weights) + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float)
    limits = None if memory is None else memory.levels(range(num_ranks))
    given = tuple(weights), skips, num_ranks, hard, costs
    soft, path = _unlimited(*given) if limits is None else _least(*given, limits)
    if path is None:
        raise CompileError("no wave fits into the memory of its ranks")
    enough = max(soft.largest(path), (1 + slack) * sum(weights) / num_ranks)
    path = best_tie(soft.given(soft.crossing(path)), enough, cut)
    return _partition(soft, path)


def _least(
    weights: tuple[float, ...],
    skips: tuple[tuple[int, int], ...],
    num_ranks: int,
    hard: bool,
    costs: tuple[float, ...],
    limits: LevelMemory | None = None,
) -> tuple[Soft, Path | None]:
    """What does not depend on cuts and slack, which callers vary: a path whose largest load is smallest."""
    soft = Soft.of(Levels.of(np.asarray(weights, dtype=float), (), num_ranks, limits), skips, costs)
    return soft, least_soft_path(soft) if skips and not hard else least_path(soft.hard)


_unlimited = lru_cache(maxsize=4)(_least)


def _partition(soft: Soft, path: Path) -> WavePartition:
    loads = soft.loads(path)
    mean = float(soft.free.seconds[-1]) / len(loads)
    return WavePartition(
        boundaries=boundaries_of(path),
        rank_loads=loads,
        max_over_mean=max(loads) / mean if mean else 1.0,
        crossing=soft.crossing(path),
    )
