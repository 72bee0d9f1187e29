"""A captured denoiser at one batch size: sizes are numbers, and what only computed them is gone.

sym_size = x.size(0);  view = x.view(sym_size, 16)       ->       view = x.view(2, 16)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.capture.sizes import concrete
from fxpipe.errors import CompileError

aten = torch.ops.aten
# What is gathered or cut lies in memory in another way than what was traced.
_FOR_ANY_STRIDES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
_PLAIN = frozenset([int, float, bool, str, type(None), torch._ops.OpOverload])


@dataclass(frozen=True, eq=False)
class Sized:
    """`graph` has the names of `capture`'s; every `meta["val"]` is on the meta device, with a shape of numbers."""

    graph: fx.Graph
    capture: Capture
    batch_size: int

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """What every operation reads, by name."""
        return {node.name: tuple([operand.name for operand in node.all_input_nodes]) for node in self.graph.nodes}

    @property
    def result(self) -> fx.Node:
        return self.nodes[self.capture.result.name]


def at_batch_size(capture: Capture, batch_size: int) -> Sized:
    """The graph for so many samples.

    Raises:
        CompileError: there is none for so few.
    """
    graph, env, made = fx.Graph(), dict[fx.Node, fx.Node](), dict[int, Any]()

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return env[value] if value in env else concrete(value.meta["val"], batch_size)
        return concrete(value, batch_size)

    def on_meta(value: Any) -> Any:  # of many nodes it is one and the same
        if id(value) not in made:
            made[id(value)] = _on_meta(value, batch_size)
        return made[id(value)]

    for node in capture.graph.nodes:
        if node.op == "output":
            graph.output(env[capture.result])
        elif _holds_tensors(node):
            args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), leaf)
            target = _FOR_ANY_STRIDES.get(node.target, node.target)
            env[node] = private.create_node(graph, node.op, target, args, kwargs, node.name)
            env[node].meta.update(node.meta, val=on_meta(node.meta["val"]))
    return Sized(graph, capture, batch_size)


def _holds_tensors(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _on_meta(value: Any, batch_size: int) -> Any:
    if isinstance(value, list | tuple):
        return [_on_meta(item, batch_size) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    shape = concrete(tuple(value.shape), batch_size)
    if any(size < 0 for size in shape):
        raise CompileError(f"a value has the shape {list(shape)} with {batch_size} samples")
    return torch.empty(shape, dtype=value.dtype, device="meta")


def require_shapes(sized: Sized) -> None:
    """Check a graph whose sizes were put in: run its operations without memory, equal ones once.

    Raises:
        CompileError: one does not run, or gives another shape or type than the graph says.
    """
    meta = torch.device("meta")

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return value.meta["val"]
        return meta if isinstance(value, torch.device) else value

    likes = {node: plain_like(node.meta.get("val"), {}) for node in sized.graph.nodes}
    calls = [node for node in sized.graph.nodes if node.op == "call_function"]
    for node in {plain_like((n.target, n, n.args, n.kwargs), likes): n for n in reversed(calls)}.values():
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), leaf)
        try:
            with torch.no_grad():
                found = node.target(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise CompileError(f"{node.name} does not run at these sizes: {error}") from None
        made, said = private.tensors_in(found), private.tensors_in(node.meta["val"])
        if [(t.shape, t.dtype) for t in made] != [(t.shape, t.dtype) for t in said]:
            shapes = [[list(t.shape) for t in ts] for ts in (made, said)]
            raise CompileError(f"{node.name} has the shapes {shapes[0]} at these sizes, not {shapes[1]}")


def plain_like(value: Any, likes: Mapping[fx.Node, object]) -> Any:
    """Arguments as hashable data; of a node what its value is like, which is no number among arguments."""
    kind = type(value)
    if kind in _PLAIN:  # nearly all
        return kind, value
    if kind is fx.Node:
        return fx.Node, likes[value]
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple([plain_like(item, likes) for item in value])
    if isinstance(value, dict):
        return tuple([(name, plain_like(item, likes)) for name, item in value.items()])
    return kind, value
