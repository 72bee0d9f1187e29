"""Ways to train one step on the same machines, all through one simulator: baselines beside fxpipe's plans.

case          what is compared                           contest       of a contestant's settings the best that fits
data_parallel DDP and ZeRO-3 as op lists                 baselines     DDP, ZeRO-3, GPipe, 1F1B, by their best settings
flows         bytes between the points of a pipeline     ours          fxpipe's plans, unfilled and filled
pieces        frozen work between actions                memory        peak bytes of each
pipeline_ops  a schedule as op lists
"""

from fxpipe.comparison import Contestant
from passes.candidates import Wishes
from passes.comparison.baselines import baselines
from passes.comparison.ours import ours
from passes.rehearsal.case import Case

__all__ = ["Case", "baselines", "compare", "ours"]


def compare(case: Case, wishes: Wishes, budget_seconds: float = 2.0) -> list[Contestant]:
    """Baselines, then fxpipe's plans.

    Raises:
        CompileError: fewer samples than ranks, or no plan fits into memory.
    """
    return [*baselines(case), *ours(case, wishes, budget_seconds)]
