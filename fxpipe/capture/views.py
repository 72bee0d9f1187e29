"""Views: which values show one memory, and the base's new value after a view of it was given a new value.

v = slice(x, 1, 0, 2)     x' = slice_scatter(x, v', 1, 0, 2)
v = view(x, [-1])         x' = reshape(v', shape of x)
v = transpose(x, 1, 2)    x' = transpose(v', 1, 2)
_, v = split(x, 2)        x' = slice_scatter(x, v', 0, 2, 4)
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.draws import passes_through

aten = torch.ops.aten
# Operations that return a view where one is possible, else a copy.
_PERHAPS_VIEWS = ("reshape", "reshape_as", "contiguous", "to", "flatten", "ravel", "type_as")
_RESHAPING = (
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as", "ravel",
    "unsqueeze_", "squeeze_",
)  # fmt: skip
_SWAPPING = ("transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT", "matrix_H", "transpose_", "t_", "swapaxes_")
_SCATTERED = {
    "slice": aten.slice_scatter.default,
    "select": aten.select_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
}
_PIECES = ("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")


def shows(node: fx.Node, made_by: fx.Node, argument: fx.Node, storages: set[int], root: fx.Node) -> bool:
    """Whether the value `node` shows the memory of an argument of the operation `made_by` that it is a result of.

    Export gives memory a new identity where an operation returns what it got, and to constants: `storages` are all
    identities of the argument's memory, `root` is the node that made it.
    """
    one, other = (private.first_tensor(n.meta.get("val")) for n in (node, argument))
    name = private.packet_name(made_by.target)
    if one is None or other is None or name == "lift_fresh_copy":
        return False
    inactive = passes_through(made_by)
    if not inactive and name not in _PERHAPS_VIEWS and private.may_alias(made_by.target):
        return True
    if private.storages(node) & storages:
        return True
    if (not inactive and name not in _PERHAPS_VIEWS) or private.argument(made_by, "copy"):
        return False
    try:
        same = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    except private.VALUE_ERRORS:  # of sizes that depend on values, which are refused
        same = False
    constant = root.meta.get("kind") == "constant"
    return same or (constant and one.dtype == other.dtype)


def inverse(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    """A node for the base's new value; None where the view has no inverse here.

    Args:
        view: the view as it was first made, in `graph`, of an earlier value of the base.
        base, value: the base's present value, the view's new value.
    """
    if view.target is operator.getitem:
        return _piece(graph, view, base, value)
    name = private.packet_name(view.target)
    if name in _RESHAPING:
        return graph.call_function(aten.reshape.default, (value, shape_nodes(graph, base)))
    if name in _SWAPPING and not base.meta["val"].is_complex():
        return graph.call_function(view.target, (value, *view.args[1:]))  # type: ignore[arg-type]
    if name in _SCATTERED:
        return _scattered(graph, _SCATTERED[name], base, value, *view.args[1:], **view.kwargs)
    if name in _SPECIAL:
        return _SPECIAL[name](graph, view, base, value)
    # What returns its argument unchanged: detach, a cast to the type it has, an inactive dropout, ...
    one, other = base.meta["val"], view.meta["val"]
    unchanged = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return value if unchanged else None


def _narrow(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    dim, start, length = view.args[1:]
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    start %= int(base.meta["val"].shape[dim])
    return _scattered(graph, aten.slice_scatter.default, base, value, dim, start, start + length)


def _permute(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    count = base.meta["val"].ndim
    order = [dim % count for dim in cast(list[int], view.args[1])]
    return graph.call_function(aten.permute.default, (value, [order.index(dim) for dim in range(count)]))


def _movedim(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    return graph.call_function(view.target, (value, view.args[2], view.args[1]))  # type: ignore[arg-type]


_SPECIAL: dict[str, Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], fx.Node | None]] = {
    "narrow": _narrow,
    "permute": _permute,
    "movedim": _movedim,
    "moveaxis": _movedim,
}


def _piece(graph: fx.Graph, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    cut, index = view.args
    assert isinstance(cut, fx.Node)
    assert isinstance(index, int)
    name = private.packet_name(cut.target)
    at = 1 if name == "unbind" else 2
    dim = cut.args[at] if len(cut.args) > at else cut.kwargs.get("dim", 0)
    if name == "unbind":
        return _scattered(graph, aten.select_scatter.default, base, value, dim, index)
    if name not in _PIECES:
        return None
    sizes = [piece.shape[dim] for piece in cut.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:index])
    return _scattered(graph, aten.slice_scatter.default, base, value, dim, start, start + sizes[index])


def _scattered(
    graph: fx.Graph, target: Any, base: fx.Node, value: fx.Node, dim: Any = 0, *at: Any, **named: Any
) -> fx.Node:
    """The base with the value at some places; of complex ones by their pairs of real ones: torch has no gradient."""
    if not base.meta["val"].is_complex() or target is aten.diagonal_scatter.default:
        return graph.call_function(target, (base, value, dim, *at), named)
    pairs = [_made(graph, aten.view_as_real.default, _made(graph, aten.resolve_conj.default, n)) for n in (base, value)]
    scattered = _made(graph, target, *pairs, dim % base.meta["val"].ndim, *at, **named)
    return graph.call_function(aten.view_as_complex.default, (scattered,))


def _made(graph: fx.Graph, target: Any, of: fx.Node, *args: Any, **named: Any) -> fx.Node:
    node = graph.call_function(target, (of, *args), named)
    node.meta = {"path": of.meta.get("path", ""), "val": private.fake_result(target, node.args, named, of.meta["val"])}
    return node


def shape_nodes(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """A value's shape as arguments of another call: numbers, and nodes where the batch is among them."""
    sizes: list[Any] = []
    for dim, size in enumerate(node.meta["val"].shape):
        if isinstance(size, int):
            sizes.append(size)
            continue
        symbol = graph.call_function(aten.sym_size.int, (node, dim))
        symbol.meta = {"path": node.meta.get("path", ""), "val": size, "requires_grad": False}
        sizes.append(symbol)
    return sizes
