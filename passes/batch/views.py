"""Views, copies and joins: where the samples of a batch go when a value changes shape."""

import math

import torch

from passes.batch.layout import BatchLayout, Mixed, Result, RuleCall, State, batch_dims, factor, splits
from passes.batch.rules import aligned, along, broadcast, moved, no_batch_numbers, shapes_of
from passes.operations import dimension


def view(call: RuleCall) -> list[Result]:
    """Same elements in the same order: the batch goes where as many entries lie before and after it; without any,
    anywhere."""
    node = call.operands[0]
    layout, shape = call.layout(node), node.meta["val"].shape
    if layout is None:
        raise Mixed("it gives a batch dimension to a value without one")
    before = math.prod(int(s) for s in shape[: layout.dim]) * layout.outer
    after = math.prod(int(s) for s in shape[layout.dim + 1 :]) * layout.inner
    out = call.node.meta["val"].shape
    ((dim, k),) = _one_batch_dim(call.node.meta["val"])
    if not before * after:
        return uniform(call)
    outer, rest = divmod(before, math.prod(int(s) for s in out[:dim]))
    inner, rest2 = divmod(after, math.prod(int(s) for s in out[dim + 1 :]))
    if rest or rest2 or outer * inner != k:
        raise Mixed("its result puts parts of several samples into one")
    return [State(BatchLayout(dim, outer, inner))]


def _one_batch_dim(value: torch.Tensor) -> list[tuple[int, int]]:
    dims = batch_dims(value)
    if len(dims) != 1:
        raise Mixed(f"its result has the batch in {len(dims)} dimensions")
    return dims


def uniform(call: RuleCall) -> list[Result]:
    """A value that is constant along its batch dimension: any layout of it is right."""
    ((dim, k),) = _one_batch_dim(call.node.meta["val"])
    return [State(layout) for layout in splits(dim, k)]


def factory(call: RuleCall) -> list[Result]:
    no_batch_numbers(call, "size")
    return uniform(call) if batch_dims(call.node.meta["val"]) else [State()]


def expand(call: RuleCall) -> list[Result]:
    node = call.operands[0]
    layout, value = call.layout(node), node.meta["val"]
    if layout is None:
        return uniform(call)
    ((dim, _),) = _one_batch_dim(call.node.meta["val"])
    if dim - call.node.meta["val"].ndim != layout.dim - value.ndim:
        raise Mixed("it expands another dimension to the batch size")
    return moved(call, layout)


def broadcast_tensors(call: RuleCall) -> list[Result]:
    return moved(call, broadcast(shapes_of(call, call.operands)))


def repeat(call: RuleCall) -> list[Result]:
    """`repeat` and `tile`: entry j of a dimension of size n, repeated r times, is at j, n + j, 2n + j, ..."""
    node, out = call.operands[0], call.node.meta["val"]
    layout, shape = call.layout(node), [1] * (out.ndim - node.meta["val"].ndim) + list(node.meta["val"].shape)
    ((dim, k),) = _one_batch_dim(out)
    if layout is None:
        size = int(shape[dim])
        return [State(BatchLayout(dim, s.outer, s.inner * size)) for s in splits(dim, k // size)]
    if layout.dim + out.ndim - node.meta["val"].ndim != dim:
        raise Mixed("it repeats another dimension by the batch size")
    return [State(BatchLayout(dim, k // layout.inner, layout.inner))]


def repeat_interleave(call: RuleCall) -> list[Result]:
    """Entry j repeated r times is at j*r, ..., j*r + r - 1."""
    node, out = call.operands[0], call.node.meta["val"]
    layout, dim = call.layout(node), call.arguments.get("dim")
    if list(call.tensors("self")) != call.operands or (dim is None and node.meta["val"].ndim != 1):
        raise Mixed("it repeats entries by numbers in a tensor, or of a flattened value", "name dim and a number")
    ((at, k),) = _one_batch_dim(out)
    if layout is None:
        size = int(node.meta["val"].shape[at])
        return [State(BatchLayout(at, size * s.outer, s.inner)) for s in splits(at, k // size)]
    if layout.dim != at:
        raise Mixed("it repeats another dimension by the batch size")
    return [State(BatchLayout(at, layout.outer, k // layout.outer))]


def cat(call: RuleCall) -> list[Result]:
    no_batch_numbers(call)
    nodes = [n for n in call.operands if list(n.meta["val"].shape) != [0]]
    dim = dimension(call.arguments["dim"], nodes[0].meta["val"].ndim)
    layouts = [call.layout(n) for n in nodes]
    if not all(layout is not None and layout.dim == dim for layout in layouts):
        layout = aligned(call, nodes)
        return moved(call, layout)
    if len({layout.inner for layout in layouts if layout}) != 1:
        raise Mixed("it joins values that hold the batch in different orders")
    outer = sum(layout.outer for layout in layouts if layout)
    return moved(call, BatchLayout(dim, outer, layouts[0].inner if layouts[0] else 1))


def pieces(call: RuleCall) -> list[Result]:
    """`split`, `chunk`, ...: along the batch, pieces must be whole copies of it."""
    node, *points = call.operands
    layout, dim = call.layout(node), call.arguments.get("dim", 0)
    if points:
        raise Mixed("it splits at points in a tensor", "split at numbers")
    dim = dimension(dim, node.meta["val"].ndim)
    if layout is None or layout.dim != dim:
        return along(call)
    results = []
    for piece in call.node.meta["val"]:
        sizes = [k for d, k in batch_dims(piece) if d == dim]
        results.append(State(_whole_copies(layout, 0, sizes[0] if sizes else 0)))
    return [tuple(results)]


def cut(call: RuleCall) -> list[Result]:
    """`slice` and `narrow`."""
    (node,) = call.operands
    layout, dim = call.layout(node), dimension(call.arguments["dim"], node.meta["val"].ndim)
    if layout is None or layout.dim != dim:
        return along(call)
    start = factor(call.number("start") or 0)
    if start is None or (start == 0 and call.number("start") not in (0, None)) or call.arguments.get("step", 1) != 1:
        raise Mixed("it picks some samples of the batch")
    sizes = [k for d, k in batch_dims(call.node.meta["val"]) if d == dim]
    return [State(_whole_copies(layout, start, sizes[0] if sizes else 0))]


def _whole_copies(layout: BatchLayout, start: int, size: int) -> BatchLayout:
    if size == 0 or size % layout.inner or start % layout.inner:
        raise Mixed("it picks some samples of the batch")
    return BatchLayout(layout.dim, size // layout.inner, layout.inner)
