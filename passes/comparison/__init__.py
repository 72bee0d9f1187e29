"""Ways to train one step on the same machines, all through one simulator: baselines beside fxpipe's plans.

data_parallel DDP and ZeRO-3 as op lists         contest    of a contestant's settings the best that fits
memory        peak bytes of these                baselines  DDP, ZeRO-3, GPipe, 1F1B, by their best settings
                                                 ours       fxpipe's plans, unfilled and filled
                                                 fillers    one plan, its idle time filled in every way

Pipelines are `passes.rehearsal`'s.
"""

from fxpipe.comparison import Contestant
from passes.comparison.baselines import baselines
from passes.comparison.fillers import fillers
from passes.comparison.ours import ours
from passes.rehearsal.case import Case
from passes.tuner.candidates import Wishes

__all__ = ["baselines", "compare", "fillers", "ours"]


def compare(case: Case, wishes: Wishes, budget_seconds: float = 2.0) -> list[Contestant]:
    """Baselines, then fxpipe's plans.

    Raises:
        CompileError: fewer samples than ranks, or no plan fits into memory.
    """
    return [*baselines(case), *ours(case, wishes, budget_seconds)]
