"""The frozen components of a step in layers, as bubbles are filled by: whole layers, on any number of samples.

    vae            encoder.conv_in .. down.0    encoder.down.1    ...          16 layers of about equal time
    text_encoder   embeddings .. layers.0       layers.1          ...

Between two layers of a component few bytes are alive, wherever that can be had.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxpipe.block_graph import BlockGraph
from fxpipe.capture import Capture
from fxpipe.costs import CostModel, NodeCost, node_seconds
from fxpipe.costs.table import CostTable, seconds_of_table
from passes.block_costs import weight_bytes_read
from passes.blocks import layers as cut_layers
from passes.fill import Fill, FillProblem, FrozenComponent, Interval, Layer, no_fill

NUM_LAYERS = 16  # per component

Table = tuple[tuple[float, ...], ...]
"""A number per component and layer."""


@dataclass(frozen=True, eq=False)
class FrozenLayers:
    """The layers of every component; at a number of samples, seconds and bytes of the largest operation of each.

    `nodes` are their operations by name, `depends` the positions of the components that each reads.
    """

    names: tuple[str, ...]
    depends: tuple[tuple[int, ...], ...]
    seconds_at: Callable[[int], Table]
    largest_at: Callable[[int], Table]
    nodes: tuple[tuple[tuple[str, ...], ...], ...] = ()

    def components(
        self,
        batch_size: int,
        room_bytes: float | None = None,
        whole: bool = False,
        ranks: Sequence[tuple[int, ...]] = (),
    ) -> tuple[FrozenComponent, ...]:
        """For fillers: times at one sample, two, four, ... the whole batch.

        Args:
            room_bytes: what a rank has for an operation; as many samples run at once as that permits, at least one.
            whole: samples can't be taken apart.
            ranks: per component, those that may run it; all where left out.
        """
        sizes = sorted({min(2**k, batch_size) for k in range(batch_size.bit_length() + 1)})
        tables = {n: self.seconds_at(n) for n in sizes}
        most = None if room_bytes is None or whole else self._most_samples(batch_size, room_bytes)
        return tuple(
            FrozenComponent(
                name,
                tuple(
                    Layer.measured(
                        f"{name}.{i}", {n: tables[n][index][i] for n in sizes}, most[index] if most else None
                    )
                    for i in range(self.num_layers[index])
                ),
                self.depends[index],
                ranks[index] if ranks else None,
                whole,
            )
            for index, name in enumerate(self.names)
        )

    @cached_property
    def num_layers(self) -> tuple[int, ...]:
        """Layers of every component."""
        return tuple(map(len, self.seconds_at(1)))

    def _most_samples(self, batch_size: int, room_bytes: float) -> Sequence[int | None]:
        """By component: the batch, its half, ... down to what fits; None where nothing is to be cut."""
        found: list[int | None] = []
        for component in range(len(self.names)):
            size = batch_size
            while size > 1 and max(self.largest_at(size)[component], default=0.0) > room_bytes:
                size = -(-size // 2)
            found.append(None if size == batch_size else size)
        return found


@dataclass(frozen=True)
class Ahead:
    """The next batch's frozen work, to be put into a step.

    Args:
        room_bytes: what a rank has for an operation, at any moment and after the rest of the step; None: enough.
        whole: samples can't be taken apart.
        ranks: per component, those that may run it; all where left out.
    """

    layers: FrozenLayers
    batch_size: int
    room_bytes: tuple[float, float] | None = None
    whole: bool = False
    ranks: tuple[tuple[int, ...], ...] = ()

    def filled(
        self, seconds: float, idle: tuple[tuple[Interval, ...], ...], how: Callable[[FillProblem], Fill], free: bool
    ) -> tuple[FillProblem, Fill]:
        """In the idle time of a step of so many seconds; where the filler is `free` to, after it if that is faster, for
        there is room for more samples at once, or if only there is room for all of them."""
        problem = self.problem(seconds, idle)
        found = how(problem)
        if free and self.room_bytes and self.room_bytes[0] != self.room_bytes[1]:
            always, after = self.room_bytes
            later = replace(self, room_bytes=(after, after)).problem(seconds, idle)
            last = no_fill(later)
            if last.iteration_seconds < found.iteration_seconds or (self.whole and self._largest > always):
                return later, last
        return problem, found

    def problem(self, seconds: float, idle: tuple[tuple[Interval, ...], ...]) -> FillProblem:
        """What a filler is given: as many samples at once as there is room for at any moment."""
        room = self.room_bytes[0] if self.room_bytes else None
        components = self.layers.components(self.batch_size, room, self.whole, self.ranks)
        return FillProblem(seconds, idle, components, self.batch_size)

    @property
    def _largest(self) -> float:
        """Bytes of the largest operation on the whole batch."""
        return max((max(of, default=0.0) for of in self.layers.largest_at(self.batch_size)), default=0.0)


def frozen_layers(
    captured: Capture, graph: BlockGraph, costs: Mapping[str, NodeCost], model: CostModel
) -> FrozenLayers:
    """Every component cut into layers of about equal time."""
    one = node_seconds(model, captured.graph, costs, 1).forward
    layers = tuple(cut_layers(captured, component, one, NUM_LAYERS) for component in graph.components)
    table = CostTable(costs)
    seconds = seconds_of_table(model, captured.graph, table)
    places = [[[table.position[name] for name in nodes] for nodes in of_component] for of_component in layers]
    held = weight_bytes_read(captured, table)
    numbers = {component.name: i for i, component in enumerate(graph.components)}

    def seconds_at(num_samples: int) -> Table:
        forward = seconds(num_samples).forward
        return tuple(tuple(float(forward[nodes].sum()) for nodes in component) for component in places)

    def largest_at(num_samples: int) -> Table:
        counts = table.counts(num_samples)
        moved = np.maximum(counts["bytes_read"] - held, 0.0) + counts["bytes_written"]
        return tuple(tuple(float(moved[nodes].max(initial=0.0)) for nodes in component) for component in places)

    return FrozenLayers(
        tuple(component.name for component in graph.components),
        tuple(tuple(sorted(numbers[name] for name in component.depends)) for component in graph.components),
        seconds_at,
        largest_at,
        layers,
    )
