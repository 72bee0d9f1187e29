"""Through which values of the captured graph gradients flow, as autograd has it, without tracing any stage.

    y = linear(x, w, b)           y: w, b                x is an input
    m, i = max(y, 1)              m: y                   indices have no gradient
    z = mul(m, zeros_like(y))     z: m                   nor has what is only made like another value

An operation runs once for each distinct call, on fake tensors: the histories of its results lead to the operands that
get a gradient. What a capture marks as `requires_grad` goes by types alone, and is certain only where it says no.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.costs.calls import Call, Gradient, Operand, call_of, concrete, concrete_argument, operand_nodes, tensors_in

Place = tuple[str, int]
"""A node's name, and which of its tensors."""
Autocast = tuple[str, torch.dtype, bool] | None
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """To which values each value hands its gradient: none, where it isn't among `sources`. `trained` are the
    placeholders of parameters that require grad."""

    sources: Mapping[Place, frozenset[Place]]
    trained: frozenset[str]

    def requires_grad(self, name: str) -> bool:
        """Whether a gradient flows through a node's value, which is one tensor."""
        return name in self.trained or (name, 0) in self.sources

    def weights_behind(self, values: Iterable[str], nodes: Collection[str]) -> set[str]:
        """The parameters' placeholders that get a gradient from some of `values` by way of `nodes` alone."""
        found: set[str] = set()
        seen: set[Place] = set()
        pending = [(name, 0) for name in values]
        while pending:
            place = pending.pop()
            if place[0] in self.trained:
                found.add(place[0])
            elif place not in seen and place[0] in nodes:
                seen.add(place)
                pending += self.sources.get(place, ())
        return found


def gradient_flow(capture: Capture) -> GradientFlow:
    """Of the whole graph; an operation's does not depend on the batch."""
    batch_size = max(2, capture.inputs.batch_size) if capture.batch else capture.inputs.batch_size
    trained: set[str] = set()
    sources: dict[Place, frozenset[Place]] = {}
    for node in capture.graph.nodes:
        if node.op == "placeholder" and node.meta["requires_grad"]:
            trained.add(node.name)
            sources[node.name, 0] = frozenset()
        elif node.op == "call_function" and node.meta["requires_grad"]:
            sources |= _of_node(node, sources, batch_size)
    return GradientFlow({place: found for place, found in sources.items() if found}, frozenset(trained))


def _of_node(
    node: fx.Node, sources: Mapping[Place, frozenset[Place]], batch_size: int
) -> Mapping[Place, frozenset[Place]]:
    """The operands that get a gradient of each of a node's tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):  # operator.getitem
        (source,), index = node.all_input_nodes, node.args[1]
        first = len(tensors_in(source.meta["val"][:index]))
        tensors = range(len(tensors_in(node.meta["val"])))
        return {(node.name, i): sources[source.name, first + i] for i in tensors if (source.name, first + i) in sources}
    places = [(argument.name, item) for argument, item in operand_nodes(node)]
    wanted = {name for name, item in places if (name, item) in sources}
    if not wanted:
        return {}
    gradients: dict[fx.Node, Gradient] = {n: "input" if n.name in wanted else "none" for n in node.all_input_nodes}
    found = _operands_behind(call_of(node, gradients), node.meta.get("autocast"), batch_size)
    behind = [frozenset(places[i] for i in operands if places[i] in sources) for operands in found]
    return {(node.name, i): those for i, those in enumerate(behind) if those}


@lru_cache(maxsize=1 << 14)
def _operands_behind(call: Call, autocast: Autocast, batch_size: int) -> tuple[frozenset[int], ...]:
    """For every tensor that a call returns the operands in its history."""
    with private.fake_mode(), torch.enable_grad():
        tensors = {operand.index: _fake(operand, batch_size) for operand in call.inputs}
        args = [concrete_argument(value, tensors, batch_size, _CPU) for value in call.args]
        kwargs = {name: concrete_argument(value, tensors, batch_size, _CPU) for name, value in call.kwargs}
        where, dtype, enabled = autocast or ("cpu", torch.bfloat16, False)
        with torch.autocast(where, dtype, enabled, cache_enabled=False):
            outputs = tensors_in(call.target(*args, **kwargs))
    number = {id(tensor): index for index, tensor in tensors.items()}
    return tuple(frozenset(number[id(leaf)] for leaf in _leaves(output)) for output in outputs)


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a result's gradient gets to: itself, where an operation returns its operand."""
    if tensor.requires_grad and tensor.grad_fn is None:
        return [tensor]
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    pending = [tensor.grad_fn]
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found.append(function.variable)
        pending += [following for following, _ in function.next_functions]
    return found


def _fake(operand: Operand, batch_size: int) -> torch.Tensor:
    sizes, strides = ([concrete(dim, batch_size) for dim in dims] for dims in (operand.sizes, operand.strides))
    tensor = torch.empty_strided(sizes, strides, dtype=operand.dtype, device=_CPU)
    return tensor.requires_grad_(operand.gradient != "none")
