"""Paths over listed moves, one level after another."""

import numpy as np

from passes.placement.memory import ROUNDING
from passes.placement.waves.levels import TOLERANCE, Floats, Levels, Path
from passes.placement.waves.moves import Join, Moves


def path_by_levels(levels: Levels, moves: Moves, cost: Floats, join: Join) -> Path | None:
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
