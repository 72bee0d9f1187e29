"""Cut a line of blocks into 2N stages on N ranks, stages d and 2N-1-d on rank d, so that skips stay on their rank.

    blocks    0  1  2  3  4  5  6  7      skips 0-7 1-6 2-5
    wave      [s0][ s1 ][  s2 ][ s3 ]     s0 and s3 on rank 0, s1 and s2 on rank 1
    hard      all skips collocated        soft      a skip may cross ranks if it pays its transfer

PULSE (arXiv 2606.19163) collocates nested skips; here skips lie in any arrangement. Several waves are cut as one over
more levels, whose ranks are a zig-zag that is its own mirror image (Hanayo: Liu et al., SC 2023):

    2 ranks, 2 waves    stages  0 1 2 3 4 5 6 7
                        ranks   0 1 1 0 0 1 1 0      levels (0, 7) (1, 6) (2, 5) (3, 4) on ranks 0 1 1 0
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fxpipe.errors import CompileError
from passes.placement.memory import LevelMemory, StageMemory
from passes.placement.waves.crossing import least_soft_path
from passes.placement.waves.fronts import least_path
from passes.placement.waves.levels import Levels, Path, boundaries_of
from passes.placement.waves.soft import Soft
from passes.placement.waves.ties import best_tie


def wave(
    weights: Sequence[float],
    skips: Sequence[tuple[int, int]],
    num_ranks: int,
    hard: bool = True,
    cut_costs: Sequence[float] | None = None,
    skip_cost: Sequence[float] | None = None,
    memory: StageMemory | None = None,
    slack: float = 0.0,
    num_waves: int = 1,
) -> tuple[int, ...]:
    """Positions between the 2NW stages of N ranks and W waves, for the wave whose largest level is smallest, then with
    fewest skips that cross levels, exact up to rounding; of one wave a rank is a level.

    Of all such waves in which the same skips cross, the one with fewest empty stages, then cut costs, exact as well.

    Args:
        weights: seconds per block.
        skips: (producer block, consumer block), in any arrangement.
        hard: both ends of each skip on one level; without memory limits always possible, one may take everything.
            Otherwise a crossing skip adds its seconds in `skip_cost` to both its levels.
        cut_costs: what a cut before each block costs, any unit, one more than blocks.
        memory: what the stages may hold; limits per rank, which its levels share.
        slack: loads up to 1 + slack times the mean count as equal: then the cheapest cuts decide.

    Raises:
        CompileError: nothing fits into memory.

    Terms: a state (i, j) leaves blocks [i, j) to the inner levels, each makes one move to a smaller open interval. All
    skips are collocated if and only if no state has a skip with exactly one end inside.
    """
    skips = tuple((int(start), int(end)) for start, end in skips)
    costs = tuple(skip_cost) if skip_cost is not None and not hard else (0.0,) * len(skips)
    cut = np.zeros(len(weights) + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float)
    rank_of = ((*range(num_ranks), *reversed(range(num_ranks))) * num_waves)[: num_ranks * num_waves]
    limits = None if memory is None else memory.levels(rank_of)
    given = tuple(weights), skips, len(rank_of), hard, costs
    soft, path = _unlimited(*given) if limits is None else _least(*given, limits)
    if path is None:
        each = ", of which each of a rank's levels has an even share; use fewer stages" if num_waves > 1 else ""
        raise CompileError(f"no wave fits into the memory of its ranks{each}")
    enough = max(soft.largest(path), (1 + slack) * sum(weights) / len(rank_of))
    return boundaries_of(best_tie(soft.given(soft.crossing(path)), enough, cut))


def _least(
    weights: tuple[float, ...],
    skips: tuple[tuple[int, int], ...],
    num_levels: int,
    hard: bool,
    costs: tuple[float, ...],
    limits: LevelMemory | None = None,
) -> tuple[Soft, Path | None]:
    """What does not depend on cuts and slack, which callers vary: a path whose largest load is smallest."""
    soft = Soft.of(Levels.of(np.asarray(weights, dtype=float), (), num_levels, limits), skips, costs)
    return soft, least_soft_path(soft) if skips and not hard else least_path(soft.hard)


_unlimited = lru_cache(maxsize=4)(_least)
