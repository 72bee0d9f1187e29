"""Paths over listed moves: of any number of levels in one sweep, or of the right number, one level after another."""

import numpy as np

from passes.placement.memory import ROUNDING
from passes.placement.waves.levels import TOLERANCE, Floats, Levels, Path
from passes.placement.waves.moves import Join, Moves


def bottleneck(moves: Moves) -> float:
    """The smallest largest load of a path of any number of levels; infinite for none."""
    return float(moves.sweep(moves.load, np.maximum)[moves.left == moves.right].min())


def short_path(levels: Levels, moves: Moves, crossing: Floats) -> Path | None:
    """The path with the fewest crossing skips, and of those the fewest levels; None if these are too many.

    Memory makes levels differ, which this does not see: then None.
    """
    if levels.memory is not None:
        return None
    price = crossing * (levels.num_blocks + 2) + 1
    value = moves.sweep(price, np.add)
    ends = np.flatnonzero(moves.left == moves.right)
    states = [int(ends[value[ends].argmin()])]
    if value[states[0]] == np.inf:
        return None
    while states[-1] != 0:
        states.append(moves.back(value, price, np.add, states[-1]))
    path = moves.path(states[::-1])
    spare = levels.num_levels + 1 - len(path)
    return None if spare < 0 else path + path[-1:] * spare


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
