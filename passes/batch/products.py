"""Products that sum over shared dimensions: none of these may be the batch."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.batch.layout import BatchLayout, Mixed, Result, RuleCall, State, batch_dims, factor
from passes.batch.rules import broadcast, moved, no_batch_numbers, shapes_of, spatial, trailing
from passes.operations import einsum_labels, matrix_labels

Labels = list[Any]


def contract(call: RuleCall, terms: Sequence[tuple[fx.Node, Labels]], out: Labels) -> State:
    """The state of a product that sums over the labels not in `out`; its layout counts dimensions from the end.

    A sum over the batch is a sum over micro-batches, where every factor that has the batch holds it alike.
    """
    places = {(labels[at.dim], at.outer, at.inner) for node, labels in terms if (at := call.layout(node)) is not None}
    if not places:
        return State()
    label, outer, inner = next(iter(places))
    if len(places) != 1:
        raise Mixed("it multiplies samples of the batch with one another")
    for node, labels in terms:
        if call.layout(node) is None and label in labels and node.meta["val"].shape[labels.index(label)] != 1:
            raise Mixed("it combines the batch with another dimension of the same size")
    if label not in out:
        return State(form="partial")
    return State(BatchLayout(out.index(label) - len(out), outer, inner))


def matmul(call: RuleCall) -> list[Result]:
    no_batch_numbers(call)
    *bias, a, b = call.operands
    first, second, out = matrix_labels(a.meta["val"].ndim, b.meta["val"].ndim)
    state = contract(call, [(a, first), (b, second)], out)
    if state.form == "partial":
        if bias:
            raise Mixed("it adds to a sum over the batch")
        return [state]
    layout = state.layout
    product = [] if layout is None else [([2] * len(out), layout.at(layout.dim + len(out)))]
    return moved(call, broadcast([*shapes_of(call, bias), *product]))


def einsum(call: RuleCall) -> list[Result]:
    nodes = call.operands
    labels, out = einsum_labels(call.arguments["equation"], [node.meta["val"].ndim for node in nodes])
    state = contract(call, list(zip(nodes, labels, strict=True)), out)
    return [state] if state.layout is None else moved(call, state.layout)


def attention(call: RuleCall) -> list[Result]:
    no_batch_numbers(call)
    query, key, value, *mask = call.operands
    lead: Labels = [("lead", j) for j in range(max(n.meta["val"].ndim for n in call.operands) - 2, 0, -1)]
    last = zip([query, key, value, *mask], ("le", "se", "sv", "ls"), strict=False)
    terms = [(node, [*lead, *two][-node.meta["val"].ndim :]) for node, two in last]
    layout = contract(call, terms, [*lead, "v"]).layout
    if layout is None or layout.dim == -1:
        raise Mixed("it attends over the batch")
    return moved(call, layout)


def cdist(call: RuleCall) -> list[Result]:
    a, b = call.operands
    first, second, out = matrix_labels(a.meta["val"].ndim, b.meta["val"].ndim)
    layout = contract(call, [(a, first), (b, [*second[:-2], "m", "k"])], out).layout
    if layout is None:
        raise Mixed("it measures distances along the batch")
    return moved(call, layout)


def convolution_backward(call: RuleCall) -> list[Result]:
    """Derivatives of a convolution of samples: by its input each sample's own, by its weights a sum over samples."""
    weight = next(call.tensors("weight"))
    layouts = {call.layout(node) for node in call.tensors("grad_output", "input")}
    if call.layout(weight) is not None or layouts != {BatchLayout(0)}:
        raise Mixed("it combines the entries of a dimension that is, or has, the batch")
    by_input, *by_weights = call.arguments["output_mask"]
    sums = (State(form="partial") if asked else State() for asked in by_weights)
    return [(State(BatchLayout(0)) if by_input else State(), *sums)]


def solve(call: RuleCall) -> list[Result]:
    """Systems of equations: matrices in the last two dimensions, right sides there or vectors in the last one."""
    no_batch_numbers(call)
    matrix = next(call.tensors("A", "LU", "self"))
    shapes = []
    for node in call.operands:
        shape, layout = node.meta["val"].shape, call.layout(node)
        vectors = node is not matrix and (len(shape) == 1 or list(shape) == list(matrix.meta["val"].shape[:-1]))
        lead = shape[: -1 if vectors else -2]
        if layout is not None and layout.dim >= len(lead):
            raise Mixed("it solves one system over the batch")
        shapes.append((lead, layout))
    return moved(call, broadcast(shapes))


def convolution(call: RuleCall) -> list[Result]:
    """A convolution of every sample; or of all as groups of one, which gives each weights of its own.

    x.view(1, B*C, H, W), weight [B*K, C, k, k], groups=B   ->   [1, B*K, H, W]
    """
    groups, (value, *weights) = factor(call.number("groups")), call.operands
    if groups == 0:
        return trailing(lambda call, ndim: spatial(call, ndim) + 1)(call)
    no_batch_numbers(call, "groups")
    channels = value.meta["val"].ndim - spatial(call, 0) - 1
    for node, dim in ((value, channels), *((weight, 0) for weight in weights)):
        layout = call.layout(node)
        if groups is None or layout is None or (layout.dim, layout.outer) != (dim, 1) or layout.inner % groups:
            raise Mixed("its groups are not those of the samples", "view all samples as [1, batch * channels, ...]")
    ((_, found),) = batch_dims(call.node.meta["val"])
    return [State(BatchLayout(channels, 1, found))]
