"""Fillers on one plan: what a step takes with the next batch's frozen work after the pipeline, and in its idle time.

greedy, exact    common-span bubbles under DiffusionPipe's limits (Tian et al., MLSys 2024, Algorithms 1 and 2)
per-device       every rank its own samples in its own idle time
whole layers     a layer runs on all samples of a rank or waits: no partial batches
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from fxpipe.errors import CompileError
from passes.case import Case
from passes.comparison.published import exact, greedy, published
from passes.fill.bound import lower_bound_seconds
from passes.fill.per_device import no_fill, per_device
from passes.fill.problem import FillProblem
from passes.fill.result import Fill
from passes.tuner.plans import tuned
from passes.tuner.request import Request
from passes.tuner.simulate import simulate

WAYS: Mapping[str, Callable[[FillProblem], Fill]] = {
    "no fill": no_fill,
    "greedy, whole layers": lambda problem: greedy(replace(published(problem), partial=False)),
    "greedy, as published": lambda problem: greedy(published(problem)),
    "exact, in the same bubbles": lambda problem: exact(published(problem)),
    "greedy, in all bubbles": greedy,
    "per-device, whole layers": lambda problem: per_device(replace(problem, partial=False)),
    "per-device": per_device,
}


def fillers(case: Case, request: Request) -> tuple[str, float, dict[str, Fill]]:
    """The plan that does frozen work ahead, a lower bound on its step's seconds, and its idle time filled each way.

    A way that is for fewer components than there are is left out.

    Raises:
        CompileError: nothing is frozen, or nothing fits.
    """
    if not case.frozen.names:
        raise CompileError("nothing of this step is frozen: there is no work for its idle time")
    best = tuned(case, replace(request, fill="idle")).best
    assert best.simulated is not None
    alone = best.simulated.schedule.where(lambda action: not action.is_piece)
    training = simulate(case, best.placed, alone, best.sizes(case)).training
    components = case.frozen.components(case.batch_size, None, not case.divisible, best.placed.frozen_ranks)
    problem = FillProblem(training.seconds, tuple(training.idle), components, case.batch_size)
    found = {}
    for name, way in WAYS.items():
        try:
            found[name] = way(problem)
        except CompileError:  # the exact filler, of many components
            continue
    return str(best.outcome), lower_bound_seconds(problem), found
