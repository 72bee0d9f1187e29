"""An operation whose gradient is a graph: what an autograd function of a model's own is, once it is captured.

y = own_gradient("Round 5f2c..", [z], [x], saved, sizes)   y is z; x gets what the key's graph makes of y's gradient
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from fxpipe.errors import CaptureError

aten = torch.ops.aten
_library = torch.library.Library("fxpipe", "DEF")
_library.define(
    "traced_gradient(str name, Tensor[] outs, Tensor[] inputs, Tensor[] tangents, Tensor[] grads) -> Tensor[]"
)
_library.define("own_gradient(str key, Tensor[] outs, Tensor[] inputs, Tensor[] saved, SymInt[] sizes) -> Tensor[]")
TRACED = torch.ops.fxpipe.traced_gradient.default
"""In a trace alone: `grads` of `inputs`, made of `tangents` of `outs` by the nodes in front of it."""

OWN_GRADIENT = torch.ops.fxpipe.own_gradient.default
"""`outs`, whose gradients go on to `inputs` by the graph of this key."""

GRAPHS: dict[str, fx.Graph] = {}
"""By key: what makes the gradients of `inputs` of those of `outs`, then of `saved` and `sizes`."""


class _Own(torch.autograd.Function):
    """Gives its results on, and their gradients by a graph."""

    @staticmethod
    def forward(ctx: Any, key: str, num_outs: int, num_inputs: int, sizes: Any, *tensors: torch.Tensor) -> Any:
        ctx.key, ctx.sizes, ctx.saved = key, sizes, tensors[num_outs + num_inputs :]
        ctx.nothing = [None] * (4 + num_outs), [None] * len(ctx.saved)
        return tuple(one.view_as(one) for one in tensors[:num_outs])

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        before, behind = ctx.nothing
        return (*before, *run(GRAPHS[ctx.key], (*tangents, *ctx.saved, *ctx.sizes)), *behind)


def run(graph: fx.Graph, given: Sequence[Any]) -> Any:
    """What the graph of a backward makes of these values."""
    values: dict[fx.Node, Any] = {}
    left, device = iter(given), given[0].device
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(left)
            continue
        args, kwargs = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)),
            lambda one: values[one] if isinstance(one, fx.Node) else device if isinstance(one, torch.device) else one,
        )
        if node.op == "output":
            return args[0]
        if node.target is aten.sym_size.int:
            values[node] = args[0].shape[args[1]]
            continue
        kind, dtype, enabled = node.meta.get("autocast", (None, None, None))
        with nullcontext() if kind is None else torch.autocast(kind, dtype, enabled, cache_enabled=False):
            target = aten.reshape.default if node.target is aten.view.default else node.target  # of any strides
            values[node] = target(*args, **kwargs)
    raise AssertionError("a graph without an output")


def _own_gradient(key: str, outs: Any, inputs: Any, saved: Any, sizes: Any) -> list[torch.Tensor]:
    return list(_Own.apply(key, len(outs), len(inputs), tuple(sizes), *outs, *inputs, *saved))  # type: ignore[no-untyped-call]


_library.impl("own_gradient", _own_gradient, "CompositeImplicitAutograd")


def own_refusal(name: str, why: str) -> CaptureError:
    return CaptureError(
        f"the autograd function {name} hides its gradient from the trace: {why}; use operations of torch, such as "
        "y + (x - y).detach()"
    )
