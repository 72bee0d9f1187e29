"""What is compared: one costed step, and the machines all contestants run it on.

blocks       seconds, weights, saved bytes at any micro-batch size      `fxpipe.block_costs`
frozen       seconds and temporaries of every layer of every component
machines     a cluster, a number of ranks, a memory limit per rank
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fxpipe.block_costs import BlockCosts
from fxpipe.block_graph import BlockGraph
from fxpipe.call_costs import moving_seconds
from fxpipe.capture import Capture
from fxpipe.cluster import Cluster
from fxpipe.cost_table import CostTable, seconds_of_table
from fxpipe.costs import CostModel, NodeCost, node_seconds
from fxpipe.options import microbatch_sizes
from passes.blocks import layers as cut_layers
from passes.fill import FrozenComponent, Layer

NUM_LAYERS = 16  # per component: bubbles are filled by whole layers

Table = tuple[tuple[float, ...], ...]
"""A number per component and layer."""


@dataclass(frozen=True, eq=False)
class FrozenLayers:
    """The frozen components in layers: at a number of samples, seconds and bytes of the largest operation of each."""

    names: tuple[str, ...]
    depends: tuple[tuple[int, ...], ...]
    seconds_at: Callable[[int], Table]
    largest_at: Callable[[int], Table]

    def components(self, batch_size: int) -> tuple[FrozenComponent, ...]:
        """For fillers: times at one sample, two, four, ... the whole batch."""
        sizes = sorted({min(2**k, batch_size) for k in range(batch_size.bit_length() + 1)})
        tables = {n: self.seconds_at(n) for n in sizes}
        return tuple(
            FrozenComponent(
                name,
                tuple(
                    Layer.measured(f"{name}.{i}", {n: tables[n][index][i] for n in sizes})
                    for i in range(self.num_layers[index])
                ),
                self.depends[index],
            )
            for index, name in enumerate(self.names)
        )

    @cached_property
    def num_layers(self) -> tuple[int, ...]:
        """Layers of every component."""
        return tuple(map(len, self.seconds_at(1)))


@dataclass(frozen=True, eq=False)
class Case:
    """A step of `batch_size` samples on the first `world_size` ranks of a cluster; `limit_bytes` are of one rank."""

    graph: BlockGraph
    costs: BlockCosts
    frozen: FrozenLayers
    model: CostModel
    cluster: Cluster
    world_size: int
    batch_size: int
    limit_bytes: int | None = None

    @property
    def shares(self) -> list[tuple[int, int]]:
        """The samples, from and to before, of every rank where the batch is shared out."""
        return spans(microbatch_sizes(self.batch_size, self.world_size))

    @property
    def blocks(self) -> range:
        return range(len(self.graph.blocks))

    def adding_seconds(self, num_bytes: int) -> float:
        """Adding so many bytes of gradients to those of earlier micro-batches."""
        return moving_seconds(self.model, 2 * num_bytes, num_bytes)

    def fits(self, peak_bytes: int) -> bool:
        return self.limit_bytes is None or peak_bytes <= self.limit_bytes


def spans(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where parts of these sizes begin and end."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def frozen_layers(
    captured: Capture, graph: BlockGraph, costs: Mapping[str, NodeCost], model: CostModel
) -> FrozenLayers:
    """Every component cut into layers of about equal time, as `passes.filled` cuts them."""
    one = node_seconds(model, captured.graph, costs, 1).forward
    layers = [cut_layers(captured, component, one, NUM_LAYERS) for component in graph.components]
    table = CostTable(costs)
    seconds = seconds_of_table(model, captured.graph, table)
    places = [[[table.position[name] for name in nodes] for nodes in of_component] for of_component in layers]
    numbers = {component.name: i for i, component in enumerate(graph.components)}

    def seconds_at(num_samples: int) -> Table:
        forward = seconds(num_samples).forward
        return tuple(tuple(float(forward[nodes].sum()) for nodes in component) for component in places)

    def largest_at(num_samples: int) -> Table:
        counts = table.counts(num_samples)
        moved = counts["bytes_read"] + counts["bytes_written"]
        return tuple(tuple(float(moved[nodes].max(initial=0.0)) for nodes in component) for component in places)

    return FrozenLayers(
        tuple(component.name for component in graph.components),
        tuple(tuple(sorted(numbers[name] for name in component.depends)) for component in graph.components),
        seconds_at,
        largest_at,
    )
