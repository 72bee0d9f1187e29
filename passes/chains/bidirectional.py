"""Two backbones over the same devices in opposite directions, cut jointly and exactly.

    devices     0        1        2        3        4 groups of r devices each
    down     [stage 0][stage 1][stage 2][stage 3]   one backbone flows to the right
    up       [stage 3][stage 2][stage 1][stage 0]   the other to the left: group k holds up stage S - 1 - k

Model: DiffusionPipe (Tian et al., MLSys 2024), section 4.2, with S stages and M_d, M_u micro-batches:

    period T0 = max(forward + backward, 2 x transfers of the cut both ways)     the two directions share the links
    late    Y = all-reduce of the stage's gradients - its own backward
    seconds   = (M + 2S - 2) max T0 + max Y, over the stages of both backbones
    M         = M_d + M_u - min(S / 2, M_d, M_u)

The paper leaves M open. The value here is that of optimal schedules of equal stages, S = 2, 4 and 8, M_d = M_u: while
one direction fills its pipeline, the other drains.

Method: what is to be minimised couples the backbones only by two maxima. So: the smallest T0 with all stages of Y >=
sigma forbidden, the smallest Y with that T0, sigma = that Y, and again, until no T0 that is left can win. Each step is
a least-largest cut of either backbone by itself, for all micro-batches of one S at once.
"""

from collections.abc import Sequence
from itertools import groupby
from math import gcd

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.chains.chain import Chain, check_stages
from passes.chains.costs import Costs, CostTable, in_flight
from passes.chains.two_maxima import least_largest_cuts, least_sum
from passes.chains.two_ways import BidirectionalObjective, BidirectionalPlan, TwoWays, check_objective

__all__ = ["BidirectionalObjective", "BidirectionalPlan", "TwoWays", "all_bidirectional", "solve_bidirectional"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def solve_bidirectional(
    down: Chain,
    up: Chain,
    layout: TwoWays,
    *,
    batch_sizes: tuple[int, int],
    objective: BidirectionalObjective = "paper",
) -> BidirectionalPlan:
    """The best boundaries of both backbones; `batch_sizes` are samples of one step, down and up.

    Raises:
        CompileError: fewer blocks than stages, or fewer samples than replicas.
    """
    check_objective(objective)
    for chain in (down, up):
        check_stages(chain, layout.num_stages)
    return _solve((down, up), [layout], batch_sizes, objective)[0]


def all_bidirectional(
    down: Chain,
    up: Chain,
    num_devices: int,
    *,
    batch_sizes: tuple[int, int],
    objective: BidirectionalObjective = "paper",
    stages: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
) -> tuple[BidirectionalPlan, ...]:
    """The best plan of every (S, M), M micro-batches both ways, the fastest first.

    S divides `num_devices`, and M times the replicas divides both batches: all local batches are equal. `stages` and
    `microbatches` restrict the two.

    Raises:
        CompileError: there is no such (S, M).
    """
    check_objective(objective)
    layouts = _layouts(min(down.num_blocks, up.num_blocks), num_devices, batch_sizes, stages, microbatches)
    return tuple(sorted(_solve((down, up), layouts, batch_sizes, objective), key=lambda plan: plan.seconds))


def _layouts(
    num_blocks: int,
    num_devices: int,
    batch_sizes: tuple[int, int],
    stages: Sequence[int] | None,
    microbatches: Sequence[int] | None,
) -> list[TwoWays]:
    if min(num_devices, *batch_sizes) < 1:
        raise CompileError(f"num_devices={num_devices} and batch_sizes={batch_sizes} must be positive")
    found = []
    for s in stages or range(1, min(num_devices, num_blocks) + 1):
        if 1 <= s <= num_blocks and num_devices % s == 0:
            samples = gcd(*batch_sizes)
            counts = microbatches or range(1, samples + 1)
            found += [
                TwoWays(s, (m, m), num_devices // s) for m in counts if m > 0 and samples % (m * num_devices // s) == 0
            ]
    if not found:
        raise CompileError(
            f"no number of stages S (of {stages or 'all'}) and micro-batches M (of {microbatches or 'all'}) has S <= "
            f"{num_blocks} blocks, S dividing {num_devices} devices, and M * {num_devices} / S dividing the batches "
            f"{batch_sizes}; change the batch sizes or the devices"
        )
    return found


def _solve(
    chains: tuple[Chain, Chain],
    layouts: Sequence[TwoWays],
    batch_sizes: tuple[int, int],
    objective: BidirectionalObjective,
) -> list[BidirectionalPlan]:
    tables, plans = [CostTable(chain) for chain in chains], []
    for num_stages, group in groupby(layouts, key=lambda layout: layout.num_stages):
        some = list(group)
        costs = [
            [table.of(batch, layout.num_microbatches[way], layout.replicas) for layout in some]
            for way, (table, batch) in enumerate(zip(tables, batch_sizes, strict=True))
        ]
        plans += _solve_stages(costs, some, num_stages, objective)
    return plans


def _solve_stages(
    costs: Sequence[Sequence[Costs]], layouts: Sequence[TwoWays], num_stages: int, objective: BidirectionalObjective
) -> list[BidirectionalPlan]:
    """The plans of layouts with equally many stages; `costs` are by direction, then by layout."""
    period = [np.stack([_period(c) for c in way]) for way in costs]
    late = [np.stack([_late(c, objective) for c in way]) for way in costs]
    factor = np.array([layout.slots + 2.0 * num_stages - 2 for layout in layouts])
    largest, latest = least_sum(period, late, factor, num_stages)
    limits = latest[:, None, None]
    down, up = (
        least_largest_cuts(np.where(y <= limits, x, np.inf), num_stages) for x, y in zip(period, late, strict=True)
    )
    return [
        BidirectionalPlan(
            tuple(down[k].tolist()),
            tuple(up[k].tolist()),
            layout,
            objective,
            float(factor[k] * largest[k] + latest[k]),
            float(largest[k]),
            float(latest[k]),
            _peak_bytes(layout, (costs[0][k], costs[1][k]), (down[k], up[k])),
        )
        for k, layout in enumerate(layouts)
    ]


def _period(costs: Costs) -> Floats:
    """T0 of every stage [first block, end], infinite where there is none."""
    return _of_stages(np.maximum(costs.compute_seconds(*_ends(costs)), 2 * costs.transfer[None, :]))


def _late(costs: Costs, objective: BidirectionalObjective) -> Floats:
    """Y of every stage."""
    late = costs.sync_seconds(*_ends(costs)) - costs.backward_seconds(*_ends(costs))
    return _of_stages(np.maximum(late, 0.0) if objective == "paper-clamped" else late)


def _ends(costs: Costs) -> tuple[Ints, Ints]:
    position = np.arange(len(costs.state))
    return position[:, None], position[None, :]


def _of_stages(values: Floats) -> Floats:
    return np.where(np.tri(len(values), k=-1, dtype=bool).T, values, np.inf)


def _peak_bytes(layout: TwoWays, costs: tuple[Costs, Costs], cuts: tuple[Ints, Ints]) -> tuple[float, ...]:
    """Bytes of a rank of every group: its stage of either direction, with what 1F1B has in flight there."""
    down, up = (
        c.peak_bytes(b[:-1], b[1:], in_flight(layout.num_stages, m))
        for c, b, m in zip(costs, cuts, layout.num_microbatches, strict=True)
    )
    return tuple((down + up[::-1]).tolist())
