"""What a filler is given: the idle time of every rank, and the frozen work of the next iteration.

rank 0  |0F0 0F1 0F2|-----|0B0 |---|0B1 ...          vae    8 layers, any number of samples at a time
rank 1  |--|1F0 1B0 1F1 1B1 1F2 1B2|------|    and   text   6 layers
        0                                 pipeline_seconds
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from passes.costs.layer import FrozenComponent, layer_seconds

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
    min_bubble_seconds: float = 0.0
    local_batches: tuple[int, ...] = tuple(range(1, 97))
    partial: bool = True

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
        return [[layer_seconds(points, c.most, self.batch_size) for points in c.layers] for c in self.components]

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
