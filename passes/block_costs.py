"""Cost every block of a captured step: the costs of its nodes summed, and what autograd keeps of them.

    conv_in   2.6 ms + 5.1 ms      block 0 = [conv_in, norm]   2.9 ms + 5.8 ms
    norm      0.3 ms + 0.7 ms  ->            parameters 46 KB, saved 5.2 MB*s
    silu      0.2 ms + 0.4 ms      block 1 = [silu, ...]       ...

No stage graph is traced: seconds, bytes and weights are of the operations of the capture.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch import fx

from fxpipe.block_graph import BlockGraph, Owner
from fxpipe.capture import Capture
from fxpipe.costs import CostModel, NodeCost
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds
from fxpipe.costs.block_values import Given, Values, Weight
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable, seconds_of_table
from fxpipe.sizes import expression
from passes.saved import saved_activations

STATE_KINDS = ("parameter", "buffer", "constant")


def block_costs(
    captured: Capture,
    graph: BlockGraph,
    costs: Mapping[str, NodeCost],
    model: CostModel,
    device: torch.device | str = "cpu",
) -> BlockCosts:
    """The costs of every block and component of `graph`.

    Args:
        costs: of every node of the capture, by name.
        model: makes seconds of them.
        device: whose kernels decide what autograd keeps.
    """
    table = CostTable(costs)
    owners = _Owners(graph, table)
    seconds = seconds_of_table(model, captured.graph, table)

    # A block's weights stand for their gradients, made beside those of earlier micro-batches.
    held = np.where(owners.are_frozen, weight_bytes_read(captured, table), 0.0)

    def largest_at(num_samples: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        counts = table.counts(num_samples)
        return owners.most(np.maximum(counts["bytes_read"] - held, 0.0) + counts["bytes_written"])

    def seconds_at(num_samples: int) -> BlockSeconds:
        parts = seconds(num_samples)
        forward, components = owners.sums(parts.forward)
        backward, _ = owners.sums(parts.backward_input + parts.backward_weight)
        inputs, _ = owners.sums(parts.backward_input)
        weights, _ = owners.sums(parts.backward_weight)
        return BlockSeconds(num_samples, forward, backward, inputs, weights, components)

    weights, given, values = _weights(captured, graph), _given(captured, graph), _values(captured, graph, device)
    return BlockCosts(weights, given, values, owners.num_components, seconds_at, largest_at)


def weight_bytes_read(captured: Capture, table: CostTable) -> Floats:
    """Of every node, the bytes it reads that are there all step long: weights, buffers, constants."""
    found = np.zeros(len(table.costs))
    for node in captured.graph.nodes:
        if node.name in table.position:
            state = (n for n in node.all_input_nodes if n.op == "placeholder" and n.meta["kind"] in STATE_KINDS)
            found[table.position[node.name]] = sum(n.meta["val"].nbytes for n in state)
    return found


class _Owners:
    """The block or component of every node of a table, to add up by."""

    def __init__(self, graph: BlockGraph, table: CostTable) -> None:
        self.num_blocks, self.num_components = len(graph.blocks), len(graph.components)
        self._of_node = np.full(len(table.costs), self.num_blocks + self.num_components, dtype=np.intp)
        groups = [part.nodes for part in graph.blocks] + [part.nodes for part in graph.components]
        for number, nodes in enumerate(groups):
            self._of_node[[table.position[name] for name in nodes]] = number

    @property
    def are_frozen(self) -> NDArray[np.bool_]:
        """Of every node, whether it is a component's."""
        return (self._of_node >= self.num_blocks) & (self._of_node < self.num_blocks + self.num_components)

    def sums(self, values: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The sum of each block and of each component."""
        sums = np.bincount(self._of_node, values, self.num_blocks + self.num_components + 1).tolist()
        return tuple(sums[: self.num_blocks]), tuple(sums[self.num_blocks : -1])

    def most(self, values: Floats) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The largest value of each block and of each component."""
        found = np.zeros(self.num_blocks + self.num_components + 1)
        np.maximum.at(found, self._of_node, values)
        whole = tuple(map(int, found))
        return whole[: self.num_blocks], whole[self.num_blocks : -1]


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
        weights.append(Weight(name, *sizes, bool(nodes[0].meta["requires_grad"]), *_readers(nodes, graph)))
    return tuple(weights)


def _given(captured: Capture, graph: BlockGraph) -> tuple[Given, ...]:
    nodes = [n for n in captured.graph.find_nodes(op="placeholder") if n.meta["kind"] not in STATE_KINDS]
    return tuple(Given(node.name, _tensor_bytes(node), *_readers([node], graph)) for node in nodes)


def _readers(nodes: Sequence[fx.Node], graph: BlockGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks and components that read any of these, directly or through local operations of their own."""
    pending, seen, owners = list(nodes), set(nodes), set[Owner]()
    while pending:
        for user in pending.pop().users:
            if user.name in graph.owners:
                owners.add(graph.owners[user.name])
            elif user not in seen:
                seen.add(user)
                pending.append(user)
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
            num_bytes.append(_tensor_bytes(nodes[edge.name]))
            makers.append(edge.producer)
        for consumer in edge.consumers:
            if isinstance(consumer, int):
                read[consumer].add(value)
    of_blocks = tuple(maker if isinstance(maker, int) else None for maker in makers)
    return Values(tuple(num_bytes), of_blocks, tuple(map(frozenset, kept)), tuple(map(frozenset, read)))


def _tensor_bytes(node: fx.Node) -> sympy.Expr:
    value = node.meta["val"]
    return sympy.Mul(value.dtype.itemsize, *(expression(size) for size in value.shape))
