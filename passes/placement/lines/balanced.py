"""Cut a line of blocks into stages, each a run of neighbours, so that the largest stage has least to do.

blocks    0  1  2  3  4  5  6  7
linear    [ s0 ][ s1 ][ s2 ][ s3 ]    stage s on rank s
"""

from collections.abc import Sequence

import numpy as np

from passes.placement.lines.shortest import cheapest, least_period, runs
from passes.placement.memory import prefix

_TOLERANCE = 1e-9  # relative; loads this close are equal, or rounding would overrule the cuts


def linear(weights: Sequence[float], num_stages: int, cut_costs: Sequence[float] | None = None) -> tuple[int, ...]:
    """The `num_stages` + 1 positions between stages whose largest stage is smallest, and of those the cheapest cuts.

    `weights` are seconds per block, `cut_costs[p]` what a cut before block p costs (any unit, one more than blocks).
    With fewer blocks than stages the last stages are empty, the others are not.
    """
    num_blocks, used = len(weights), min(len(weights), num_stages)
    loads = [runs(prefix(weights))] * used
    cut = np.zeros(num_blocks + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float)
    found = cheapest(loads, [cut] * used, least_period(loads) * (1 + _TOLERANCE)) if used else (0,)
    assert found is not None, "some cuts have the least largest stage"
    return found + (num_blocks,) * (num_stages - used)
