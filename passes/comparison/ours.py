"""fxpipe's plans as contestants.

fxpipe            the tuner's plan, frozen work of a micro-batch before it            0T0 0F0 0F1 ...
fxpipe, filled    the plan tuned for it, frozen work of the next batch in idle time   0F0 0T[0:3]x0:9 0F1 ...
"""

from dataclasses import replace

from fxpipe.comparison import OURS, Contestant
from passes.rehearsal.case import Case
from passes.rehearsal.rehearse import Rehearsal
from passes.tuner.candidates import Wishes
from passes.tuner.finals import finals


def ours(case: Case, wishes: Wishes, budget_seconds: float) -> list[Contestant]:
    """The plan without filling, and where something is frozen the plan with.

    Raises:
        CompileError: nothing fits.
    """
    search = budget_seconds if wishes.schedule == "auto" else None  # an order asked for by name stays as it is
    found = [_planned(case, wishes, search, False)]
    return [*found, _planned(case, wishes, search, True)] if case.frozen.names else found


def _planned(case: Case, wishes: Wishes, budget_seconds: float | None, filled: bool) -> Contestant:
    """The plan that `fxpipe.compile` makes, with its order searched for if that helps."""
    within = replace(wishes, memory_limit_bytes=case.limit_bytes, filled=filled)
    tuned = finals(case, within, budget_seconds)
    chosen = tuned.chosen
    best = Rehearsal(case, chosen).run(filled, tuned.search_seconds)
    timeline = best.timeline
    return Contestant(
        f"{OURS}, filled" if filled else OURS, str(chosen.outcome), timeline.makespan_seconds, case.batch_size,
        timeline.bubble_ratio, best.wire_bytes, best.peak_bytes, case.fits(best.peak_bytes), timeline,
    )  # fmt: skip
