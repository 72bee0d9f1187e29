"""Idle time: of every rank alone, and as bubbles that several ranks share.

    rank 0  |####|-----------|####|                   bubbles: {1}     from 2 to 4
    rank 1  |##|----|########|----|           ->               {0, 1}  from 4 to 6
            0  2    4    6   9                                 {0}     from 6 to 9 ...

A common-span bubble ends whenever any rank becomes busy or idle, so that one rank's idle time is cut up by the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from fxpipe.plan.execution import ActionTimes
from fxpipe.plan.schedule import Schedule
from passes.fill.problem import FillProblem, Interval


def idle_intervals(busy: Iterable[Interval], pipeline_seconds: float) -> tuple[Interval, ...]:
    """What a rank's busy intervals leave of 0 to `pipeline_seconds`."""
    found, now = [], 0.0
    for start, end in sorted(busy):
        if start > now:
            found.append((now, min(start, pipeline_seconds)))
        now = max(now, end)
    if now < pipeline_seconds:
        found.append((now, pipeline_seconds))
    return tuple(found)


def idle_of_schedule(
    schedule: Schedule, times: ActionTimes, pipeline_seconds: float | None = None
) -> tuple[tuple[Interval, ...], ...]:
    """Idle intervals per rank of a simulated schedule; the iteration ends with its last action unless said later."""
    end = times.makespan_seconds if pipeline_seconds is None else pipeline_seconds
    busy = ([(times.start_seconds[a], times.end_seconds[a]) for a in actions] for actions in schedule.ranks)
    return tuple(idle_intervals(intervals, end) for intervals in busy)


@dataclass(frozen=True, slots=True)
class Bubble:
    """A span in which exactly `ranks` are idle."""

    start_seconds: float
    end_seconds: float
    ranks: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def common_bubbles(problem: FillProblem) -> tuple[Bubble, ...]:
    """The maximal spans with a constant set of idle ranks, in time order, none shorter than the problem's least."""
    changes: dict[float, list[tuple[int, bool]]] = {}
    for rank, intervals in enumerate(problem.idle):
        for start, end in intervals:
            if start < end:
                changes.setdefault(start, []).append((rank, True))
                changes.setdefault(end, []).append((rank, False))
    found: list[Bubble] = []
    idle: set[int] = set()
    for now, after in pairwise(sorted(changes)):
        # A rank whose intervals touch ends one and starts the next: ends first.
        for rank, begins in sorted(changes[now], key=lambda change: change[1]):
            (idle.add if begins else idle.discard)(rank)
        ranks = tuple(sorted(idle))
        if found and found[-1].ranks == ranks and found[-1].end_seconds == now:
            found[-1] = Bubble(found[-1].start_seconds, after, ranks)
        elif ranks:
            found.append(Bubble(now, after, ranks))
    return tuple(b for b in found if b.seconds >= problem.min_bubble_seconds)
