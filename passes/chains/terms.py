"""Objectives as tables, for all cuts into so many stages: a *main* value and *criteria* that are maxima over stages.

    simulated    main: sum of transfers             criteria: (M - 1) T0, late all-reduces
    paper        main: max of (M + 2S - 2) T0       criteria: late all-reduces

Each is known from a stage's first block and its end. The main value is minimised by dynamic programming under limits on
the criteria (`layers`), and the limits are searched (`boxes`): exact to a relative 1e-11.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.chains.boxes import search
from passes.chains.chain import Objective
from passes.chains.costs import Costs
from passes.chains.layers import ChainProblems, band, lower_bounds, paths
from passes.chains.layers import evaluate as evaluate_boxes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """One problem: so many stages, micro-batches, and replicas of every stage."""

    num_stages: int
    num_microbatches: int
    replicas: int


@dataclass(frozen=True)
class Terms:
    """The parts of an objective that depend on the cuts, for the stages of `band` [L - S + 1, L]."""

    main: Floats
    main_adds: bool
    criteria: tuple[Floats, ...]


def objective_terms(costs: Costs, layout: Layout, objective: Objective) -> Terms:
    """An objective as a main table and criteria; the sum of all compute is the same for all cuts."""
    start, stop, _ = band(len(costs.state) - 1, layout.num_stages)
    period, sync = costs.period_seconds(start, stop), costs.sync_seconds(start, stop)
    if objective == "simulated":
        late = np.maximum(sync - costs.backward[start], 0.0)
        transfer = np.broadcast_to(costs.transfer[stop], period.shape)
        return Terms(transfer, True, ((layout.num_microbatches - 1) * period, late))
    late = sync - costs.backward_seconds(start, stop)
    late = np.maximum(late, 0.0) if objective == "paper-clamped" else late
    return Terms((layout.num_microbatches + 2 * layout.num_stages - 2) * period, False, (late,))


def chain_problems(
    terms: Sequence[Terms], layouts: Sequence[Layout], costs: Sequence[Costs], limit: float | None
) -> ChainProblems:
    """All problems of one number of stages together."""
    num_stages, adds = layouts[0].num_stages, terms[0].main_adds
    start, stop, inside = band(len(costs[0].state) - 1, num_stages)
    main = np.stack([np.where(inside, term.main, np.inf) for term in terms], axis=1)
    criteria = [np.stack(tables, axis=1) for tables in zip(*(term.criteria for term in terms), strict=True)]
    if limit is None:
        return ChainProblems(num_stages, main, adds, criteria)
    too_large = {}
    for k in range(1, num_stages + 1):
        peaks = [c.peak_bytes(start, stop, min(k, x.num_microbatches)) for c, x in zip(costs, layouts, strict=True)]
        mask = np.stack(peaks, axis=1) > limit
        if mask.any():
            too_large[k] = mask
    return ChainProblems(num_stages, main, adds, criteria, too_large)


def solve_problems(problems: ChainProblems) -> list[tuple[int, ...] | None]:
    """The boundaries of an optimal solution of every problem; None where there is none."""
    if problems.num_stages <= 2:
        return _tried(problems)
    cuts = _balanced(problems)
    known = _values(problems, cuts)
    best, criteria = search(
        lambda boxes, ceiling: evaluate_boxes(problems, boxes, ceiling), *lower_bounds(problems, known), known
    )
    solved = np.flatnonzero(np.isfinite(best))
    found = {p: tuple(cuts[p].tolist()) for p in np.flatnonzero(np.isfinite(known)).tolist()}
    found |= zip(solved.tolist(), paths(problems, solved, criteria[solved]), strict=True)
    return [found.get(p) for p in range(len(known))]


def _balanced(problems: ChainProblems) -> Ints:
    """Boundaries [P, S + 1] of stages that share the blocks' periods, as well as that goes block by block."""
    period = problems.criteria[0] if problems.main_adds else problems.main
    before = np.cumsum(period[0], axis=1)
    num, size, most = *before.shape, problems.num_stages
    k = np.arange(1, most)
    inner = (before[:, :, None] <= before[:, -1:, None] * (k / most)).sum(axis=1)
    inner = np.minimum(np.maximum.accumulate(np.maximum(inner - k, 0), axis=1), size - most) + k
    return np.column_stack([np.zeros(num, dtype=np.int64), inner, np.full(num, size)])


def _values(problems: ChainProblems, cuts: Ints) -> Floats:
    """What boundaries [.., P, S + 1] of every problem come to; infinite where they do not fit into memory."""
    row, start, longer = np.arange(cuts.shape[-2]), cuts[..., :-1], np.diff(cuts) - 1
    main = problems.main[longer, row[:, None], start]
    total = main.sum(axis=-1) if problems.main_adds else main.max(axis=-1)
    for table in problems.criteria:
        total = total + table[longer, row[:, None], start].max(axis=-1)
    for k, mask in problems.too_large.items():
        stage = problems.num_stages - k
        total[mask[longer[..., stage], row, start[..., stage]]] = np.inf
    return np.asarray(total)


def _tried(problems: ChainProblems) -> list[tuple[int, ...] | None]:
    """One stage, or two: all cuts there are."""
    _, num, size = problems.main.shape
    inner = np.arange(1, size) if problems.num_stages == 2 else np.empty((1, 0), dtype=np.int64)
    cuts = np.column_stack([np.zeros(len(inner), dtype=np.int64), inner, np.full(len(inner), size)])
    total = _values(problems, np.broadcast_to(cuts[:, None], (len(cuts), num, cuts.shape[1])))
    return [tuple(cuts[c].tolist()) if np.isfinite(total[c, p]) else None for p, c in enumerate(total.argmin(axis=0))]
