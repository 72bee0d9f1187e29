"""Ways to train one step on the same machines, all through one simulator: baselines beside fxpipe's plans.

contest       of a contestant's settings the best that fits      baselines  DDP, ZeRO-3, GPipe, 1F1B, by their best
data_parallel DDP as a schedule                                  ours       fxpipe's plans, unfilled and filled
zero          ZeRO-3: its ops, states spread over ranks          fillers    one plan, its idle time filled in every way
published     fillers of others
"""

from fxpipe.show.comparison import Contestant
from passes.case import Case
from passes.comparison.baselines import baselines
from passes.comparison.fillers import fillers
from passes.comparison.ours import ours
from passes.tuner.request import Request

__all__ = ["baselines", "compare", "fillers", "ours"]


def compare(case: Case, request: Request) -> list[Contestant]:
    """Baselines, then fxpipe's plans.

    Raises:
        CompileError: fewer samples than ranks, or no plan fits into memory.
    """
    return [*baselines(case), *ours(case, request)]
