"""Autocasts of forward's own, written out: what they cast is cast by nodes of the graph.

    linear(x, w, b)    in an autocast to bfloat16     x_cast = to(x, bfloat16);  ...;  linear(x_cast, w_cast, b_cast)

For graphs that run without gradients. A training step keeps its regions, as its backward casts anew.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.capture import private
from fxpipe.errors import CaptureError

_TO = torch.ops.aten.to.dtype
_MOVES = ("_to_copy", "clone", "_unsafe_view", "device")  # as views do: they compute nothing
_HIDDEN = (
    "affine_grid_generator", "bilinear", "linalg_multi_dot", "linalg_pinv", "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention",
)  # fmt: skip
"""Kernels that call products, which an autocast would cast inside of them, unseen."""


def written_out(graph: fx.Graph) -> fx.Graph:
    """The graph without autocasts, computing the same.

    Raises:
        CaptureError: one casts what an operation makes on its way; names the module.
    """
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    known: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in graph.nodes:
        enabled = node.meta.get("autocast", (None, None, False))[2]
        casts = _casts(node) if enabled and private.tensors_in(node.meta["val"]) else {}
        for one in (one for one in casts.items() if one not in known):  # in the order of arguments, on every rank
            made = known[one] = private.create_node(new, "call_function", _TO, (env[one[0]], one[1]))
            value = private.fake_result(_TO, made.args, {}, one[0].meta["val"])
            made.meta = {"val": value, "path": node.meta["path"], "requires_grad": False}
        given = env | {one: known[one, dtype] for one, dtype in casts.items()}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        env[node] = private.create_node(new, node.op, node.target, args, kwargs, node.name)
        env[node].meta = {key: value for key, value in node.meta.items() if key != "autocast"}
    return new


@private.quiet()
def _casts(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """The arguments of an operation that its autocast casts, and to what."""
    kind, dtype, _ = node.meta["autocast"]
    name = private.packet_name(node.target)
    known = getattr(node.target, "namespace", "aten") == "aten" and name not in _HIDDEN
    inside = _computed(node, torch.autocast(kind, dtype, cache_enabled=False))
    if known and inside == _computed(node, nullcontext()):
        return {}
    values = {one: one.meta["val"] for one in node.all_input_nodes if isinstance(one.meta["val"], torch.Tensor)}
    floats = {one: value for one, value in values.items() if value.is_floating_point()}
    casts = {one: inside.casts[id(value)] for one, value in floats.items() if id(value) in inside.casts}
    types = set(inside.casts.values()) or {one for one in inside.gives if one.is_floating_point}
    if not casts and len(types) == 1:  # what was cast are views of them, as in an einsum; or it was told a type
        casts = {one: only for only in types for one, value in floats.items() if value.dtype != only}
    if not known or inside != _computed(node, nullcontext(), casts):
        low = str(dtype).removeprefix("torch.")
        raise CaptureError(
            f"{private.where(node)}: an autocast to {low} casts inside of {name or node.target}, where samplers do not "
            f"follow; leave it out, and load the denoiser in {low}"
        )
    return casts


class _Computed(TorchDispatchMode):
    """The operations that one becomes, with the types that they compute in and give, and what was cast on the way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []
        self.gives: list[torch.dtype] = []
        self.casts: dict[int, torch.dtype] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Computed) and (self.operations, self.gives) == (other.operations, other.gives)

    __hash__ = None  # type: ignore[assignment]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), private.packet_name(func)
        if name == "_to_copy":
            self.casts[id(args[0])] = made.dtype
        elif name not in _MOVES and not private.may_alias(func):
            read, gives = ([one.dtype for one in private.tensors_in([*values])] for values in (args, [made]))
            self.operations.append((name, [reduce(torch.promote_types, gives, one) for one in read], gives))
        return made


def _computed(
    node: fx.Node, surrounding: AbstractContextManager[Any], casts: Mapping[fx.Node, torch.dtype] | None = None
) -> _Computed:
    """What an operation computes; nothing where it refuses arguments of these types."""
    computed, types = _Computed(), casts or {}

    def value(one: fx.Node) -> Any:
        return one.meta["val"].to(types[one]) if one in types else one.meta["val"]

    def run() -> None:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
        with surrounding, computed, suppress(RuntimeError):
            made = node.target(*args, **kwargs)  # type: ignore[operator]
            computed.gives = [one.dtype for one in private.tensors_in([made])]

    private.fake_result(run, (), {}, private.tensors_in(node.meta["val"])[0])
    return computed
