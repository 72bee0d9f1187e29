"""Fillers on one plan: what a step takes with the next batch's frozen work after the pipeline, and in its idle time.

greedy, exact    common-span bubbles under DiffusionPipe's limits (Tian et al., MLSys 2024, Algorithms 1 and 2)
per-device       every rank its own samples in its own idle time
whole layers     a layer runs on all samples of a rank or waits: no partial batches
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from fxpipe.errors import CompileError
from passes.fill import Fill, FillProblem, fill, lower_bound_seconds, per_device, published
from passes.rehearsal.case import Case
from passes.rehearsal.rehearse import Rehearsal
from passes.tuner.candidates import Wishes
from passes.tuner.finals import finals

WAYS: Mapping[str, Callable[[FillProblem], Fill]] = {
    "no fill": lambda problem: fill(problem, "none"),
    "greedy, whole layers": lambda problem: fill(replace(published(problem), partial=False), "greedy"),
    "greedy, as published": lambda problem: fill(published(problem), "greedy"),
    "exact, in the same bubbles": lambda problem: fill(published(problem), "exact"),
    "greedy, in all bubbles": lambda problem: fill(problem, "greedy"),
    "per-device, whole layers": lambda problem: per_device(replace(problem, partial=False)),
    "per-device": lambda problem: fill(problem, "per-device"),
}


def fillers(case: Case, wishes: Wishes, budget_seconds: float) -> tuple[str, float, dict[str, Fill]]:
    """The plan that `fxpipe.compile` makes, a lower bound on its step's seconds, and its idle time filled each way.

    A way that is for fewer components than there are is left out.

    Raises:
        CompileError: nothing is frozen, or nothing fits.
    """
    if not case.frozen.names:
        raise CompileError("nothing of this step is frozen: there is no work for its idle time")
    within = replace(wishes, memory_limit_bytes=case.limit_bytes, filled=True)
    tuned = finals(case, within, budget_seconds if wishes.schedule == "auto" else None)
    problem = Rehearsal(case, tuned.chosen).fill_problem(tuned.search_seconds)
    found = {}
    for name, way in WAYS.items():
        try:
            found[name] = way(problem)
        except CompileError:  # the exact filler, of many components
            continue
    return str(tuned.chosen.outcome), lower_bound_seconds(problem), found
