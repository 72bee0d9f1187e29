"""Graph rewrites that let micro-batches add up, each equal to what it replaces.

cross_entropy(x, y)              ->   cross_entropy(x, y, reduction="sum") / (y != ignore_index).sum()
squeeze(x)                       ->   squeeze(x, dims of size 1)          a micro-batch of one keeps its batch
ones_like(h)                     ->   full([b, 8], 1)                     what no weight has a part in; h, too, where
                                                                          nothing else reads it
(w*l).sum()/w.sum() + d.mean()   ->   ... + d.mean() * (b / B)            two sums over micro-batches
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.reach import reached
from fxpipe.capture.sizes import is_symbolic
from fxpipe.plan.block_graph import is_size
from passes.batch.layout import RuleCall
from passes.operations import operation_name

aten = torch.ops.aten
_SUM, _MEAN = 2, 1
_FILLED = {
    "zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1, "full_like": None, "new_full": None,
    "empty_like": 0, "new_empty": 0,
}  # fmt: skip
_CLASS_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")


def prepare(graph: fx.Graph, depends: set[fx.Node]) -> None:
    """The rewrites that need no layout; `depends` are the nodes that depend on a parameter."""
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        call = RuleCall(node, {})
        if call.name == "squeeze":
            _squeeze_named(graph, node)
        elif call.name in _FILLED and node.args[0] in depends:
            _fill_alone(graph, node, call)
        elif call.name in _CLASS_LOSSES and call.arguments["reduction"] == _MEAN:
            targets = [n for n in call.tensors("target", "weight") if n in depends]
            if not targets and not call.arguments["target"].meta["val"].is_floating_point():
                _divide_by_count(graph, node, call.arguments)
    _drop_sized(graph)


def _drop_sized(graph: fx.Graph) -> None:
    """What is read for its size alone is not computed: that is a number of the batch."""
    (output,) = graph.find_nodes(op="output")
    needed = set(reached([output], lambda node: [] if is_size(node.meta.get("val")) else node.all_input_nodes))
    for node in reversed(graph.find_nodes(op="call_function", target=aten.sym_size.int)):
        if node.args[0] not in needed and node.args[0].op == "call_function":
            known = {node: node.meta["val"]}
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n, known=known: known.get(n, n))  # type: ignore[misc]
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "call_function")


def _squeeze_named(graph: fx.Graph, node: fx.Node) -> None:
    value: Any = node.args[0]
    shape = value.meta["val"].shape
    named: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = sorted(d % len(shape) for d in ([named] if isinstance(named, int) else named)) if shape else []
    if not any(is_symbolic(shape[d]) for d in dims):
        return
    with graph.inserting_before(node):
        ones = [d for d in dims if not is_symbolic(shape[d]) and shape[d] == 1]
        new = add(graph, aten.squeeze.dims, (value, ones), node)
    replace(graph, node, new)


def _fill_alone(graph: fx.Graph, node: fx.Node, call: RuleCall) -> None:
    """Without the value that lends its shape and type: what is made of it may then be computed on the whole batch."""
    value, source = node.meta["val"], node.args[0]
    number = _FILLED[call.name]
    fill = call.arguments["fill_value"] if number is None else number
    with graph.inserting_before(node):
        sizes = call.arguments.get("size") or [
            add(graph, aten.sym_size.int, (source, dim), node, size) if is_symbolic(size) else size
            for dim, size in enumerate(value.shape)
        ]
        options = {"dtype": value.dtype, "device": value.device}
        new = add(graph, aten.full.default, (sizes, fill), node, value, options)
    replace(graph, node, new)


def _divide_by_count(graph: fx.Graph, node: fx.Node, arguments: Mapping[str, Any]) -> None:
    """The mean of a class loss divides by the number (with weights: the sum of weights) of targets not ignored."""
    target, weight, ignored = arguments["target"], arguments["weight"], arguments["ignore_index"]
    with graph.inserting_before(node):
        counted = add(graph, aten.ne.Scalar, (target, ignored), node)
        if weight is not None:
            skipped = add(graph, aten.eq.Scalar, (target, ignored), node)
            classes = add(graph, aten.masked_fill.Scalar, (target, skipped, 0), node)
            weights = add(graph, aten.index.Tensor, (weight, [classes]), node)
            counted = add(graph, aten.mul.Tensor, (weights, counted), node)
        count = add(graph, aten.sum.default, (counted,), node)
        given = list({**arguments, "reduction": _SUM}.values())
        total = add(graph, node.target, tuple(given), node)
        total.meta["requires_grad"] = node.meta["requires_grad"]
        mean = add(graph, aten.div.Tensor, (total, count), node)
    replace(graph, node, mean)


def share(graph: fx.Graph, at: fx.Node, like: torch.Tensor, source: fx.Node) -> fx.Node:
    """b/B, which is 1 on the whole batch: B is a value made on the whole batch, b the size of an input, `source`."""
    samples = add(graph, aten.sym_size.int, (source, 0), at, source.meta["val"].shape[0])
    options = {"dtype": like.dtype, "device": like.device}
    whole = add(graph, aten.full.default, ([], samples), at, like.new_empty(()), options)
    return add(graph, aten.mul.Tensor, (add(graph, aten.reciprocal.default, (whole,), at), samples), at)


def scale_terms(graph: fx.Graph, node: fx.Node, powers: Sequence[int], source: fx.Node) -> None:
    """Multiply each term of the sum `node` by (b/B)**power, so that all become sums over micro-batches; or each input
    of an autograd function of the model's own."""
    place = 2 if operation_name(node.target) == "own_gradient" else 0
    listed = isinstance(node.args[place], list | tuple)  # of stack and cat
    terms: Any = node.args[place] if listed else node.args[:2]
    scaled = []
    with graph.inserting_before(node):
        for term, power in zip(terms, powers, strict=True):
            for _ in range(power):
                like = (term if place else node).meta["val"]
                factor = share(graph, node, like, source)
                requires_grad = isinstance(term, fx.Node) and term.meta["requires_grad"]
                term = add(graph, aten.mul.Tensor, (factor, term), node)
                term.meta["requires_grad"] = requires_grad
            scaled.append(term)
    node.args = (*node.args[:place], scaled, *node.args[place + 1 :]) if listed else (*scaled, *node.args[2:])
    if not listed:
        node.target = getattr(aten, RuleCall(node, {}).name).Tensor  # a scaled constant is a tensor


def replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    new.meta["requires_grad"] = old.meta["requires_grad"]
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def add(
    graph: fx.Graph, target: Any, args: Any, at: fx.Node, value: Any = None, kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """A node of the same module and regions as `at`, without gradient; its fake value is computed unless given."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = {**at.meta, "requires_grad": False}
    if value is None:
        tensors = [n.meta["val"] for n in (at, *node.all_input_nodes) if isinstance(n.meta["val"], torch.Tensor)]
        value = private.fake_result(target, args, kwargs or {}, tensors[0])
    node.meta["val"] = value
    return node
