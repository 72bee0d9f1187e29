"""Cost every block of a captured step: the costs of its nodes summed, and what autograd keeps of them.

    conv_in   2.6 ms + 5.1 ms      block 0 = [conv_in, norm]   2.9 ms + 5.8 ms
    norm      0.3 ms + 0.7 ms  ->            parameters 46 KB, saved 5.2 MB*s
    silu      0.2 ms + 0.4 ms      block 1 = [silu, ...]       ...

No stage graph is traced: seconds, bytes and weights are of the operations of the capture.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds, LocalCosts
from fxpipe.costs.block_values import BatchValue, Values, Weight
from fxpipe.costs.model import CostModel, NodeSeconds, node_seconds
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable
from fxpipe.plan.block_graph import BlockGraph, is_size
from passes.batch import BatchPlan
from passes.batch.layout import BatchLayout
from passes.costs.local import STATE_KINDS, owners_reading, with_local
from passes.costs.saved import formula, saved_activations


def block_costs(
    captured: Capture,
    graph: BlockGraph,
    table: CostTable,
    model: CostModel,
    device: torch.device | str = "cpu",
    batch: BatchPlan | None = None,
) -> BlockCosts:
    """The costs of every block and component of `graph`.

    Args:
        table: the cost of every node of the capture.
        model: makes seconds of them.
        device: whose kernels decide what autograd keeps.
        batch: says what is computed on the whole batch, and how micro-batches take their samples; nothing and as views
            where left out.
    """
    owners = _Owners(graph, table)

    @cache  # seconds of blocks, of local operations and of whole-batch values are asked for by hundreds of candidates
    def seconds(num_samples: int) -> NodeSeconds:
        return node_seconds(model, table, num_samples)

    @cache
    def at(num_samples: int) -> BlockSeconds:
        parts = seconds(num_samples)
        forward, components = owners.sums(parts.forward)
        backward, _ = owners.sums(parts.backward)
        inputs, _ = owners.sums(parts.backward_input)
        weights, _ = owners.sums(parts.backward_weight)
        return BlockSeconds(num_samples, forward, backward, inputs, weights, components)

    whole = [table.position[name] for name in with_local(captured, batch.whole_batch if batch else (), graph.local)]
    return BlockCosts(
        _weights(captured, graph),
        _given(captured, graph, batch),
        _values(captured, graph, device),
        owners.num_components,
        at,
        _local(captured, graph, batch, table, seconds),
        lambda num_samples: float(seconds(num_samples).forward[whole].sum()),
        captured.loss_bytes,
    )


def _local(
    captured: Capture,
    graph: BlockGraph,
    batch: BatchPlan | None,
    table: CostTable,
    seconds: Callable[[int], NodeSeconds],
) -> LocalCosts:
    """The operations that every block and component computes for itself."""
    whole = batch.whole_batch if batch else ()
    local = (n for n in captured.graph.nodes if n.name in graph.local and not is_size(n.meta["val"]))
    number = {node.name: i for i, node in enumerate(local)}
    places = table.positions(number)

    def of(nodes: Sequence[str]) -> frozenset[int]:
        return frozenset(number[n] for n in with_local(captured, nodes, graph.local, whole) if n in number)

    @cache
    def at(num_samples: int) -> dict[str, list[float]]:
        parts = seconds(num_samples)
        of_kind = {"F": parts.forward, "B": parts.backward, "I": parts.backward_input, "W": parts.backward_weight}
        return {kind: part[places].tolist() for kind, part in of_kind.items()}

    return LocalCosts(tuple(of(b.nodes) for b in graph.blocks), tuple(of(c.nodes) for c in graph.components), at)


def weight_bytes_read(captured: Capture, table: CostTable) -> Floats:
    """Of every node, the bytes it reads that are there all step long: weights, buffers, constants."""
    found = np.zeros(len(table))
    for node in captured.graph.nodes:
        if node.name in table.position:
            state = (n for n in node.all_input_nodes if n.op == "placeholder" and n.meta["kind"] in STATE_KINDS)
            found[table.position[node.name]] = sum(n.meta["val"].nbytes for n in state)
    return found


class _Owners:
    """The block or component of every node of a table, to add up by."""

    def __init__(self, graph: BlockGraph, table: CostTable) -> None:
        self.num_blocks, self.num_components = len(graph.blocks), len(graph.components)
        self._of_node = np.full(len(table), self.num_blocks + self.num_components, dtype=np.intp)
        groups = [part.nodes for part in graph.blocks] + [part.nodes for part in graph.components]
        for number, nodes in enumerate(groups):
            self._of_node[table.positions(nodes)] = number

    def sums(self, values: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The sum of each block and of each component."""
        sums = np.bincount(self._of_node, values, self.num_blocks + self.num_components + 1).tolist()
        return tuple(sums[: self.num_blocks]), tuple(sums[self.num_blocks : -1])


