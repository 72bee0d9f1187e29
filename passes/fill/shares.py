"""Shares: how many samples every rank takes, so that the tails of all end together.

    tail asked for   rank 0 could take   rank 1   together        batch of 16
    0 ms             6                   3        9               too few
    40 ms            14                  8        22              enough: bisect between
    21 ms            11                  6        17              rank 0 takes 10, rank 1 takes 6

A rank's time does not fall as its samples rise, but for intervals that other numbers happen to fill better: then the
plan found may be a little longer than the shortest.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from passes.fill.lanes import Lane, lanes
from passes.fill.pack import Packed, PieceFields, pack
from passes.fill.problem import FillProblem, Interval
from passes.fill.result import Piece

_TOLERANCE = 1e-5  # of the iteration: how near to the least tail the bisection goes

RankRoom = tuple[Interval, ...]
"""Where a rank may run frozen work; the last interval has no end."""


@dataclass(frozen=True)
class Assignment:
    """Pieces of every rank, and what of them is after the pipeline."""

    ranks: list[list[Piece]]
    tail_seconds: float


def balanced(problem: FillProblem, rooms: Sequence[RankRoom], apart: bool) -> Assignment:
    """The plan with the least tail that bisection finds, lane after lane."""
    planner = _Planner(problem, rooms, apart)
    best = planner.plan(inf)
    assert best is not None, "without a deadline all shares will do"
    tolerance = _TOLERANCE * (problem.pipeline_seconds + best.tail_seconds)
    low, high, tail = 0.0, best.tail_seconds, 0.0  # the first question is for no tail at all
    while high - low > tolerance:
        found = planner.plan(tail)
        if found is not None and found.tail_seconds < best.tail_seconds:
            best = found
        if found is not None and found.tail_seconds <= tail + tolerance / 2:
            high = min(tail, found.tail_seconds)
        else:
            low = tail
        tail = (low + high) / 2
    return best


class _Planner:
    """Plans for one tail after the other; ranks with the same room are packed once."""

    def __init__(self, problem: FillProblem, rooms: Sequence[RankRoom], apart: bool) -> None:
        self._problem, self._rooms, self._lanes = problem, rooms, lanes(problem, apart)
        self._share = _largest_first if apart else _in_proportion
        self._packed: dict[tuple[tuple[int, ...], int, RankRoom], Packed] = {}

    def plan(self, tail_seconds: float) -> Assignment | None:
        """A plan with about this tail; None where there is none."""
        deadline = self._problem.pipeline_seconds + tail_seconds
        rooms = list(self._rooms)
        ranks: list[list[Piece]] = [[] for _ in rooms]
        ends: list[float] = []
        for lane in self._lanes:
            released = max((ends[before] for before in lane.after), default=0.0)
            opened = {rank: _from(rooms[rank], released) for rank in lane.ranks}
            shares = self._shares(lane, opened, deadline)
            if shares is None:
                return None
            first, end = 0, released
            for rank, share in shares.items():
                packed = self._pack(lane, share, opened[rank])
                ranks[rank] += [_piece(run, first) for run in packed.runs]
                rooms[rank] = _without(rooms[rank], packed.runs)
                first, end = first + share, max(end, packed.end_seconds)
            ends.append(end)
        return Assignment(ranks, max(0.0, max(ends, default=0.0) - self._problem.pipeline_seconds))

    def _shares(self, lane: Lane, rooms: dict[int, RankRoom], deadline: float) -> dict[int, int] | None:
        """Samples of every rank of a lane, so that all end by the deadline."""
        batch = self._problem.batch_size
        if lane.whole:
            ends = {rank: self._pack(lane, batch, room).end_seconds for rank, room in rooms.items()}
            earliest = min(ends, key=ends.__getitem__)
            return {earliest: batch} if ends[earliest] <= deadline else None
        most = {rank: self._most(lane, room, deadline) for rank, room in rooms.items()}
        return self._share(most, batch) if sum(most.values()) >= batch else None

    def _most(self, lane: Lane, room: RankRoom, deadline: float) -> int:
        """The most samples that a rank can bring to their end by the deadline."""
        sizes = range(1, self._problem.batch_size + 1)
        if deadline == inf:
            return len(sizes)
        return bisect_right(sizes, deadline, key=lambda n: self._pack(lane, n, room).end_seconds)

    def _pack(self, lane: Lane, num_samples: int, room: RankRoom) -> Packed:
        key = lane.components, num_samples, room
        if key not in self._packed:
            self._packed[key] = pack(self._problem, *key)
        return self._packed[key]


def _in_proportion(most: dict[int, int], batch_size: int) -> dict[int, int]:
    """Shares of the batch in proportion to what each rank could take, none above that."""
    total = sum(most.values())
    shares = {rank: batch_size * number // total for rank, number in most.items()}
    rest = batch_size - sum(shares.values())
    for rank in sorted(most, key=lambda r: -(batch_size * most[r] % total))[:rest]:
        shares[rank] += 1
    return shares


def _largest_first(most: dict[int, int], batch_size: int) -> dict[int, int]:
    """Shares of the batch on as few ranks as can take it."""
    shares = dict.fromkeys(most, 0)
    for rank in sorted(most, key=lambda r: -most[r]):
        shares[rank] = min(most[rank], batch_size - sum(shares.values()))
    return shares


def _from(room: RankRoom, released: float) -> RankRoom:
    return tuple((max(start, released), end) for start, end in room if end > released) if released else room


def _without(room: RankRoom, runs: Sequence[PieceFields]) -> RankRoom:
    """What is left of the intervals beside the runs."""
    found, waiting = [], [(start, end) for *_, start, end in reversed(runs)]
    for begin, end in room:
        free = begin
        while waiting and waiting[-1][0] < end:
            start, stop = waiting.pop()
            if start > free:
                found.append((free, start))
            free = max(free, stop)
        if free < end:
            found.append((free, end))
    return tuple(found)


def _piece(run: PieceFields, first_sample: int) -> Piece:
    component, first_layer, last_layer, first, last, start, end = run
    return Piece(component, first_layer, last_layer, first_sample + first, first_sample + last, start, end)
