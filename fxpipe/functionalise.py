"""Rewrite in-place operations as functional ones.

    y = slice(x, 0, 0, 1)              y = slice(x, 0, 0, 1)
    z = mul_(y, 2)             ->      z = mul(y, 2)
    w = add(x, 1)                      x1 = slice_scatter(x, z, 0, 0, 1)
                                       w = add(x1, 1)

A write into a view is carried back to its base through the view's inverse; every later reader of the base or of another
view of it reads the new value. What has no inverse here is refused, with its place.
"""

from typing import Any

import torch
from torch import fx

from fxpipe.errors import CaptureError

aten = torch.ops.aten
_SCATTER = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_RESHAPING = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten._unsafe_view.default}
_SELF_INVERSE = {aten.transpose.int, aten.alias.default, aten.detach.default}
_VIEWS = {*_SCATTER, *_RESHAPING, *_SELF_INVERSE, aten.permute.default, aten.expand.default, aten.split.Tensor,
          aten.chunk.default, aten.unbind.int, aten.flatten.using_ints, aten.expand_as.default, aten.view_as.default,
          aten.t.default, aten.numpy_T.default, aten.movedim.int, aten.squeeze.default, aten.unflatten.int,
          aten.narrow.default, aten.contiguous.default, aten.to.dtype}  # fmt: skip


def run(graph: fx.Graph) -> None:
    """Make `graph` functional in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.is_mutable:
                _rewrite(graph, node)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    written = [a for a, arg in zip(node.args, node.target._schema.arguments, strict=False) if _writes(arg)]  # type: ignore[union-attr]
    functional = _functional_target(node)
    if functional is None or len(written) != 1 or written[0] is not node.args[0]:
        raise _refusal(node, "no functional form of this in-place operation is known")
    base = node.args[0]
    assert isinstance(base, fx.Node)
    with graph.inserting_before(node):
        args = (base, *node.args[1:])
        new = graph.call_function(functional, args, dict(node.kwargs))
        new.meta = dict(node.meta)
        if functional is aten.copy.default:
            new.meta["val"] = base.meta["val"]
    node.replace_all_uses_with(new)
    _carry_back(graph, node, base, new)
    graph.erase_node(node)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _functional_target(node: fx.Node) -> Any:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target.overloadpacket.__name__.removesuffix("_")
    packet = getattr(aten, name, None)
    for overload in (target._overloadname, "default"):
        found = getattr(packet, overload, None) if packet is not None else None
        if found is not None and not found._schema.is_mutable:
            return found
    return None


def _carry_back(graph: fx.Graph, node: fx.Node, written: fx.Node, new: fx.Node) -> None:
    """Readers after `node` of the written value, of its base and of other views of it must see the write."""
    base, value, point = written, new, node
    while base.op == "call_function" and base.target in _VIEWS:
        with graph.inserting_before(point):
            value = _inverse(graph, base, value)
        base = base.args[0]  # type: ignore[assignment]
    _redirect(graph, point, written, new)
    if base is not written:
        if base.op == "placeholder" and base.meta.get("kind") != "constant":
            raise _refusal(node, f"it writes into {base.name!r}, which belongs to the caller; clone it first")
        _redirect(graph, point, base, value)
    _refuse_other_views(graph, node, base, written)


def _inverse(graph: fx.Graph, view: fx.Node, value: fx.Node) -> fx.Node:
    base: Any = view.args[0]
    if view.target in _SCATTER:
        inverse = graph.call_function(_SCATTER[view.target], (base, value, *view.args[1:]), dict(view.kwargs))
    elif view.target in _RESHAPING:
        inverse = graph.call_function(aten.reshape.default, (value, _shape(graph, base)))
    elif view.target in _SELF_INVERSE:
        inverse = graph.call_function(view.target, (value, *view.args[1:]))  # type: ignore[arg-type]
    elif view.target is aten.permute.default:
        order = list(view.args[1])  # type: ignore[arg-type]
        inverse = graph.call_function(aten.permute.default, (value, [order.index(i) for i in range(len(order))]))
    else:
        raise _refusal(view, "an in-place write through this view has no functional form here; write out of place")
    inverse.meta = {**view.meta, "val": base.meta["val"]}
    return inverse


def _shape(graph: fx.Graph, node: fx.Node) -> list[Any]:
    sizes: list[Any] = []
    for dim, size in enumerate(node.meta["val"].shape):
        if isinstance(size, int):
            sizes.append(size)
            continue
        symbol = graph.call_function(aten.sym_size.int, (node, dim))
        symbol.meta = {**node.meta, "val": size}
        sizes.append(symbol)
    return sizes


def _redirect(graph: fx.Graph, point: fx.Node, old: fx.Node, new: fx.Node) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    for user in list(old.users):
        if order[user] > order[point]:
            user.replace_input_with(old, new)


def _refuse_other_views(graph: fx.Graph, node: fx.Node, base: fx.Node, written: fx.Node) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    pending = [u for u in base.users if u.target in _VIEWS and u is not written]
    while pending:
        view = pending.pop()
        if order[view] > order[node]:
            continue
        for user in view.users:
            if user.target in _VIEWS and user is not written:
                pending.append(user)
            if order[user] > order[node] and view is not written and not _feeds(view, written):
                raise _refusal(node, f"{view.name!r}, another view of what it writes, is read later; write out of place")


def _feeds(view: fx.Node, written: fx.Node) -> bool:
    node = written
    while node.op == "call_function" and node.target in _VIEWS:
        if node is view:
            return True
        node = node.args[0]  # type: ignore[assignment]
    return False


def _refusal(node: fx.Node, why: str) -> CaptureError:
    path = node.meta.get("path") or "(the model itself)"
    return CaptureError(f"module {path}: {node.target}: {why}")
