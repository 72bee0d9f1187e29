"""What a traced graph computes at a batch size, so that two traces of one computation read the same; and whether two of
its values are made alike.

slice(x, 0, 0, 9223372036854775807), alias(x)     ->   x
clone(x)  where nothing is written                ->   x
slice(x, 1, None, 64)  of 16 entries              ->   x
slice_scatter(x, y, 0, 0, 64)                     ->   y
pad(x, [0, 0, 0, 0])                              ->   x
reshape(x, [2, -1]), view(x, [2, 8])              ->   reshape(x, [2, 8])
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.backwards import GRAPHS, OWN_GRADIENT
from fxpipe.capture.sizes import concrete

aten = torch.ops.aten
_AS_IT_IS = {aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_TO_SHAPE = {*_VIEWS, aten.expand.default}


def computation(
    graph: fx.Graph,
    batch_size: int,
    states: Mapping[str, str] | None = None,
    values: Mapping[fx.Node, str] | None = None,
) -> list[Any]:
    """Every operation with its arguments and shape, other values by number and sizes as numbers; `states` are the
    names of placeholders, `values` what stands for nodes that do not count themselves."""
    named = states or {}
    known: dict[fx.Node, Any] = dict(values or {})
    calls: list[Any] = []
    copies = () if any(private.writes(node) for node in graph.nodes) else (aten.clone.default,)

    def leaf(value: Any) -> Any:
        return known[value] if isinstance(value, fx.Node) else concrete(value, batch_size)

    for node in graph.nodes:
        if node in known:
            continue
        value = node.meta.get("val")
        if node.op == "call_function" and not isinstance(value, torch.Tensor | tuple | list):
            known[node] = concrete(value, batch_size)
            continue
        shape = tuple(concrete(value.shape, batch_size)) if isinstance(value, torch.Tensor) else None
        same = node.args[0] if node.target in copies else _as_it_is(node, shape, batch_size)
        if isinstance(same, fx.Node):
            known[node] = known[same]
            continue
        known[node] = f"%{len(calls)}"
        if node.op == "placeholder":
            calls.append((named.get(node.name, node.meta.get("input", "a constant")), shape))
            continue
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), leaf)
        if node.target in _TO_SHAPE:
            args = (args[0], shape)
        if node.target is OWN_GRADIENT:
            args = (computation(GRAPHS[args[0]], batch_size), *args[1:])
        if node.target is aten.slice.Tensor:
            args, kwargs = _slice(node, args, batch_size), {}
        target = aten.reshape.default if node.target in _VIEWS else node.target
        calls.append((str(target), str(args), str(kwargs), shape))
    return calls


def same_constants(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether two traces of one computation have equal ones, in its order."""
    pairs = zip(some.values(), others.values(), strict=False)
    return len(some) == len(others) and all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)


def _as_it_is(node: fx.Node, shape: Any, batch_size: int) -> fx.Node | None:
    """The argument that an operation gives as it is: rows of all, a padding of none, all rows written."""
    if node.target in _AS_IT_IS:
        return node.args[0]  # type: ignore[return-value]
    if node.target in _TO_SHAPE:
        whole: Any = node.args[0]
        return whole if shape == tuple(concrete(whole.meta["val"].shape, batch_size)) else None
    if node.target is aten.pad.default:
        return None if any(_number(one, batch_size) for one in node.args[1]) else node.args[0]  # type: ignore
    if node.target not in (aten.slice.Tensor, aten.slice_scatter.default):
        return None
    given = private.arguments(node)
    one: Any = node.args[0] if node.target is aten.slice.Tensor else node.args[1]
    value = one.meta["val"]
    same = shape == tuple(concrete(value.shape, batch_size)) and value.dtype == node.meta["val"].dtype
    return one if same and given.get("step", 1) == 1 else None


def _number(value: Any, batch_size: int) -> Any:
    return concrete(value.meta["val"] if isinstance(value, fx.Node) else value, batch_size)


def _slice(node: fx.Node, args: Any, batch_size: int) -> Any:
    """Source, dimension, first entry, number of entries, step."""
    named = private.arguments(node)
    dim, step = named.get("dim", 0), named.get("step", 1)
    start = _number(named.get("start") or 0, batch_size)
    size = int(concrete(node.args[0].meta["val"].shape[dim], batch_size))  # type: ignore[union-attr]
    count = int(concrete(node.meta["val"].shape[dim], batch_size))
    return args[0], dim, min(max(start + size if start < 0 else start, 0), size), count, step


def alike(one: Any, other: Any, depth: int = 8) -> bool:
    """Whether two values are made by the same few operations of the same values."""
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return bool(one == other)
    drawn = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
    if one is other or one.op != "call_function" or one.target is not other.target or drawn or not depth:
        return one is other
    some, others = (
        {**dict(enumerate(node.args)), **node.kwargs, "autocast": node.meta.get("autocast")} for node in (one, other)
    )
    return some.keys() == others.keys() and all(alike(value, others[key], depth - 1) for key, value in some.items())
