"""What a filler is given: the idle time of every rank, and the frozen work of the next iteration.

rank 0  |0F0 0F1 0F2|-----|0B0 |---|0B1 ...          vae    8 layers, any number of samples at a time
rank 1  |--|1F0 1B0 1F1 1B1 1F2 1B2|------|    and   text   6 layers
        0                                 pipeline_seconds
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from fxpipe.errors import CompileError
from passes.costs.layer import FrozenComponent

Interval = tuple[float, float]
"""Start and end in seconds from the start of the iteration."""


@dataclass(frozen=True)
class FillProblem:
    """Idle time and frozen work of one iteration.

    Args:
        pipeline_seconds: the iteration's length without frozen work.
        idle: per rank, its idle intervals in order, within 0 and `pipeline_seconds`.
        components: the frozen work, each after those it depends on.
        batch_size: samples of one iteration, over all ranks.
        min_bubble_seconds: shorter bubbles are left alone.
        local_batches: sample counts of a layer on one rank where it does not run on all that are left.
        partial: whether a layer may run on a part of the samples in one bubble, on the rest later.
    """

    pipeline_seconds: float
    idle: tuple[tuple[Interval, ...], ...]
    components: tuple[FrozenComponent, ...]
    batch_size: int
    min_bubble_seconds: float = 0.002
    local_batches: tuple[int, ...] = tuple(range(1, 97))
    partial: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.pipeline_seconds < inf or not self.idle:
            raise CompileError(
                f"batch_size={self.batch_size}, pipeline_seconds={self.pipeline_seconds}, {len(self.idle)} ranks: "
                "frozen work needs a sample, a finite time and a rank"
            )
        if not self.min_bubble_seconds >= 0:
            raise CompileError(f"min_bubble_seconds={self.min_bubble_seconds}; give zero or more seconds")
        if list(self.local_batches) != sorted({n for n in self.local_batches if n > 0}):
            raise CompileError(f"local_batches={self.local_batches} must be positive and rising")
        for rank, intervals in enumerate(self.idle):
            _check_intervals(rank, intervals, self.pipeline_seconds)
        for index, component in enumerate(self.components):
            _check_component(index, component, self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.idle)

    @cached_property
    def idle_seconds(self) -> float:
        """Over all ranks, short bubbles included."""
        return sum(end - start for intervals in self.idle for start, end in intervals)

    @cached_property
    def seconds(self) -> list[list[list[float]]]:
        """By component, layer and number of samples, 0 to the batch."""
        known: dict[tuple[object, ...], list[float]] = {}
        for layer in (layer for component in self.components for layer in component.layers):
            if (layer.points, layer.most) not in known:
                known[layer.points, layer.most] = layer.table(self.batch_size)
        return [[known[layer.points, layer.most] for layer in component.layers] for component in self.components]

    @cached_property
    def prefix(self) -> list[list[list[float]]]:
        """By component and number of samples: seconds of the first 0, 1, ... layers."""
        size = self.batch_size + 1
        columns = (np.array(tables).reshape(-1, size) for tables in self.seconds)
        return [np.vstack([np.zeros(size), np.cumsum(column, axis=0)]).T.tolist() for column in columns]

    @cached_property
    def part_seconds(self) -> list[list[list[float]]]:
        """By component and layer: seconds of each of `local_batches`, those above the batch left out."""
        sizes = [n for n in self.local_batches if n <= self.batch_size]
        return [[[table[n] for n in sizes] for table in tables] for tables in self.seconds]

    @cached_property
    def before(self) -> list[frozenset[int]]:
        """By component: all that must be done first. Those without layers pass on what they depend on."""
        found: list[frozenset[int]] = []
        for component in self.components:
            found.append(frozenset(component.depends).union(*(found[d] for d in component.depends)))
        return found

    def ranks_of(self, component: int) -> tuple[int, ...]:
        """The ranks that may run a component."""
        ranks = self.components[component].ranks
        return tuple(range(self.num_ranks)) if ranks is None else ranks


def _check_intervals(rank: int, intervals: Sequence[Interval], pipeline_seconds: float) -> None:
    times = [0.0, *(time for interval in intervals for time in interval), pipeline_seconds]
    if not all(a <= b for a, b in pairwise(times)):
        raise CompileError(
            f"idle[{rank}] = {list(intervals)} must be in order, not overlap, and lie within 0 and {pipeline_seconds} s"
        )


def _check_component(index: int, component: FrozenComponent, num_ranks: int) -> None:
    if not all(0 <= d < index for d in component.depends):
        raise CompileError(
            f"component {component.name} is number {index} and depends on {component.depends}: list it after those"
        )
    ranks = component.ranks
    if ranks is not None and (not ranks or list(ranks) != sorted({r for r in ranks if 0 <= r < num_ranks})):
        raise CompileError(
            f"component {component.name} may run on ranks {ranks}; give at least one of 0 to {num_ranks - 1}, in order"
        )
