"""Cut a line of blocks into 2WN stages for W waves over N ranks: a rank owns W stages of each half, mirrored.

    2 ranks, 2 waves    stages  0 1 2 3 4 5 6 7
                        ranks   0 1 1 0 0 1 1 0      levels (0, 7) (1, 6) (2, 5) (3, 4) on ranks 0 1 1 0

The zig-zag is its own mirror image, so skips between mirrored stages stay on their rank (Hanayo: Liu et al., SC 2023).
A wave over W * N levels has exactly the least largest *level*. A rank's load is the sum of its levels: that one is
improved by local search, which moves the cuts of one level at a time and restarts from changed cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpipe.errors import CompileError
from passes.placement.checks import require_positive
from passes.placement.memory import StageMemory, gibibytes
from passes.placement.places import wave_ranks
from passes.placement.waves.descent import boundaries_of, improve, path_of
from passes.placement.waves.layout import WaveLayout
from passes.placement.waves.levels import TOLERANCE, Floats
from passes.placement.waves.wave import wave


@dataclass(frozen=True)
class WavesPartition:
    """2WN stages on N ranks."""

    boundaries: tuple[int, ...]  # 2WN + 1 positions
    stage_ranks: tuple[int, ...]
    rank_loads: tuple[float, ...]  # seconds of each rank's blocks, and of the crossing skips it has one end of
    max_over_mean: float  # largest rank load over the mean without skip costs
    crossing: tuple[int, ...]  # indices of the skips with ends on two ranks


def waves(
    weights: Sequence[float],
    skips: Sequence[tuple[int, int]],
    num_ranks: int,
    num_waves: int,
    hard: bool = True,
    cut_costs: Sequence[float] | None = None,
    skip_cost: Sequence[float] | None = None,
    memory: StageMemory | None = None,
) -> WavesPartition:
    """`num_waves` waves over the ranks, the largest rank load as small as a local search gets it.

    Arguments as for `wave`; `memory` has `in_flight` for 2 * num_waves * num_ranks stages, and limits per rank, which
    the stages of a rank share. One wave is exact; of more, the least largest level is where the search starts, always
    with all skips collocated if `hard`. The same arguments give the same partition.

    Raises:
        CompileError: no partition was found that fits into memory; says by how much the best one did not.
    """
    require_positive(num_ranks=num_ranks, num_waves=num_waves)
    stage_ranks, num_levels = wave_ranks(num_ranks, num_waves), num_ranks * num_waves
    if num_waves == 1:
        one = wave(weights, skips, num_ranks, hard, cut_costs, skip_cost, memory)
        return WavesPartition(one.boundaries, stage_ranks, one.rank_loads, one.max_over_mean, one.crossing)
    if memory is not None:
        memory.check(len(weights), 2 * num_levels, num_ranks)
    start = wave(weights, skips, num_levels, hard, cut_costs, skip_cost)
    prices = None if hard or skip_cost is None else _prices(skip_cost, num_ranks)
    layout = WaveLayout.of(weights, skips, stage_ranks[:num_levels], hard, cut_costs, prices, memory)
    least = max(sum(weights) / num_ranks, max(weights, default=0.0)) * (1 + TOLERANCE)
    key, path = improve(layout, path_of(start.boundaries), least)
    if key[0] > 0:
        raise CompileError(
            f"no {num_waves} waves were found that fit into memory: the best need {gibibytes(key[0])} more per rank; "
            "take fewer waves, more ranks, smaller micro-batches, or recompute activations"
        )
    _, loads, crossing = layout.evaluate(path)
    mean = sum(weights) / num_ranks
    return WavesPartition(
        boundaries=boundaries_of(path),
        stage_ranks=stage_ranks,
        rank_loads=tuple(loads.tolist()),
        max_over_mean=float(loads.max()) / mean if mean else 1.0,
        crossing=tuple(np.flatnonzero(crossing).tolist()),
    )


def _prices(costs: Sequence[float], num_ranks: int) -> Floats:
    """[skips, ranks, ranks]: the same for all pairs of different ranks."""
    return np.asarray(np.reshape(costs, (-1, 1, 1)) * (1 - np.eye(num_ranks)))
