"""Per device: every rank carries its own samples through all frozen layers, in its own idle time.

    rank 0  |####|-----------|####|      rank 0 takes 11 samples, rank 1 takes 5: then the tails of both end together.
    rank 1  |##|----|########|----|      No bubble is cut because another rank becomes busy, no sample changes ranks
                                         between layers.

The common tail is found by bisection: for a given tail every rank says how many samples it could take, and there is a
plan if these are as many as the batch. Ranks then take samples in proportion.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from passes.fill.lanes import Lane, lanes
from passes.fill.pack import Packed, pack
from passes.fill.problem import FillProblem, Interval
from passes.fill.result import Fill, Piece, make_fill

_TOLERANCE = 1e-6  # of the iteration: how near to the least tail the bisection goes

Room = tuple[Interval, ...]


def per_device(problem: FillProblem) -> Fill:
    """Samples shared by idle time; components that may run on some ranks only go first."""
    return make_fill(
        problem, "per-device", True, _search(problem, [_room(problem, r) for r in range(problem.num_ranks)])
    )


def no_fill(problem: FillProblem) -> Fill:
    """Everything after the pipeline, balanced over the ranks."""
    return make_fill(problem, "none", True, _search(problem, [((problem.pipeline_seconds, inf),)] * problem.num_ranks))


def _room(problem: FillProblem, rank: int) -> Room:
    """The idle intervals worth using; the tail goes on from the last one where that lasts to the pipeline's end."""
    end = problem.pipeline_seconds
    room = [i for i in problem.idle[rank] if i[1] < end and i[1] - i[0] >= problem.min_bubble_seconds]
    last = [start for start, stop in problem.idle[rank] if stop == end]
    return (*room, (min(last, default=end), inf))


def _search(problem: FillProblem, rooms: Sequence[Room]) -> list[list[Piece]]:
    """The pieces of every rank with the least common tail that bisection finds."""
    planner = _Planner(problem, rooms)
    best = planner.plan(inf)
    assert best is not None, "without a deadline every share will do"
    tolerance = _TOLERANCE * (problem.pipeline_seconds + best.tail_seconds)
    low, high, tail = 0.0, best.tail_seconds, 0.0  # at first ask for no tail at all
    while high - low > tolerance:
        found = planner.plan(tail)
        if found is not None and found.tail_seconds < best.tail_seconds:
            best = found
        if found is not None and found.tail_seconds <= tail + tolerance / 2:
            high = min(tail, found.tail_seconds)
        else:
            low = tail
        tail = (low + high) / 2
    return best.ranks


@dataclass(frozen=True)
class _Plan:
    ranks: list[list[Piece]]
    tail_seconds: float


class _Planner:
    """Plans for one tail after the other; ranks with the same idle time are packed once."""

    def __init__(self, problem: FillProblem, rooms: Sequence[Room]) -> None:
        self._problem, self._rooms, self._lanes = problem, rooms, lanes(problem)
        self._packed: dict[tuple[tuple[tuple[int, ...], ...], int, Room], Packed] = {}

    def plan(self, tail_seconds: float) -> _Plan | None:
        """A plan with about this tail; None where there is none."""
        deadline = self._problem.pipeline_seconds + tail_seconds
        rooms = list(self._rooms)
        ranks: list[list[Piece]] = [[] for _ in rooms]
        ends: list[float] = []
        for lane in self._lanes:
            released = max((ends[before] for before in lane.after), default=0.0)
            open_rooms = {rank: _from(rooms[rank], released) for rank in lane.ranks}
            shares = self._shares(lane, open_rooms, deadline)
            if shares is None:
                return None
            first, end = 0, 0.0
            for rank, share in shares.items():
                packed = self._pack(lane, share, open_rooms[rank])
                ranks[rank] += _shifted(packed.pieces, first)
                rooms[rank] = _without(rooms[rank], packed.pieces)
                first, end = first + share, max(end, packed.end_seconds)
            ends.append(end)
        return _Plan(ranks, max(0.0, max(ends, default=0.0) - self._problem.pipeline_seconds))

    def _shares(self, lane: Lane, rooms: dict[int, Room], deadline: float) -> dict[int, int] | None:
        """Samples of every rank of a lane, so that all end by the deadline."""
        batch = self._problem.batch_size
        if lane.whole:
            ends = {rank: self._pack(lane, batch, room).end_seconds for rank, room in rooms.items()}
            earliest = min(ends, key=ends.__getitem__)
            return {earliest: batch} if ends[earliest] <= deadline else None
        most = {rank: self._most(lane, room, deadline) for rank, room in rooms.items()}
        return _in_proportion(most, batch) if sum(most.values()) >= batch else None

    def _most(self, lane: Lane, room: Room, deadline: float) -> int:
        """The most samples that a rank can bring to their end by the deadline."""
        sizes = range(1, self._problem.batch_size + 1)
        return bisect_right(sizes, deadline, key=lambda n: self._pack(lane, n, room).end_seconds)

    def _pack(self, lane: Lane, num_samples: int, room: Room) -> Packed:
        """In the order of components that ends first."""
        key = lane.orders, num_samples, room
        if key not in self._packed:
            tries = (pack(self._problem, order, num_samples, room) for order in lane.orders)
            self._packed[key] = min(tries, key=lambda packed: packed.end_seconds)
        return self._packed[key]


def _in_proportion(most: dict[int, int], batch_size: int) -> dict[int, int]:
    """Shares of the batch in proportion to what each rank could take, none above that."""
    total = sum(most.values())
    shares = {rank: batch_size * number // total for rank, number in most.items()}
    rest = batch_size - sum(shares.values())
    for rank in sorted(most, key=lambda r: -(batch_size * most[r] % total))[:rest]:
        shares[rank] += 1
    return shares


def _from(room: Room, released: float) -> Room:
    return tuple((max(start, released), end) for start, end in room if end > released) if released else room


def _without(room: Room, pieces: Sequence[Piece]) -> Room:
    """What is left of the intervals beside the pieces."""
    found, waiting = [], list(reversed(pieces))
    for start, end in room:
        while waiting and waiting[-1].start_seconds < end:
            piece = waiting.pop()
            if piece.start_seconds > start:
                found.append((start, piece.start_seconds))
            start = max(start, piece.end_seconds)
        if start < end:
            found.append((start, end))
    return tuple(found)


def _shifted(pieces: Sequence[Piece], first_sample: int) -> list[Piece]:
    return [
        replace(p, first_sample=p.first_sample + first_sample, last_sample=p.last_sample + first_sample) for p in pieces
    ]
