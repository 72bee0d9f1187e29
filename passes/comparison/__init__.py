"""Ways to train one step on the same machines, all through one simulator: baselines beside fxpipe's plans.

contest       of a contestant's settings the best that fits      baselines  DDP, ZeRO-3, GPipe, 1F1B, by their best
data_parallel DDP and ZeRO-3 as schedules                        fillers    one plan, its idle time filled in every way
published     fillers of others
"""

from dataclasses import replace

from fxpipe.show.comparison import OURS, Contestant
from passes.case import Case
from passes.comparison.baselines import baselines
from passes.comparison.contest import walked_contestant
from passes.comparison.fillers import fillers
from passes.tuner.plans import tuned
from passes.tuner.request import Request
from passes.tuner.search import RankedTrials

__all__ = ["baselines", "compare", "fillers", "ours"]


def compare(case: Case, request: Request) -> list[Contestant]:
    """Baselines, then fxpipe's plans.

    Raises:
        CompileError: fewer samples than ranks, or no plan fits into memory.
    """
    return [*baselines(case), *ours(case, request)]


def ours(case: Case, request: Request) -> list[Contestant]:
    """What `fxpipe.compile` would run: with each step doing its own frozen work, and where something is frozen the plan
    that is free to look ahead, too.

    Raises:
        CompileError: nothing fits.
    """
    found = [_contestant(case, OURS, tuned(case, replace(request, fill="none")))]
    if case.frozen.names:
        found.append(_contestant(case, f"{OURS}, filled", tuned(case, request)))
    return found


def _contestant(case: Case, name: str, found: RankedTrials) -> Contestant:
    best = found.best
    assert best.simulated is not None
    return walked_contestant(case, name, str(best.outcome), best.simulated.clock, best.simulated.wire_bytes)
