"""All moves between the states of a wave that keep a limit, skips with one end on a level paid for.

    state (1, 7)  --level takes [1, 2) and [5, 7)-->  state (2, 5)        load: blocks 1, 5, 6, and skips torn by them

States are ordered by decreasing length: the first one is all blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.placement.waves.levels import Floats, Ints, Levels, Path, extents
from passes.placement.waves.skips import SkipSums

Join = Callable[[Floats, Floats], Floats]  # the value of a path and the cost of one more move
_AT_ONCE = 1_000_000  # candidate moves looked at together
_MOST = 100_000_000  # candidate moves: some tens of seconds, a few GiB


@dataclass(frozen=True)
class Moves:
    """Moves [starts[t], starts[t + 1]) lead to state t; no move is idle."""

    left: Ints  # of the states
    right: Ints
    starts: Ints
    source: Ints  # of the moves
    load: Floats

    @staticmethod
    def of(
        levels: Levels,
        paid: SkipSums,
        limit: float,
        usable: NDArray[np.bool_],
        through: int | None = None,
        maximal: SkipSums | None = None,
    ) -> "Moves":
        """`paid` has the seconds of skips, `usable` the states [i, j] allowed.

        `through` keeps the moves that take a block. `maximal`, the number of skips, leaves out moves to which a block
        could be added that no skip joins to what stays open: where few are to cross, the longer move is never worse.
        """
        states = _States.of(usable)
        extra = None if maximal is None else _extra(levels, paid, maximal, states)
        parts = list(_parts(levels.seconds, paid, limit, states, through, extra))
        target, source, load = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(target, kind="stable") if through is not None else slice(None)
        target, source, load = target[order], source[order], load[order]
        return Moves(states.left, states.right, np.searchsorted(target, np.arange(len(states.left) + 1)), source, load)

    @property
    def target(self) -> Ints:
        return np.repeat(np.arange(len(self.left)), np.diff(self.starts))

    def positions(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The i, i2, j2, j of every move: its level takes [i, i2) and [j2, j)."""
        target = self.target
        return self.left[self.source], self.left[target], self.right[target], self.right[self.source]

    def path(self, states: Sequence[int]) -> Path:
        return tuple((int(self.left[state]), int(self.right[state])) for state in states)

    def best(self, value: Floats, cost: Floats, join: Join, targets: Ints) -> tuple[Ints, Floats]:
        """Those of the targets that moves lead to, and the least value each is left with."""
        some = targets[self.starts[targets + 1] > self.starts[targets]]
        if not len(some):
            return some, np.empty(0)
        owner, move = extents(self.starts[some], self.starts[some + 1])
        reached = np.flatnonzero(np.diff(owner, prepend=-1))
        return some, np.minimum.reduceat(join(value[self.source[move]], cost[move]), reached)

    def back(self, value: Floats, cost: Floats, join: Join, target: int) -> int:
        """The state before `target` on the best path to it."""
        moves = slice(self.starts[target], self.starts[target + 1])
        return int(self.source[moves][join(value[self.source[moves]], cost[moves]).argmin()])


@dataclass(frozen=True)
class _States:
    left: Ints  # by decreasing length
    right: Ints
    row_right: Ints  # row by row
    row_state: Ints
    position: Ints  # [i, x]: the first of row i with right end >= x, row by row

    @staticmethod
    def of(usable: NDArray[np.bool_]) -> "_States":
        left, right = np.nonzero(usable)
        order = np.argsort(left - right, kind="stable")
        state = np.empty(len(order), dtype=np.int64)
        state[order] = np.arange(len(order))
        before = np.cumsum(usable, axis=1) + np.searchsorted(left, np.arange(len(usable)))[:, None]
        position = np.concatenate([np.searchsorted(left, np.arange(len(usable)))[:, None], before], axis=1)
        return _States(left[order], right[order], right, state, position)


