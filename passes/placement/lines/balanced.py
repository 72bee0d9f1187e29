"""Cut a line of blocks into stages, each a run of neighbours, so that the largest stage has least to do.

blocks    0  1  2  3  4  5  6  7
linear    [ s0 ][ s1 ][ s2 ][ s3 ]    stage s on rank s
"""

from collections.abc import Sequence

import numpy as np

from passes.placement.checks import require_amounts, require_positive
from passes.placement.memory import ROUNDING, Floats, StageMemory, prefix, refuse

TOLERANCE = 1e-9  # relative; loads this close are equal, or rounding would overrule the next objective


def linear(
    weights: Sequence[float],
    num_stages: int,
    cut_costs: Sequence[float] | None = None,
    memory: StageMemory | None = None,
    slack: float = 0.0,
) -> tuple[int, ...]:
    """The `num_stages` + 1 positions between stages whose largest stage is smallest, and of those the cheapest cuts.

    `weights` are seconds per block, `cut_costs[p]` what a cut before block p costs (any unit, one more than blocks),
    `memory` what every stage may hold, stage s on rank s. With fewer blocks than stages the last stages are empty, the
    others are not. Loads up to 1 + `slack` times the mean count as equal: then the cheapest cuts decide. Dynamic
    programming over stages, O(stages * blocks^2).

    Raises:
        CompileError: nothing fits into memory; names the smallest limit that would do. Or an input is no amount.
    """
    num_blocks, used = len(weights), min(len(weights), num_stages)
    cut = np.zeros(num_blocks + 1) if cut_costs is None else np.asarray(cut_costs, dtype=float)
    require_positive(num_stages=num_stages)
    require_amounts("weights", weights)
    require_amounts("cut_costs", cut.tolist(), num_blocks + 1)
    loads = [_spans(prefix(weights))] * used
    if memory is not None:
        memory.check(num_blocks, num_stages, num_stages)
        loads = _fitting(loads, memory, num_stages)
    largest = max(_least_largest(loads, num_blocks) * (1 + TOLERANCE), (1 + slack) * sum(weights) / num_stages)
    cost, sources = _start(num_blocks), []
    for load in loads:
        step = cost[:, None] + np.where(load <= largest, cut[:, None], np.inf)
        sources.append(step.argmin(axis=0))
        cost = step.min(axis=0)
    positions = [num_blocks]
    for source in reversed(sources):
        positions.append(int(source[positions[-1]]))
    return tuple(positions[::-1]) + (num_blocks,) * (num_stages - used)


def _start(num_blocks: int) -> Floats:
    return np.where(np.arange(num_blocks + 1) == 0, 0.0, np.inf)


def _spans(before: Floats) -> Floats:
    """[a, b]: what blocks [a, b) add up to; infinite where there are none."""
    return np.where(np.tri(len(before), k=-1, dtype=bool).T, before[None, :] - before[:, None], np.inf)


def _least_largest(loads: Sequence[Floats], num_blocks: int) -> float:
    largest = _start(num_blocks)
    for load in loads:
        largest = np.maximum(largest[:, None], load).min(axis=0)
    return float(largest[-1])


def _fitting(loads: Sequence[Floats], memory: StageMemory, num_stages: int) -> list[Floats]:
    """The loads, infinite where a stage does not fit its rank."""
    before, limits = memory.stages(num_stages)
    num_blocks = len(memory.held_bytes)
    spans = [_spans(row) for row in before[: len(loads)]]
    pairs = list(zip(loads, spans, limits, strict=False))
    fitting = [np.where(span <= limit * (1 + ROUNDING), load, np.inf) for load, span, limit in pairs]
    if _least_largest(fitting, num_blocks) == np.inf:
        share = limits / limits.max() if limits[: len(loads)].min() > 0 else np.ones(num_stages)
        scale = _least_largest([span / part for span, part in zip(spans, share, strict=False)], num_blocks)
        raise refuse(limits, scale * share, "line of stages")
    return fitting
