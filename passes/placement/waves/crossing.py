"""The wave whose largest level is smallest when skips may cross levels, for a price; then the fewest crossing ones.

    free    skips cost nothing                              a lower bound
    soft    a level pays for the skips with one end on it
    hard    every skip, or every one of some, is kept       an upper bound

Where the bounds meet, nothing is left to do. Otherwise all moves within the upper one are listed, and the best path
over them is found level by level.
"""

import numpy as np
from numpy.typing import NDArray

from passes.placement.memory import ROUNDING
from passes.placement.waves.fronts import least_path, path_within
from passes.placement.waves.levels import TOLERANCE, Floats, Levels, Path
from passes.placement.waves.moves import Join, Moves
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
    return _path_by_levels(soft.free, moves, moves.load, np.maximum) or known


def _fewest_crossing(soft: Soft, known: Path) -> Path:
    """Of the paths whose largest level is no larger than the known one's, one that crosses fewest skips."""
    limit, crossing = soft.largest(known) * (1 + TOLERANCE), len(soft.crossing(known))
    hard = path_within(soft.hard, limit) if crossing else None
    if crossing <= 1 or hard is not None:
        return hard or known
    usable = _usable(soft.free, limit) & (soft.count.torn <= crossing)
    moves = Moves.of(soft.free, soft.paid, limit, usable, maximal=None if soft.free.memory else soft.count)
    torn = soft.count.one_end(*moves.positions())
    path = _path_by_levels(soft.free, moves, torn, np.add)
    assert path is not None, "the known one is among them"
    return path


def _path_by_levels(levels: Levels, moves: Moves, cost: Floats, join: Join) -> Path | None:
    """The path of the right number of levels whose costs join to the least; None when there is none."""
    limit = moves.load.max(initial=0.0)
    inner = levels.seconds[moves.right] - levels.seconds[moves.left]
    values = [np.where(np.arange(len(inner)) == 0, 0.0, np.inf)]
    for level in range(levels.num_levels):
        light = inner <= (levels.num_levels - level - 1) * limit * (1 + TOLERANCE)
        light &= levels.seconds[-1] - inner <= (level + 1) * limit * (1 + TOLERANCE)
        target, best = moves.best(values[-1], _fitting(levels, moves, cost, level), join, np.flatnonzero(light))
        after = values[-1].copy()  # an idle level
        after[target] = np.minimum(after[target], best)
        values.append(after)
    ends = np.flatnonzero(moves.left == moves.right)
    states = [int(ends[values[-1][ends].argmin()])]
    if values[-1][states[0]] == np.inf:
        return None
    for level in reversed(range(levels.num_levels)):
        idle = values[level][states[-1]] <= values[level + 1][states[-1]]
        costs = cost if idle else _fitting(levels, moves, cost, level)
        states.append(states[-1] if idle else moves.back(values[level], costs, join, states[-1]))
    return moves.path(states[::-1])


def _fitting(levels: Levels, moves: Moves, cost: Floats, level: int) -> Floats:
    """The costs of the moves, infinite where one does not fit into the level's memory."""
    if levels.memory is None:
        return cost
    left, right, (i, i2, j2, j) = levels.memory.left[level], levels.memory.right[level], moves.positions()
    used = left[i2] - left[i] + right[j] - right[j2]
    return np.where(used <= levels.memory.limits[level] * (1 + ROUNDING), cost, np.inf)


def _usable(levels: Levels, limit: float) -> NDArray[np.bool_]:
    """Open intervals that some number of levels can leave, while the others can take them."""
    inner = levels.seconds[None, :] - levels.seconds[:, None]
    least = [np.ceil(x / limit * (1 - TOLERANCE)) if limit else 0.0 * x for x in (inner, levels.seconds[-1] - inner)]
    return np.triu(least[0] + least[1] <= levels.num_levels)
