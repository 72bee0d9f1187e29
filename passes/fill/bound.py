"""A lower bound on every iteration: idle time can hide frozen work, not make it less.

    pipeline                                        its ranks can't be faster
    one sample's way through its longest chain      layers of one sample can't run at the same time
    (busy + least frozen device time) / devices     all of it fits without a gap

The last also holds for some of the ranks and what only these may run, where weights do not have room everywhere.
"""

from collections.abc import Iterable

import numpy as np

from passes.fill.problem import FillProblem


def lower_bound_seconds(problem: FillProblem) -> float:
    """No fill of the problem makes an iteration shorter than this."""
    everywhere = tuple(range(problem.num_ranks))
    sets = {everywhere, *(problem.ranks_of(c) for c in range(len(problem.components)))}
    bounds = [problem.pipeline_seconds, _longest_path_seconds(problem), *(_share(problem, ranks) for ranks in sets)]
    return max(bounds)


def _longest_path_seconds(problem: FillProblem) -> float:
    """One sample through the longest chain of components, by itself (with all the others where they can't be apart)."""
    ends: list[float] = []
    for tables, component in zip(problem.seconds, problem.components, strict=True):
        size = problem.batch_size if component.whole else 1
        start = max((ends[d] for d in component.depends), default=0.0)
        ends.append(start + sum(table[size] for table in tables))
    return max(ends, default=0.0)


def _share(problem: FillProblem, ranks: tuple[int, ...]) -> float:
    """Seconds each of `ranks` is busy if they share evenly what only they may run."""
    inside = (c for c in range(len(problem.components)) if set(problem.ranks_of(c)) <= set(ranks))
    return (_busy(problem, ranks) + sum(least_device_seconds(problem, c) for c in inside)) / len(ranks)


def _busy(problem: FillProblem, ranks: Iterable[int]) -> float:
    idle = (sum(end - start for start, end in problem.idle[rank]) for rank in ranks)
    return sum(problem.pipeline_seconds - seconds for seconds in idle)


def least_device_seconds(problem: FillProblem, component: int) -> float:
    """Device time of a component on the whole batch, every sample at the rate of the best batch."""
    size, tables = problem.batch_size, problem.seconds[component]
    if problem.components[component].whole:
        return sum(table[size] for table in tables)
    return size * sum(float(np.min(np.array(table[1:]) / np.arange(1, size + 1))) for table in tables)
