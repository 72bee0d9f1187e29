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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.reach import reached
from fxpipe.plan import ops
from passes.lowering.borders import Border
from passes.lowering.units import Value

aten = torch.ops.aten

# Operations that insist on the memory format of their first arguments.
_NEEDS_CONTIGUOUS = {aten.native_group_norm.default: 1, aten.native_group_norm_backward.default: 2}


@dataclass(frozen=True)
class Recompute:
    """Runs of blocks that the backward computes again, as captured nodes by name; `local` are those that no block owns,
    since every stage computes them for itself."""

    runs: tuple[frozenset[str], ...] = ()
    local: frozenset[str] = frozenset()


class StageGraphs:
    """A unit's forward and backward in one trace, and its graphs, each cut when it is first asked for; those of a
    backward where its border has one. State is read by `get_attr` under its original name; what is gathered comes as a
    last input of each, a list.

    `outputs`, `input_grads`, `weight_nodes` are the nodes the trace returns; `made_forward` holds every node that the
    forward computes, `tangents` the nodes that stand for incoming gradients.
    """

    def __init__(self, graph: fx.Graph, border: Border, recompute: Recompute, gathered: Sequence[str] = ()) -> None:
        self.graph, self.border, self._local, self._gathered = graph, border, recompute.local, gathered
        self._run_of = {name: number for number, names in enumerate(recompute.runs) for name in names}
        (output,) = graph.find_nodes(op="output")
        self.outputs, self.tangents, self.input_grads, self.weight_nodes = (list(part) for part in output.args[0])
        self.reads = [n for n in graph.nodes if n.op == "placeholder"]
        for node, name in zip(self.tangents, border.tangents, strict=True):
            private.rename(node, f"grad_{name}")
        for node, name in zip(self.weight_nodes, border.weight_grads, strict=True):
            private.rename(node, f"grad_{name.replace('.', '_')}")
        self.made_forward = _with_items(graph, _ancestors(self.outputs) | set(self.reads))

    @cached_property
    def again(self) -> set[fx.Node]:
        """The forward's nodes that the backward computes again."""
        return self._cut[1]

    @property
    def saved(self) -> list[fx.Node]:
        return self._cut[0]

    @cached_property
    def forward(self) -> fx.Graph:
        """forward(reads) -> (returns, saved)."""
        return self._extract(self.reads, (self.outputs, self.saved))

    @cached_property
    def backward(self) -> fx.Graph:
        """backward(saved, tangents) -> (input gradients, weight gradients)."""
        return self._extract(self.tangents, (self.input_grads, self.weight_nodes), self.saved, self.again)

    @cached_property
    def backward_input(self) -> fx.Graph:
        """backward_input(saved, tangents) -> (input gradients, kept); what is computed again is so here."""
        return self._extract(self.tangents, (self.input_grads, self._kept), self.saved, self.again)

    @cached_property
    def backward_weight(self) -> fx.Graph:
        """backward_weight(kept) -> (weight gradients,)."""
        return self._extract([], (self.weight_nodes,), self._kept)

    def _extract(
        self,
        inputs: Sequence[fx.Node],
        outputs: tuple[Sequence[fx.Node], ...],
        packed: Sequence[fx.Node] | None = None,
        again: Collection[fx.Node] = (),
    ) -> fx.Graph:
        """The part between inputs and outputs as a graph of its own, attributes read where needed.

        Values in `packed` come first, in one list that is emptied, so that each is freed after its last use. Nodes in
        `again` come right before the first that needs them. Attributes that are gathered come last, in one list.
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
        weights = cut.placeholder("gathered_weights") if self._gathered else None
        places = {name: place for place, name in enumerate(self._gathered)}
        wanted = _ancestors([n for part in outputs for n in part], stop=env)
        for node in _ordered(self.graph, wanted, again, outputs):
            assert node.op in ("call_function", "get_attr"), f"{node.name} is not available in this part"
            if node.op == "get_attr" and node.target in places:
                env[node] = cut.create_node("call_function", operator.getitem, (weights, places[node.target]))
                env[node].meta = dict(node.meta)
                continue
            env[node] = cut.node_copy(node, lambda n: env[n])
        cut.output(tuple([env[n] for n in part] for part in outputs))
        return cut

    @cached_property
    def _kept(self) -> list[fx.Node]:
        """What backward_weight needs of backward_input, in order."""
        self.forward, self.backward  # noqa: B018  are those of the whole backward's operations
        _split_convolution_backward(self.graph)
        given = {*self.saved, *self.tangents}
        made = _with_items(self.graph, _ancestors(self.input_grads, stop=given) | given | self.again)
        late = _ancestors(self.weight_nodes, stop=made) - made
        used = {a for n in late for a in n.all_input_nodes} | (set(self.weight_nodes) & made)
        return [n for n in self.graph.nodes if n in used and n in made and n.op != "get_attr"]

    @cached_property
    def _casts(self) -> set[fx.Node]:
        """Casts of weights, as autocast makes them, and views of these: made again rather than kept, a copy of the
        weights for every micro-batch. So are views of weights that are gathered, which would keep these."""
        weights: set[fx.Node] = {*self.graph.find_nodes(op="get_attr")}
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            given = node.all_input_nodes
            if node.op != "call_function" or node not in self.made_forward or not given:
                continue
            if node.target is aten._to_copy.default and {*given} <= weights | found:
                found.add(node)
            elif private.may_alias(node.target):
                for of in (weights, found):
                    of.update([node] if {*given} <= of else [])
        return {node for node in weights | found if node.op == "call_function"} if self._gathered else found

    @cached_property
    def _cut(self) -> tuple[list[fx.Node], set[fx.Node]]:
        """(What the forward saves, in order, and what the backward computes again from it.)

        A run's own backward takes what comes into the run and computes the rest again; the backward of a block outside
        takes what it reads. What no run owns, since every stage computes it for itself, goes with those who read it.
        """
        gradients = {*self.input_grads, *self.weight_nodes}
        saved = {node for node in gradients & self.made_forward if node.op != "get_attr"}  # an own backward returns it
        of_runs: list[tuple[fx.Node, int]] = []  # values that the backward of a run needs
        again: list[fx.Node] = []
        for node in _ancestors(gradients) - self.made_forward - {*self.tangents}:
            run = self._run_of.get(node.meta.get("origin", "")) if self._run_of else None
            values = [v for v in node.all_input_nodes if v in self.made_forward and v.op != "get_attr"]
            of_runs += [(value, run) for value in values if run is not None]
            again += [value for value in values if value in self._casts]
            saved.update(value for value in values if run is None and value not in self._casts)
        wanted = [*again, *(value for value, _ in of_runs)]
        seen: set[tuple[fx.Node, int]] = set()
        while of_runs:
            value, run = of_runs.pop()
            if value in saved or value in self._casts or value.op == "get_attr" or (value, run) in seen:
                continue
            seen.add((value, run))
            if value.op == "placeholder" or self._run_of.get(origin := value.meta["origin"]) != run:
                if value.op == "placeholder" or origin not in self._local:
                    saved.add(value)
                    continue
            of_runs += [(argument, run) for argument in value.all_input_nodes]
        made = {v for v in _ancestors(wanted, stop=saved) if v.op == "call_function"}
        return [n for n in self.graph.nodes if n in saved], made


def prepare(graph: fx.Graph, state: Sequence[str], reads: Sequence[Value]) -> None:
    """State becomes attributes, reads get their names."""
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
    _tidy(graph)
    _harden_strides(graph)


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
    starts = (node for node in nodes if node not in stop)
    return {*reached(starts, lambda node: [a for a in node.all_input_nodes if a not in stop])}


def _with_items(graph: fx.Graph, made: set[fx.Node]) -> set[fx.Node]:
    """With the results of each of these nodes that gives several: who needs one need not keep them all."""
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in made:
            made.add(node)
    return made


def _ordered(
    graph: fx.Graph, wanted: set[fx.Node], again: Collection[fx.Node], outputs: tuple[Sequence[fx.Node], ...]
) -> Iterator[fx.Node]:
    """The wanted nodes in the graph's order, but each of `again` as late as its readers permit."""
    late = wanted & set(again)
    place = {node: number for number, node in enumerate(graph.nodes)} if late else {}

    def needed(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        starts = (node for node in nodes if node in late)
        found = {*reached(starts, lambda node: [a for a in node.all_input_nodes if a in late])}
        late.difference_update(found)
        yield from sorted(found, key=place.__getitem__)

    for node in graph.nodes:
        if node in wanted and node not in again:
            yield from needed(node.all_input_nodes)
            yield node
    yield from needed(node for part in outputs for node in part)
