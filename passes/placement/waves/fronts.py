"""The least largest level of a wave that tears no skip: grow the fronts of what can be placed within a limit.

    limit 3, blocks of 1 second      level 0 leaves [0, 5) or [1, 6) or [2, 7) or [3, 8) of [0, 8)
                                     level 1 leaves [0, 2), [1, 3), ...      level 2 leaves nothing: 3 levels do

An open interval inside another one is never worse: the rest of a path, intersected with it, takes fewer blocks on
every level, and intersections of intervals that tear no skip tear none. So of all states with left end i the one with
the smallest right end stands for all, memory included. Several limits are tried at once. The search ends when no load
of any move lies between the largest limit that is too small and the largest level of an actual path.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.placement.waves.levels import Floats, Ints, Levels, Path, extents

_AT_ONCE = 16  # limits tried together: the work is in the calls, not in the numbers
_RESOLUTION = 1e-12  # relative
_NEAR = 1e-3  # relative; limits so close may have no load between them


def least_path(levels: Levels) -> Path | None:
    """The path whose largest level is smallest, up to rounding; None when none fits into memory."""
    total = float(levels.seconds[-1])
    least = max(total / levels.num_levels, float(levels.weights.max(initial=0.0)))
    limits = np.minimum(least * (1 + np.append(0.0, 2.0 ** np.arange(3 - _AT_ONCE, 2))), max(total, least))
    limits = np.append(limits, max(total, least))
    best, lower = _search(levels, limits)
    if best is None or lower < least:
        return best
    upper = max(levels.loads(best))
    while upper - lower > _RESOLUTION * upper:
        found, too_little = _search(levels, np.linspace(lower, upper, _AT_ONCE + 1, endpoint=False)[1:])
        lower = max(lower, too_little)
        if found is not None:
            best, upper = found, max(levels.loads(found))
    return best


def path_within(levels: Levels, limit: float) -> Path | None:
    """A path with no level above `limit` seconds or its memory limit, as few levels as possible; the rest are empty."""
    return _search(levels, np.array([limit]))[0]


def _search(levels: Levels, limits: Floats) -> tuple[Path | None, float]:
    """A path within the smallest of the ascending limits that has one; and all that is known to be too little."""
    growth = _grow(levels, limits)
    if growth.fits == 0:
        return _path(levels, growth, float(limits[0])), -np.inf
    lower = float(limits[growth.fits - 1])
    if growth.fits == len(limits) or limits[growth.fits] - lower <= _NEAR * lower:
        lower = _next_load(levels, growth, lower)
    path = _path(levels, growth, float(limits[growth.fits])) if growth.fits < len(limits) else None
    return path, lower


@dataclass(frozen=True)
class _Front:
    """For each limit (an index), left ends and their smallest right ends, ascending."""

    limit: Ints
    left: Ints
    right: Ints

    def only(self, keep: NDArray[np.bool_]) -> "_Front":
        return _Front(self.limit[keep], self.left[keep], self.right[keep])


@dataclass(frozen=True)
class _Growth:
    fronts: tuple[_Front, ...]  # before each level, the last after the last
    fits: int  # the index of the smallest limit with a path, their number when none has
    num_used: int  # levels of that path


def _grow(levels: Levels, limits: Floats) -> _Growth:
    next_closed = _next_closed(levels)
    many = len(limits)
    front = _Front(np.arange(many), np.zeros(many, dtype=np.int64), np.full(many, levels.num_blocks))
    fronts, fits, num_used = [front], many, 0
    for level in range(levels.num_levels + 1):
        done = front.limit[front.left == front.right]
        if len(done):
            fits, num_used = int(done[0]), level
            front = front.only(front.limit < fits)
        if fits == 0 or level == levels.num_levels:
            break
        front = _advance(levels, level, front, limits, next_closed)
        fronts.append(front)
    return _Growth(tuple(fronts), fits, num_used)


def _next_closed(levels: Levels) -> Ints:
    """[i, x]: the smallest j >= x, where [i, j) tears no skip; beyond the blocks when there is none."""
    size = levels.num_blocks + 1
    at = np.where(levels.closed, np.arange(size)[None, :], size)
    return np.asarray(np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1])


def _advance(levels: Levels, level: int, front: _Front, limits: Floats, next_closed: Ints) -> _Front:
    """The fronts one level further."""
    size, p = levels.num_blocks + 1, levels.seconds
    limit = limits[front.limit]
    at, i2 = extents(front.left, np.searchsorted(p, p[front.left] + limit, "right"))
    i, j, limit = front.left[at], front.right[at], limit[at]
    j2 = np.maximum(_lowest(p, p, i, i2, j, limit), i2)
    if levels.memory is not None:
        memory = levels.memory
        room = np.full(len(at), memory.limits[level])
        j2 = np.maximum(j2, _lowest(memory.left[level], memory.right[level], i, i2, j, room))
    keep = j2 <= j
    at, i2, j = at[keep], i2[keep], j[keep]
    j2 = next_closed[i2, j2[keep]]
    keep = j2 <= j
    smallest = np.full((len(limits), size + 1), size)
    np.minimum.at(smallest, (front.limit[at[keep]], i2[keep]), j2[keep])
    inner = np.minimum.accumulate(smallest[:, :0:-1], axis=1)[:, ::-1]
    kept, left = np.nonzero(smallest[:, :-1] < inner)
    return _Front(kept, left, smallest[kept, left])


def _lowest(before_left: Floats, before_right: Floats, i: Ints, i2: Ints, j: Ints, limit: Floats) -> Ints:
    """The smallest j2 so that [i, i2) and [j2, j) stay within the limit; beyond j when [i, i2) does not."""
    spare = limit - (before_left[i2] - before_left[i])
    return np.where(spare < 0, len(before_right), np.searchsorted(before_right, before_right[j] - spare, "left"))


def _path(levels: Levels, growth: _Growth, limit: float) -> Path:
    """Back from an empty interval, through the fronts of the limit that fits."""
    fronts = [front.only(front.limit == growth.fits) for front in growth.fronts[: growth.num_used + 1]]
    end = int(fronts[-1].left[np.argmax(fronts[-1].left == fronts[-1].right)])
    path = [(end, end)]
    for level in reversed(range(growth.num_used)):
        path.append(_source(levels, level, fronts[level], path[-1], limit))
    return tuple(path[::-1]) + ((end, end),) * (levels.num_levels - growth.num_used)


def _source(levels: Levels, level: int, front: _Front, target: tuple[int, int], limit: float) -> tuple[int, int]:
    """A state of the front from which the level reaches the target."""
    near = front.only((front.left <= target[0]) & (front.right >= target[1]))
    i2, limits = np.full(len(near.left), target[0]), np.full(len(near.left), limit)
    found = _lowest(levels.seconds, levels.seconds, near.left, i2, near.right, limits) <= target[1]
    if levels.memory is not None:
        memory = levels.memory
        limits = np.full(len(near.left), memory.limits[level])
        found &= _lowest(memory.left[level], memory.right[level], near.left, i2, near.right, limits) <= target[1]
    at = int(np.argmax(found))
    assert found[at]
    return int(near.left[at]), int(near.right[at])


def _next_load(levels: Levels, growth: _Growth, limit: float) -> float:
    """The smallest load above a limit that is too small, of moves from its fronts: up to there nothing changes."""
    p = levels.seconds
    fronts = [front.only(front.limit == growth.fits - 1) for front in growth.fronts]
    states = np.unique(np.concatenate([front.left * len(p) + front.right for front in fronts]))
    left, right = np.divmod(states, len(p))
    at, i2 = extents(left, right + 1)
    i, j = left[at], right[at]
    lowest = np.maximum(_lowest(p, p, i, i2, j, np.full(len(at), limit)), i2)
    less = lowest > i2  # there are smaller right ends, and each of them is too much
    i, i2, j, j2 = i[less], i2[less], j[less], np.minimum(lowest[less] - 1, j[less])
    loads = p[i2] - p[i] + p[j] - p[_previous_closed(levels)[i2, j2]]
    return max(limit, float(loads.min(initial=np.inf)))


def _previous_closed(levels: Levels) -> Ints:
    """[i, x]: the largest j <= x, where [i, j) tears no skip; for x >= i there is one, the empty interval."""
    at = np.where(levels.closed, np.arange(levels.num_blocks + 1)[None, :], -1)
    return np.asarray(np.maximum.accumulate(at, axis=1))
