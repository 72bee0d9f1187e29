"""The joint graph of a stage, forward and backward in one trace, and how it is cut.

    y = conv(x, w)                          forward(x)          -> y, saved=(x, y)
    z = silu(y)                    ->       backward(saved, gz) -> gx, (gw,)
    gy = silu_backward(gz, y)               backward_input(saved, gz) -> gx, kept=(gy, x)
    gx, gw = convolution_backward(gy, ...)  backward_weight(kept)     -> (gw,)

Dataflow alone decides: what the outputs need is forward, what input gradients need is backward_input, the rest
backward_weight. A convolution's backward, which gives both gradients at once, becomes two for that.
"""

import operator
import warnings
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe import ops, private
from passes.lowering.units import Value

aten = torch.ops.aten

# Operations that insist on the memory format of their first arguments.
_NEEDS_CONTIGUOUS = {aten.native_group_norm.default: 1, aten.native_group_norm_backward.default: 2}


class Joint:
    """A stage's forward and backward in one trace, and how it is cut.

    `outputs`, `input_grads`, `weight_grad_nodes` are the nodes it returns; `made_forward` holds every node that the
    forward computes, `tangents` the nodes that stand for incoming gradients.
    """

    def __init__(self, graph: fx.Graph, returns: tuple[Value, ...], weight_grads: tuple[str, ...]) -> None:
        self.graph, self.returns, self.weight_grads = graph, returns, weight_grads
        (output,) = graph.find_nodes(op="output")
        self.outputs, self.tangents, self.input_grads, self.weight_nodes = (list(part) for part in output.args[0])
        self.has_backward = bool(self.input_grads or self.weight_nodes)
        self.reads = [n for n in graph.nodes if n.op == "placeholder"]
        for node, value in zip(self.tangents, (v for v in returns if v.requires_grad), strict=True):
            private.rename(node, f"grad_{value.name}")
        for node, name in zip(self.weight_nodes, weight_grads, strict=True):
            private.rename(node, f"grad_{name.replace('.', '_')}")
        self.made_forward = _ancestors(self.outputs) | set(self.reads)
        for node in graph.nodes:
            if node.target is operator.getitem and node.args[0] in self.made_forward:
                self.made_forward.add(node)

    def forward(self, recompute: bool) -> tuple[fx.Graph, list[fx.Node]]:
        """forward(reads) -> (returns, saved); the saved nodes in order.

        With `recompute` only what came in is saved: the backward, which takes what it needs from the saved values,
        makes the rest again.
        """
        wanted = _ancestors([*self.input_grads, *self.weight_nodes])
        if recompute:
            saved = [n for n in self.reads if n in wanted]
            return _extract(self.graph, self.reads, (self.outputs, saved)), saved
        used = {a for n in wanted - self.made_forward for a in n.all_input_nodes}
        saved = [n for n in self.graph.nodes if n in used and n in self.made_forward and n.op != "get_attr"]
        saved = [n for n in saved if n not in self.tangents]
        return _extract(self.graph, self.reads, (self.outputs, saved)), saved

    def backward(self, saved: list[fx.Node]) -> fx.Graph:
        """backward(saved, tangents) -> (input gradients, weight gradients)."""
        return _extract(self.graph, self.tangents, (self.input_grads, self.weight_nodes), saved)

    def backward_input(self, saved: list[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
        """backward_input(saved, tangents) -> (input gradients, kept); the kept nodes in order."""
        _split_convolution_backward(self.graph)
        given = set(saved) | set(self.tangents)
        made_input = _ancestors(self.input_grads, stop=given) | given
        late = _ancestors(self.weight_nodes, stop=made_input) - made_input
        used = {a for n in late for a in n.all_input_nodes} | (set(self.weight_nodes) & made_input)
        kept = [n for n in self.graph.nodes if n in used and n in made_input and n.op != "get_attr"]
        return _extract(self.graph, self.tangents, (self.input_grads, kept), saved), kept

    def backward_weight(self, kept: list[fx.Node]) -> fx.Graph:
        """backward_weight(kept) -> (weight gradients,)."""
        return _extract(self.graph, [], (self.weight_nodes,), kept)


def prepare(graph: fx.Graph, state: Sequence[str], reads: Sequence[Value], parts: Sequence[int]) -> fx.Graph:
    """State becomes attributes, reads get their names, the flat output its four parts."""
    placeholders = graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, state, strict=False):
        with graph.inserting_before(node), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph has no owner yet that could hold the attribute
            attribute = graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    for node, value in zip(placeholders[len(state) :], reads, strict=True):
        private.rename(node, value.name)
    (output,) = graph.find_nodes(op="output")
    nodes = iter(pytree.tree_leaves(output.args[0]))
    output.args = (tuple([next(nodes) for _ in range(size)] for size in parts),)
    _tidy(graph)
    _harden_strides(graph)
    return graph


def _harden_strides(graph: fx.Graph) -> None:
    """Make the graph independent of strides of dimensions of size one, which real and traced tensors need not share.

    A kernel that was traced on a channels-last input would refuse the same data with another idle stride.
    """
    for node in list(graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        for argument in node.args[: _NEEDS_CONTIGUOUS.get(node.target, 0)]:
            value = argument.meta["val"]
            if value.stride() != torch.empty(value.shape, device="meta").stride():
                with graph.inserting_before(node):
                    copy = graph.call_function(aten.contiguous.default, (argument,))
                copy.meta = {**argument.meta, "val": value.contiguous()}
                node.replace_input_with(argument, copy)


def _tidy(graph: fx.Graph) -> None:
    """Drop the aliases autograd leaves behind, and give every returned weight gradient memory of its own."""
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    outputs, tangents, input_grads, weight_grads = output.args[0]
    seen: set[fx.Node] = {*outputs, *tangents, *input_grads}
    owned = []
    for node in weight_grads:
        # Weight gradients are accumulated in place: one that shares memory with another value is copied first.
        if node in seen or _may_share(node):
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta, node = dict(node.meta), copy
        seen.add(node)
        owned.append(node)
    output.args = ((outputs, tangents, input_grads, owned),)


def _may_share(node: fx.Node) -> bool:
    """Whether a node's memory may be another value's. Of several results (a tuple) each has its own; a list may not."""
    if node.target is operator.getitem:
        (node,) = node.all_input_nodes
        if not isinstance(node.meta["val"], tuple):
            return True
    return node.op != "call_function" or private.may_alias(node.target)


def _split_convolution_backward(graph: fx.Graph) -> None:
    """One node that gives the input's and the weight's gradient becomes two, so that they can run apart."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        mask = node.args[-1]
        if not mask[0] or not (mask[1] or mask[2]):
            continue
        with graph.inserting_before(node):
            parts = []
            for name, part in (("input", [True, False, False]), ("weight", [False, *mask[1:]])):
                args, name = (*node.args[:-1], part), f"{node.name}_{name}"
                parts.append(graph.create_node("call_function", node.target, args, name=name))
                parts[-1].meta = dict(node.meta)
        for user in list(node.users):
            user.replace_input_with(node, parts[0] if user.args[1] == 0 else parts[1])
        graph.erase_node(node)


def _ancestors(nodes: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = [n for n in nodes if n not in stop]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [a for a in node.all_input_nodes if a not in stop]
    return found


def _extract(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    outputs: tuple[Sequence[fx.Node], ...],
    packed: Sequence[fx.Node] | None = None,
) -> fx.Graph:
    """The part of `graph` between inputs and outputs as a graph of its own, attributes read where needed.

    Values in `packed` come first, in one list that is emptied, so that each is freed after its last use.
    """
    cut = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    saved = None if packed is None else cut.placeholder("saved")
    for node in inputs:
        env[node] = cut.placeholder(node.name)
        env[node].meta = dict(node.meta)
    if packed is not None:
        for i, node in enumerate(packed):
            env[node] = cut.create_node("call_function", operator.getitem, (saved, i), name=node.name)
            env[node].meta = dict(node.meta)
        cut.call_function(ops.release, (saved,))
    wanted = _ancestors([n for part in outputs for n in part], stop=env)
    for node in graph.nodes:
        if node in wanted:
            assert node.op in ("call_function", "get_attr"), f"{node.name} is not available in this part"
            env[node] = cut.node_copy(node, lambda n: env[n])
    cut.output(tuple([env[n] for n in part] for part in outputs))
    return cut
