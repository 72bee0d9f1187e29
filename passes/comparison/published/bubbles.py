"""Idle time as bubbles that several ranks share.

    rank 0  |####|-----------|####|                   bubbles: {1}     from 2 to 4
    rank 1  |##|----|########|----|           ->               {0, 1}  from 4 to 6
            0  2    4    6   9                                 {0}     from 6 to 9 ...

A common-span bubble ends whenever any rank becomes busy or idle, so that one rank's idle time is cut up by the others.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from passes.fill.problem import FillProblem


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
    times = sorted({time for idle in problem.idle for interval in idle for time in interval})
    is_idle = np.zeros((problem.num_ranks, len(times)), dtype=bool)
    for rank, idle in enumerate(problem.idle):
        for first, last in np.searchsorted(times, idle).reshape(-1, 2):
            is_idle[rank, first:last] = True
    found: list[Bubble] = []
    for span, (start, end) in enumerate(pairwise(times)):
        ranks = tuple(np.flatnonzero(is_idle[:, span]).tolist())
        if found and (found[-1].ranks, found[-1].end_seconds) == (ranks, start):
            start = found.pop().start_seconds
        if ranks:
            found.append(Bubble(start, end, ranks))
    return tuple(bubble for bubble in found if bubble.seconds >= problem.min_bubble_seconds)
