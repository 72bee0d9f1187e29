"""Cut a line of blocks into stages for the shortest step: balance, links and late reductions weighed together.

    blocks    0  1  2  3  4  5  6  7
    line      [ s0 ][ s1 ][ s2 ][ s3 ]      stage s at place s; places 1 and 2 are on different nodes

    seconds = (M - 1) max period + sum of the first micro-batch's messages + max late reduction

    period    of a stage: computing, and in 1F1B a message and its answer; or the busier direction of its port, or of
              the node's port behind it
    late      all-reduce of its gradients less the backward of the stages before it, which still compute

After DiffusionPipe (Tian et al., MLSys 2024), section 4.1, whose bound (M + 2S - 2) max T0 + max (T_S - T_C) has one
link for all cuts and every skip in each cut it spans. Held against simulated steps, that one was up to four times
worse on slow links (README, planning).

Method: the least sum of messages with all periods within a limit is a shortest path; the limit goes down from where
nothing is gained above it. So for every limit on late reductions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from passes.placement.memory import ROUNDING, Floats

_STEP = 1e-3  # relative, between limits on the period: no cut is better by more
_LATE_STEP = 0.8  # of a limit on late reductions to the next one
_LITTLE = 0.01  # of a step: reductions later than that are worth a search


@dataclass(frozen=True, eq=False)
class Stages:
    """What every stage of a line may be: seconds by first block and end [blocks + 1, blocks + 1].

    `periods` are infinite where there is no such stage or it does not fit into memory; `messages` [blocks + 1] are
    seconds to pass a cut after the stage. Both are per stage. `late` is of any stage.
    """

    periods: Sequence[Floats]
    messages: Sequence[Floats]
    late: Floats | None = None

    def seconds(self, cuts: Sequence[int], weight: float) -> float:
        """Of a step cut there, but for what is the same for all cuts."""
        stages = list(enumerate(pairwise(cuts)))
        sent = sum(self.messages[k][stop] for k, (_, stop) in stages)
        return float(weight * max(self.periods[k][run] for k, run in stages) + sent + self.latest(cuts))

    def latest(self, cuts: Sequence[int]) -> float:
        return 0.0 if self.late is None else max(float(self.late[run]) for run in pairwise(cuts))

    def no_later_than(self, limit: float) -> "Stages":
        assert self.late is not None
        allowed = self.late <= limit
        return Stages([np.where(allowed, p, np.inf) for p in self.periods], self.messages, self.late)


def shortest_line(stages: Stages, weight: float) -> tuple[int, ...] | None:
    """The cuts, one more than stages, with the least `Stages.seconds`; None where no cut has finite ones.

    Args:
        weight: how often the longest period counts.
    """
    best = _within(stages, weight)
    if best is None or stages.late is None:
        return best
    found: tuple[int, ...] | None = best
    while found is not None:
        latest = stages.latest(found)
        if latest <= _LITTLE * stages.seconds(best, weight):
            break
        found = _within(stages.no_later_than(_LATE_STEP * latest), weight)
        if found is not None:
            best = min(best, found, key=lambda cuts: stages.seconds(cuts, weight))
    return best


def _within(stages: Stages, weight: float) -> tuple[int, ...] | None:
    """The best without regard to late reductions."""
    least = least_period(stages.periods)
    if least == np.inf:
        return None
    plain = Stages(stages.periods, stages.messages)
    best = cheapest(plain.periods, plain.messages, least * (1 + ROUNDING))
    assert best is not None, "some cuts have the least largest period"
    limit = float(np.finfo(np.float64).max)
    while limit >= least and (cuts := cheapest(plain.periods, plain.messages, limit)) is not None:
        value = plain.seconds(cuts, weight)
        if value < plain.seconds(best, weight):
            best = cuts
        period = max(float(plain.periods[k][run]) for k, run in enumerate(pairwise(cuts)))
        worth = (plain.seconds(best, weight) - (value - weight * period)) / weight
        limit = min(period * (1 - _STEP), worth) if period else -1.0
    return best


def least_period(periods: Sequence[Floats]) -> float:
    """The least largest period over all cuts; infinite where there are none."""
    largest = _start(len(periods[0]))
    for period in periods:
        largest = np.maximum(largest[:, None], period).min(axis=0)
    return float(largest[-1])


def cheapest(periods: Sequence[Floats], messages: Sequence[Floats], limit: float) -> tuple[int, ...] | None:
    """The cuts with the least messages whose periods keep a limit; None where none do."""
    cost, sources = _start(len(periods[0])), []
    for period, message in zip(periods, messages, strict=True):
        step = np.where(period <= limit, cost[:, None], np.inf)
        source = step.argmin(axis=0)
        sources.append(source)
        cost = step[source, np.arange(len(source))] + message
    return None if cost[-1] == np.inf else back(sources)


def back(sources: Sequence[NDArray[np.intp]]) -> tuple[int, ...]:
    """The cuts that end after the last block, where every stage's first block is known by its end."""
    cuts = [len(sources[0]) - 1]
    for source in reversed(sources):
        cuts.append(int(source[cuts[-1]]))
    return tuple(cuts[::-1])


def runs(before: Floats) -> Floats:
    """[a, b]: what blocks [a, b) add up to; infinite where there are none."""
    return np.where(np.tri(len(before), k=-1, dtype=bool).T, before[None, :] - before[:, None], np.inf)


def _start(size: int) -> Floats:
    return np.where(np.arange(size) == 0, 0.0, np.inf)