def _weights(captured: Capture, graph: BlockGraph) -> tuple[Weight, ...]:
    """Every weight with its readers; tied ones have one name."""
    placeholders: dict[str, list[fx.Node]] = {}
    for node in captured.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] in STATE_KINDS:
            placeholders.setdefault(captured.tensors.get(node.name, node.name), []).append(node)
    weights = []
    for name, nodes in placeholders.items():
        value = nodes[0].meta["val"]
        sizes = int(value.numel()) * value.dtype.itemsize, int(value.numel())
        trained, kind = bool(nodes[0].meta["requires_grad"]), nodes[0].meta["kind"]
        weights.append(Weight(name, *sizes, trained, *_readers(nodes, graph), kind, _giving(nodes, graph)))
    return tuple(weights)


def _given(captured: Capture, graph: BlockGraph, batch: BatchPlan | None) -> tuple[BatchValue, ...]:
    """Inputs, draws and whole-batch values, in the order of the graph."""
    whole = batch.whole_batch if batch else ()
    stop = {captured.nodes[name] for name in whole}
    inner = {*whole, *with_local(captured, whole, graph.local)}
    found = []
    for node in captured.graph.nodes:
        is_given = node.op == "placeholder" and node.meta["kind"] not in STATE_KINDS
        if not is_given and node not in stop:
            continue
        kind: Literal["input", "draw", "whole"] = (
            "whole" if node in stop else "draw" if node.meta["kind"] == "draw" else "input"
        )
        target = captured.draws[node.name].target if kind == "draw" else ""
        layout = batch.layouts.get(node.name) if batch else None
        copied = isinstance(layout, BatchLayout) and (layout.dim, layout.outer) != (0, 1)
        reads = {n.name for name in inner for n in captured.nodes[name].all_input_nodes} if kind == "whole" else set()
        placeholders = (n for n in reads if captured.nodes[n].op == "placeholder")
        made_from = tuple(n for n in placeholders if captured.nodes[n].meta["kind"] not in STATE_KINDS)
        shared = batch is not None and layout is None
        readers = _readers([node], graph, {n for n in captured.graph.nodes if n.name in inner})
        found.append(
            BatchValue(node.name, formula(node.meta["val"]), *readers, kind, target, made_from, copied, shared)
        )
    return tuple(found)


def _giving(nodes: Sequence[fx.Node], graph: BlockGraph) -> tuple[int, ...]:
    """The blocks whose backward gives a gradient of any of these."""
    found, values = set[int](), [*nodes]
    for value in values:
        for user in value.users:
            owner = graph.owners.get(user.name)
            if user.meta.get("requires_grad") and isinstance(owner, int):
                found.add(owner)
            elif user.meta.get("requires_grad") and owner is None and user not in values:
                values.append(user)
    return tuple(sorted(found))


def _readers(
    nodes: Sequence[fx.Node], graph: BlockGraph, without: Collection[fx.Node] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks and components that read any of these."""
    owners = owners_reading(nodes, graph.owners, without)
    components = tuple(number for number, component in enumerate(graph.components) if component.name in owners)
    return tuple(sorted(owner for owner in owners if isinstance(owner, int))), components


def _values(captured: Capture, graph: BlockGraph, device: torch.device | str) -> Values:
    """What autograd keeps, and the edges: an edge that lies in kept memory is that memory."""
    saved = saved_activations(captured, device)
    num_bytes = [activation.num_bytes for activation in saved.kept]
    makers = [graph.owners.get(activation.maker) for activation in saved.kept]
    kept: list[set[int]] = [set() for _ in graph.blocks]
    read: list[set[int]] = [set() for _ in graph.blocks]
    for value, activation in enumerate(saved.kept):
        for keeper in activation.keepers:
            owner = graph.owners.get(keeper)
            if isinstance(owner, int):
                kept[owner].add(value)
    nodes = {node.name: node for node in captured.graph.nodes}
    for edge in graph.edges:
        value = saved.shown.get(edge.name, len(num_bytes))
        if value == len(num_bytes):
            num_bytes.append(formula(nodes[edge.name].meta["val"]))
            makers.append(edge.producer)
        for consumer in edge.consumers:
            if isinstance(consumer, int):
                read[consumer].add(value)
    of_blocks = tuple(maker if isinstance(maker, int) else None for maker in makers)
    return Values(tuple(num_bytes), of_blocks, tuple(map(frozenset, kept)), tuple(map(frozenset, read)))
