"""The frozen components of a step in layers, as bubbles are filled by: whole layers, on any number of samples.

    vae            encoder.conv_in .. down.0    encoder.down.1    ...          16 layers of about equal time
    text_encoder   embeddings .. layers.0       layers.1          ...

Between two layers of a component few bytes are alive, wherever that can be had.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from fxpipe.capture import Capture
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.plan.block_graph import BlockGraph, is_size, tensor_bytes
from passes.batch import BatchPlan
from passes.blocks import layers as cut_layers
from passes.costs.block_costs import weight_bytes_read
from passes.costs.layer import FrozenComponent, layer_points
from passes.costs.local import owners_reading, with_local

NUM_LAYERS = 16  # per component

Table = tuple[tuple[float, ...], ...]
"""A number per component and layer."""
Layers = tuple[tuple[tuple[str, ...], ...], ...]
"""Operations by name of every component's layers."""


@dataclass(frozen=True)
class LayerValue:
    """A tensor that a frozen layer, (component, layer), makes for other layers, `readers`, or for `blocks`.

    `bytes_per_sample` counts one sample, or the whole tensor where not `batched`.
    """

    name: str
    maker: tuple[int, int]
    readers: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    bytes_per_sample: int
    batched: bool

    def num_bytes(self, num_samples: int) -> int:
        return self.bytes_per_sample * (num_samples if self.batched else 1)


@dataclass(frozen=True, eq=False)
class FrozenLayers:
    """The layers of every component; at a number of samples, seconds and bytes of the largest operation of each.

    `nodes` are their operations by name, `depends` the positions of the components that each reads, `values` what
    layers make for others, `given` the layers that read each input, draw and whole-batch value.
    """

    names: tuple[str, ...]
    depends: tuple[tuple[int, ...], ...]
    seconds_at: Callable[[int], Table]
    largest_at: Callable[[int], Table]
    nodes: Layers
    values: tuple[LayerValue, ...]
    given: Mapping[str, frozenset[tuple[int, int]]]

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
        tables = [self.seconds_at(n) for n in sizes]
        most = None if room_bytes is None or whole else self._most_samples(batch_size, room_bytes)
        return tuple(
            FrozenComponent(
                name,
                tuple(
                    layer_points(dict(zip(sizes, of_layer, strict=True)))
                    for of_layer in zip(*(table[index] for table in tables), strict=True)
                ),
                self.depends[index],
                ranks[index] if ranks else None,
                whole,
                most[index] if most else None,
            )
            for index, name in enumerate(self.names)
        )

    @cached_property
    def num_layers(self) -> tuple[int, ...]:
        """Layers of every component."""
        return tuple(map(len, self.seconds_at(1)))

    def most_bytes(self, num_samples: int) -> float:
        """What the largest operation takes on so many samples."""
        return max((max(of, default=0.0) for of in self.largest_at(num_samples)), default=0.0)

    def seconds_within(self, batch_size: int, room_bytes: float | None) -> float:
        """Of all work on a batch, on as many samples at once as the room permits; no share of it takes less."""
        most = (None,) * len(self.names) if room_bytes is None else self._most_samples(batch_size, room_bytes)
        sizes = [batch_size if size is None else size for size in most]
        tables = {size: self.seconds_at(size) for size in sizes}
        return sum(batch_size / n * sum(tables[n][component]) for component, n in enumerate(sizes))

    def _most_samples(self, batch_size: int, room_bytes: float) -> Sequence[int | None]:
        """By component: the batch, its half, ... down to what fits; None where nothing is to be cut."""
        found: list[int | None] = []
        for component in range(len(self.names)):
            size = batch_size
            while size > 1 and max(self.largest_at(size)[component], default=0.0) > room_bytes:
                size = -(-size // 2)
            found.append(None if size == batch_size else size)
        return found


def frozen_layers(
    captured: Capture, graph: BlockGraph, table: CostTable, model: CostModel, batch: BatchPlan | None = None
) -> FrozenLayers:
    """Every component cut into layers of about equal time; `batch` says what is computed on the whole batch."""
    one = table.by_name(node_seconds(model, table, 1).forward)
    layers = tuple(cut_layers(captured, component, one, NUM_LAYERS) for component in graph.components)
    places = [[table.positions(nodes) for nodes in of_component] for of_component in layers]
    held = weight_bytes_read(captured, table)
    numbers = {component.name: i for i, component in enumerate(graph.components)}

    @cache
    def largest_at(num_samples: int) -> Table:
        counts = table.counts(num_samples)
        moved = np.maximum(counts.bytes_read - held, 0.0) + counts.bytes_written
        return tuple(tuple(float(moved[nodes].max(initial=0.0)) for nodes in component) for component in places)

    return FrozenLayers(
        tuple(component.name for component in graph.components),
        tuple(tuple(sorted(numbers[name] for name in component.depends)) for component in graph.components),
        seconds_of_layers(captured, graph, table, model, layers, batch),
        largest_at,
        layers,
        layer_values(captured, graph, layers),
        _given(captured, graph, layers),
    )


def seconds_of_layers(
    captured: Capture, graph: BlockGraph, table: CostTable, model: CostModel, layers: Layers, batch: BatchPlan | None
) -> Callable[[int], Table]:
    """Of every component's layers, by the number of samples."""
    whole = batch.whole_batch if batch else ()
    units = [
        [table.positions(with_local(captured, nodes, graph.local, whole)) for nodes in of_component]
        for of_component in layers
    ]

    @cache  # asked for by every piece of frozen work of every candidate
    def seconds_at(num_samples: int) -> Table:
        forward = node_seconds(model, table, num_samples).forward
        return tuple(tuple(float(forward[nodes].sum()) for nodes in component) for component in units)

    return seconds_at


def _owners(graph: BlockGraph, layers: Sequence[Sequence[Sequence[str]]]) -> dict[str, str | int]:
    """The block of every operation, or its layer as text: `crossing` takes names."""
    owners: dict[str, str | int] = {name: block.index for block in graph.blocks for name in block.nodes}
    for component, of_component in enumerate(layers):
        for layer, nodes in enumerate(of_component):
            owners |= dict.fromkeys(nodes, f"{component} {layer}")
    return owners


def _layer(owner: str) -> tuple[int, int]:
    component, layer = owner.split()
    return int(component), int(layer)


def layer_values(
    captured: Capture, graph: BlockGraph, layers: Sequence[Sequence[Sequence[str]]]
) -> tuple[LayerValue, ...]:
    """What layers make for others, in the order of the graph; local operations read for whoever reads them."""
    owners, values = _owners(graph, layers), []
    for node in captured.graph.nodes:
        maker = owners.get(node.name)
        if not isinstance(maker, str) or is_size(node.meta["val"]):
            continue
        readers = owners_reading([node], owners) - {maker}
        size = tensor_bytes(node.meta["val"])
        if readers and size is not None:
            by_layer = tuple(sorted(_layer(owner) for owner in readers if isinstance(owner, str)))
            blocks = tuple(sorted(owner for owner in readers if isinstance(owner, int)))
            values.append(LayerValue(node.name, _layer(maker), by_layer, blocks, *size))
    return tuple(values)


def _given(
    captured: Capture, graph: BlockGraph, layers: Sequence[Sequence[Sequence[str]]]
) -> dict[str, frozenset[tuple[int, int]]]:
    owners, found = _owners(graph, layers), {}
    for node in captured.graph.nodes:
        if node.name not in owners and not is_size(node.meta.get("val")):
            readers = frozenset(_layer(owner) for owner in owners_reading([node], owners) if isinstance(owner, str))
            if readers:
                found[node.name] = readers
    return found
