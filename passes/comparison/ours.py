"""fxpipe's plan as a contestant: what `fxpipe.compile` would run, and what it would take without looking ahead.

fxpipe            frozen work of a micro-batch before it            0T0 0F0 0F1 ...
fxpipe, filled    where it is faster: that of the next batch        0F0 0T[0:3]x0:9 0F1 ...
"""

from dataclasses import replace

from fxpipe.show.comparison import OURS, Contestant
from passes.case import Case
from passes.comparison.contest import contestant
from passes.step_ops import step_ops
from passes.tuner.plans import tuned
from passes.tuner.request import Request
from passes.tuner.search import Found


def ours(case: Case, request: Request) -> list[Contestant]:
    """The plan with each step doing its own frozen work, and where something is frozen the plan that is free to choose.

    Raises:
        CompileError: nothing fits.
    """
    found = [_contestant(case, OURS, tuned(case, replace(request, fill="none")))]
    if case.frozen.names:
        found.append(_contestant(case, f"{OURS}, filled", tuned(case, request)))
    return found


def _contestant(case: Case, name: str, found: Found) -> Contestant:
    best = found.best
    assert best.simulated is not None
    ops = step_ops(case, best.placed, best.simulated.schedule, best.sizes(case))
    return contestant(case, name, str(best.outcome), ops)
