"""A question of unequal replicas, and every stage that may answer it with what it adds to the objective.

    blocks [i, j)  on 1, 2, 3 .. devices         period      late all-reduce      computing and sending

A plan is S of these moves in line (`moves`), with D devices in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CompileError
from passes.chains.boxes import TIE
from passes.chains.chain import Objective, local_batch
from passes.chains.costs import Costs, CostTable
from passes.chains.moves import Moves, first_true

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Question:
    """One (S, M) on D devices."""

    num_stages: int
    num_microbatches: int
    num_devices: int
    batch_size: int
    objective: Objective
    memory_limit_bytes: float | None

    def __post_init__(self) -> None:
        if self.num_devices < self.num_stages:
            raise CompileError(
                f"{self.num_stages} stages need a device each, and there are {self.num_devices}; use fewer stages"
            )
        local_batch(self.batch_size, self.num_microbatches, ceil(self.num_devices / self.num_stages))

    @property
    def replicas(self) -> range:
        """Those a stage can have: the others need one each, and each of its own needs a sample."""
        most = min(self.num_devices - self.num_stages + 1, ceil(self.batch_size / self.num_microbatches))
        return range(1, most + 1)

    def costs(self, table: CostTable) -> list[Costs]:
        return [table.of(self.batch_size, self.num_microbatches, r) for r in self.replicas]

    @property
    def weight(self) -> int:
        """How often the period counts."""
        m, s = self.num_microbatches, self.num_stages
        return m - 1 if self.objective == "simulated" else m + 2 * s - 2

    def lower_bound(self, table: CostTable) -> float:
        """Of the objective: all work spread evenly; an all-reduce hides no more than a period."""
        costs = self.costs(table)
        period = float(work_before(costs)[-1]) / self.num_devices
        if self.objective == "simulated":
            return self.weight * period + fastest_seconds(costs)
        return (self.weight - (self.objective == "paper")) * period


def work_before(costs: Sequence[Costs]) -> Floats:
    """Device seconds of the blocks before every position, at the number of replicas that spends least on a block."""
    blocks = [r * np.diff(c.forward + c.backward) for r, c in enumerate(costs, start=1)]
    return np.concatenate([[0.0], np.cumsum(np.min(blocks, axis=0))])


def fastest_seconds(costs: Sequence[Costs]) -> float:
    """Seconds of all blocks in turn, each at the number of replicas that is fastest for it."""
    return float(np.min([np.diff(c.forward + c.backward) for c in costs], axis=0).sum())


@dataclass(frozen=True)
class Choices:
    """All moves of a question, and what each adds to the objective's parts."""

    moves: Moves
    period: Floats  # weighted; at least what the rest of the work implies
    late: Floats
    added: Floats  # seconds of computing and sending
    least_added: float  # of any plan

    @staticmethod
    def of(costs: Sequence[Costs], question: Question) -> "Choices":
        size = len(costs[0].state) - 1
        start, stop = np.triu_indices(size + 1, k=1)
        work = work_before(costs)
        mean = costs[min(len(costs), max(1, round(question.num_devices / question.num_stages))) - 1]
        columns = []
        for r, c in enumerate(costs, start=1):
            rest = question.num_devices - r
            left = work[-1] - (work[stop] - work[start])
            period = c.period_seconds(start, stop)
            if rest:
                period = np.maximum(period, left / rest * (1 - 2 * TIE))
            hidden = mean.backward[start] if question.objective == "simulated" else c.backward_seconds(start, stop)
            late = c.sync_seconds(start, stop) - hidden
            late = late if question.objective == "paper" else np.maximum(late, 0.0)
            added = c.compute_seconds(start, stop) + c.transfer[stop]
            columns.append((start, stop, np.full(len(start), r), question.weight * period, late, added))
        starts, stops, replicas, periods, lates, all_added = (np.concatenate(c) for c in zip(*columns, strict=True))
        moves = Moves(starts, stops, replicas, size, question.num_stages, question.num_devices)
        return Choices(_within_memory(moves, costs, question), periods, lates, all_added, fastest_seconds(costs))

    def take(self, mask: NDArray[np.bool_]) -> "Choices":
        return Choices(self.moves.take(mask), self.period[mask], self.late[mask], self.added[mask], self.least_added)


def _within_memory(moves: Moves, costs: Sequence[Costs], question: Question) -> Moves:
    limit = question.memory_limit_bytes
    return moves if limit is None else replace(moves, fits=_peak_bytes(costs, question) <= limit)


def _peak_bytes(costs: Sequence[Costs], question: Question) -> Floats:
    """Of every move [moves] as the k-th stage from the end [S]."""
    start, stop = np.triu_indices(len(costs[0].state), k=1)
    held = [min(k, question.num_microbatches) for k in range(1, question.num_stages + 1)]
    return np.stack([np.concatenate([c.peak_bytes(start, stop, k) for c in costs]) for k in held])


def least_peak_bytes(table: CostTable, question: Question) -> float:
    """Bytes of the fullest rank under the plan where that is least."""
    costs = question.costs(table)
    moves = Choices.of(costs, replace(question, memory_limit_bytes=None)).moves
    peaks = _peak_bytes(costs, question)
    sizes = np.unique(peaks)
    return float(sizes[first_true(len(sizes), lambda i: replace(moves, fits=peaks <= sizes[i]).feasible())])
