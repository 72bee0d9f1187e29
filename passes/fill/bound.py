"""A lower bound on every iteration: idle time can hide frozen work, not make it less.

pipeline                                        ranks can't be faster
(busy + least frozen device time) / devices     all of it fits without a gap
the same for the components and ranks that belong to one another where some ranks have no room for them
"""

from collections.abc import Iterable

from passes.fill.problem import FillProblem


def lower_bound_seconds(problem: FillProblem) -> float:
    """No fill of the problem makes an iteration shorter than this."""
    everywhere = tuple(range(problem.num_ranks))
    sets = {everywhere, *(problem.ranks_of(c) for c in range(len(problem.components)))}
    bounds = [problem.pipeline_seconds, *(_share(problem, ranks) for ranks in sets)]
    for index, component in enumerate(problem.components):
        if component.whole:
            bounds.append(
                min(_busy(problem, [rank]) for rank in problem.ranks_of(index)) + least_device_seconds(problem, index)
            )
    return max(bounds)


def _share(problem: FillProblem, ranks: tuple[int, ...]) -> float:
    """Seconds each of `ranks` is busy if they share evenly what only they may run."""
    inside = (c for c in range(len(problem.components)) if set(problem.ranks_of(c)) <= set(ranks))
    return (_busy(problem, ranks) + sum(least_device_seconds(problem, c) for c in inside)) / len(ranks)


def _busy(problem: FillProblem, ranks: Iterable[int]) -> float:
    idle = (sum(end - start for start, end in problem.idle[rank]) for rank in ranks)
    return sum(problem.pipeline_seconds - seconds for seconds in idle)


def least_device_seconds(problem: FillProblem, component: int) -> float:
    """Device time of a component on the whole batch, every sample at the rate of the best batch."""
    size, whole = problem.batch_size, problem.components[component].whole
    tables = problem.seconds[component]
    return sum(t[size] if whole else size * min(t[n] / n for n in range(1, size + 1)) for t in tables)