def _parts(
    p: Floats, paid: SkipSums, limit: float, states: _States, through: int | None, extra: Floats | None
) -> Iterator[tuple[Ints, Ints, Floats]]:
    """Target, source and load of the moves, some targets at a time; the load is above limit - extra[target]."""
    runs, table, size = (p[None, :] - p[:, None] + paid.torn).ravel(), paid.table.ravel(), len(p)
    target, i, least = _rows(p, limit, states, through)
    i2, j2 = states.left[target], states.right[target]
    beyond = np.searchsorted(p, p[j2] + limit - (p[i2] - p[i]), "right")
    if extra is not None:
        most = p + paid.ends  # what a run can weigh at most
        least = np.searchsorted(most, most[j2] + limit - extra[target] - (most[i2] - most[i]), "left")
    first = states.position[i, np.maximum(least, j2)]
    stop = states.position[i, np.maximum(beyond, j2)]
    fixed = runs[i * size + i2] + 2 * (table[i2 * size + j2] - table[i * size + j2])
    i, i2, j2 = i * size, i2 * size, j2 * size
    sizes = np.cumsum(np.maximum(stop - first, 0))
    _require_fewer(int(sizes[-1]), size - 1)
    cuts = np.searchsorted(sizes, np.arange(_AT_ONCE, sizes[-1], _AT_ONCE))
    for rows in np.split(np.arange(len(target)), cuts):
        owner, entry = extents(first[rows], stop[rows])
        row, j = rows[owner], states.row_right[entry]
        load = fixed[row] + runs[j2[row] + j] - 2 * (table[i2[row] + j] - table[i[row] + j])
        keep = np.flatnonzero(load <= limit)
        keep = keep[states.row_state[entry[keep]] != target[row[keep]]]
        if extra is not None:
            keep = keep[load[keep] > limit - extra[target[row[keep]]]]
        yield target[row[keep]], states.row_state[entry[keep]], load[keep]


def _require_fewer(num_moves: int, num_blocks: int) -> None:
    if num_moves > _MOST:
        raise CompileError(
            f"a wave over {num_blocks} blocks with skips that may cross has {num_moves} moves to look at, more than "
            f"{_MOST}; cut the backbone into fewer blocks, take more ranks or evener blocks, or collocate all skips"
        )


def _rows(p: Floats, limit: float, states: _States, through: int | None) -> tuple[Ints, Ints, Ints]:
    """Targets with the left ends of their sources, and the least right end of those."""
    left, right = states.left, states.right
    lightest = np.searchsorted(p, p[left] - limit, "left")
    if through is None:
        target, i = extents(lightest, left + 1)
        return target, i, right[target]
    from_left = np.where(left > through, np.minimum(through, left), -1)
    target, i = extents(np.minimum(lightest, from_left + 1), from_left + 1)
    spare = np.searchsorted(p, p[left] - (limit - (p[through + 1] - p[through])), "left")
    target_right, i_right = extents(np.where(right <= through, spare, left + 1), left + 1)
    least = np.concatenate([right[target], np.full(len(target_right), through + 1)])
    return np.concatenate([target, target_right]), np.concatenate([i, i_right]), least


def _extra(levels: Levels, paid: SkipSums, count: SkipSums, states: _States) -> Floats:
    """What a block at an end of each state can add to a level, at most, if no skip joins it to the rest of the state.

    Of the two ends the lesser, infinite where both blocks are joined.
    """
    table, some = count.table, states.left < states.right
    most = np.append(levels.weights + np.diff(paid.ends), 0.0)
    b, e = states.left, np.maximum(states.right - 1, 0)
    after, before = np.minimum(b + 1, levels.num_blocks), states.right
    joined_left = table[after, before] - table[b, before] - table[after, after] + table[b, after]
    joined_right = table[e, before] - table[b, before] - table[e, e] + table[b, e]
    left = np.where(some & (joined_left == 0), most[b], np.inf)
    return np.minimum(left, np.where(some & (joined_right == 0), most[e], np.inf))
