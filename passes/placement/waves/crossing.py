"""The wave whose largest level is smallest when skips may cross levels, for a price; then the fewest crossing ones.

    free    skips cost nothing                              a lower bound
    soft    a level pays for the skips with one end on it
    hard    every skip, or every one of some, is kept       an upper bound

Where the bounds meet, nothing is left to do. Otherwise all moves within the upper one are listed.
"""

import numpy as np
from numpy.typing import NDArray

from passes.placement.waves.fronts import least_path, path_within
from passes.placement.waves.levels import TOLERANCE, Levels, Path
from passes.placement.waves.moves import Moves
from passes.placement.waves.search import path_by_levels
from passes.placement.waves.soft import Soft

_HEAVY = 0.6  # of a lower bound: a block that leaves its level little choice


def least_soft_path(soft: Soft) -> Path | None:
    """Of the paths with the smallest largest level one that crosses fewest skips; None when memory admits none."""
    free = least_path(soft.free)
    if free is None:
        return None
    least = max(soft.free.loads(free)) * (1 + TOLERANCE)
    known = free
    if soft.largest(known) > least:
        known = _best(soft, free, least_path(soft.hard))
    if soft.largest(known) > least and soft.free.weights.max() > _HEAVY * least:
        bound, known = _around_heaviest(soft, known)
        least = max(least, bound)
    if soft.largest(known) > least:
        known = _least_largest(soft, known)
    return _fewest_crossing(soft, known)


def _best(soft: Soft, *paths: Path | None) -> Path:
    return min((path for path in paths if path is not None), key=soft.largest)


def _around_heaviest(soft: Soft, known: Path) -> tuple[float, Path]:
    """The least load of a level with the heaviest block, a bound, and the better of `known` and a path with that level.

    That path may cross all skips, or all but those with both ends on the level.
    """
    known = _best(soft, known, least_path(soft.given(tuple(range(len(soft.skips))))))
    heaviest, limit = int(soft.free.weights.argmax()), soft.largest(known) * (1 + TOLERANCE)
    moves = Moves.of(soft.free, soft.paid, limit, _usable(soft.free, limit), through=heaviest)
    at = int(moves.load.argmin())
    i, i2, j2, j = (int(x[at]) for x in moves.positions())
    level = {*range(i, i2), *range(j2, j)}
    crossing = tuple(k for k, ends in enumerate(soft.skips) if not level.issuperset(ends))
    return float(moves.load[at]) * (1 + TOLERANCE), _best(soft, known, least_path(soft.given(crossing)))


def _least_largest(soft: Soft, known: Path) -> Path:
    """The path whose largest level is smallest, no larger than that of a known path."""
    limit = soft.largest(known)
    moves = Moves.of(soft.free, soft.paid, limit, _usable(soft.free, limit))
    return path_by_levels(soft.free, moves, moves.load, np.maximum) or known


def _fewest_crossing(soft: Soft, known: Path) -> Path:
    """Of the paths whose largest level is no larger than the known one's, one that crosses fewest skips."""
    limit, crossing = soft.largest(known) * (1 + TOLERANCE), len(soft.crossing(known))
    hard = path_within(soft.hard, limit) if crossing else None
    if crossing <= 1 or hard is not None:
        return hard or known
    usable = _usable(soft.free, limit) & (soft.count.torn <= crossing)
    moves = Moves.of(soft.free, soft.paid, limit, usable, maximal=None if soft.free.memory else soft.count)
    torn = soft.count.one_end(*moves.positions())
    path = path_by_levels(soft.free, moves, torn, np.add)
    assert path is not None, "the known one is among them"
    return path


def _usable(levels: Levels, limit: float) -> NDArray[np.bool_]:
    """Open intervals that some number of levels can leave, while the others can take them."""
    inner = levels.seconds[None, :] - levels.seconds[:, None]
    least = [np.ceil(x / limit * (1 - TOLERANCE)) if limit else 0.0 * x for x in (inner, levels.seconds[-1] - inner)]
    return np.triu(least[0] + least[1] <= levels.num_levels)
