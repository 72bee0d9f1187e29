"""Record what runs on fake tensors, forward and backward, as a graph of the operations that reach the kernels.

    y = conv2d(x, w).silu()        convolution        origin conv
    grad(y, [x], gy)          ->   silu               origin silu
                                   silu_backward      origin silu
                                   convolution_backward   origin conv

As `make_fx` does, in a fifth of its time: nothing is symbolic here, and no Python function is retraced. Beside it every
node says for which node of the caller's graph it was run, its *origin*: a backward's is that of its forward.
"""

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.capture import private

_QUERIES = {torch.ops.aten.size.default, torch.ops.aten.stride.default}


class Recorder(TorchDispatchMode):
    """Writes into `graph` what is dispatched while it is active, inside a fake mode."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self._device = fx.Graph(), device
        self._nodes: dict[int, fx.Node] = {}
        self._several: dict[fx.Node, list[fx.Node]] = {}  # the results of an operation with several
        self._alive: list[torch.Tensor] = []  # an identity is that of one tensor only
        self._starts: list[int] = []  # of every origin's part of the autograd history
        self._origins: list[str | None] = []
        self._origin: str | None = None

    def given(self, prefix: str, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors that come from outside, a placeholder each."""
        for number, tensor in enumerate(tensors, start=1):
            self._show(tensor, self.graph.placeholder(f"{prefix}_{number}"))

    def begin(self, origin: str | None) -> None:
        """What follows, and its backward, is recorded for this node of the caller's."""
        self._origin = origin
        self._starts.append(private.autograd_position())
        self._origins.append(origin)

    def returned(self, parts: Sequence[Sequence[torch.Tensor]]) -> fx.Graph:
        """The graph, which gives these tensors, part by part. Its values are cut off from autograd's history."""
        self.graph.output(tuple([self._nodes[id(tensor)] for tensor in part] for part in parts))
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.requires_grad:
                node.meta["val"] = private.detached(value)
        for node, items in self._several.items():
            node.meta["val"] = tuple(item.meta["val"] for item in items)
        return self.graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return private.device_of(args[0])
        if func in _QUERIES:
            return func(*args, **kwargs)
        if private.is_composite(func, self._device.type):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        given, named = self._given(args), {name: self._given(value) for name, value in kwargs.items()}
        node = self._note(
            self.graph.create_node("call_function", func, given, named, private.packet_name(func) or None)
        )
        if isinstance(result, tuple | list):
            items = [
                self._note(self.graph.create_node("call_function", operator.getitem, (node, i)))
                for i in range(len(result))
            ]
            self._several[node] = items
            for item, value in zip(items, result, strict=True):
                self._show(value, item)
        else:
            self._show(result, node)
        return result

    def _given(self, value: Any) -> Any:
        """An argument with nodes for its tensors."""
        if isinstance(value, torch.Tensor):
            return self._nodes[id(value)]
        return type(value)(map(self._given, value)) if type(value) in (tuple, list) else value

    def _show(self, value: Any, node: fx.Node) -> None:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._alive.append(value)

    def _note(self, node: fx.Node) -> fx.Node:
        """With the origin of what runs now."""
        position = private.position_in_backward()
        if position is None:
            node.meta["origin"] = self._origin
        else:
            index = bisect_right(self._starts, position) - 1
            node.meta["origin"] = self._origins[index] if index >= 0 else None
        return node
