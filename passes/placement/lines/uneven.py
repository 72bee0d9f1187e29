"""Cut a line into fewer stages than ranks, so that stages have replicas in uneven numbers.

    8 ranks, 3 stages     x x x | x | x x x x        a heavy middle block gets one rank of its own, not 8 / 3

Replicas take a stage's micro-batches in turn. Within a limit on the time between two micro-batches a stage needs
seconds / limit ranks, rounded up; the fewest ranks for all blocks are a shortest path, and the limit is bisected.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np

from passes.placement.lines.shortest import back, runs
from passes.placement.memory import ROUNDING, Floats, prefix

_RESOLUTION = 1e-9  # relative, of the limit


def uneven_line(seconds: Sequence[float], num_stages: int, num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts of the blocks, one more than stages, and replicas of every stage: the least largest seconds per replica.

    There is a block, and a rank, for every stage. Ranks to spare go to the busiest stages.
    """
    before = prefix(seconds)
    loads = runs(before)
    lower, upper = before[-1] / num_ranks, before[-1]
    best = _fewest(loads, num_stages, upper)
    while upper - lower > _RESOLUTION * upper:
        middle = (lower + upper) / 2
        found = _fewest(loads, num_stages, middle)
        if found[0] <= num_ranks:
            best, upper = found, middle
        else:
            lower = middle
    cuts = best[1]
    return cuts, _replicas([float(loads[run]) for run in pairwise(cuts)], num_ranks)


def _fewest(loads: Floats, num_stages: int, limit: float) -> tuple[float, tuple[int, ...]]:
    """The fewest ranks with which no replica is busier than the limit, and the cuts."""
    at_all = np.where(loads < np.inf, 1.0, np.inf)
    needed = np.maximum(at_all, np.ceil(loads / limit * (1 - ROUNDING))) if limit else at_all
    count, sources = np.where(np.arange(len(loads)) == 0, 0.0, np.inf), []
    for _ in range(num_stages):
        total = count[:, None] + needed
        sources.append(total.argmin(axis=0))
        count = total.min(axis=0)
    return float(count[-1]), back(sources)


def _replicas(loads: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """One for each, then one more for the busiest, until all ranks are used: no other numbers have a less busy one."""
    replicas = [1] * len(loads)
    busiest = [(-load, stage) for stage, load in enumerate(loads)]
    heapify(busiest)
    for _ in range(num_ranks - len(loads)):
        stage = busiest[0][1]
        replicas[stage] += 1
        heapreplace(busiest, (-loads[stage] / replicas[stage], stage))
    return tuple(replicas)
