"""Values of a trace that is going on, computed from what its nodes say; no input and no weight has a part in them.

times = linspace(1, 0, 4); times[1]     0.666..., run on the host
rand(1) > 0.0                           True
x.mean()                                not known
"""

import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture import private
from fxpipe.capture.guards import on_host


@dataclass(frozen=True)
class Evaluated:
    """What a node of a trace holds: its `value`, those of all that it is made of, in the order they were computed, and
    what it has `read` of tensors that are no numbers of forward's own, by their nodes' names."""

    node: fx.Node
    value: torch.Tensor
    values: Mapping[fx.Node, Any]
    read: Mapping[str, torch.Tensor]


def evaluated(tensor: torch.Tensor, held: Mapping[str, torch.Tensor]) -> Evaluated | None:
    """What a value of the trace that is going on holds, where that follows from numbers and from what is `held`, by the
    names of the trace's placeholders, or by the model; None where anything else has a part in it."""
    node = private.traced_node(tensor)
    if node is None:
        return None
    found = _Evaluation(private.trace_root(), held)
    try:
        with private.outside_trace(), private.outside_fakes(), torch.no_grad():
            for one in _with_writes(node):
                found.of(one)
            value = found.of(node)
    except _Unknown:
        return None
    return Evaluated(node, value, found.values, found.read) if isinstance(value, torch.Tensor) else None


def _with_writes(node: fx.Node) -> list[fx.Node]:
    """The operations that a value is made of, in order, with what has been written there since; none where nothing
    has."""
    needed, pending, writers = set[fx.Node](), [node], list[fx.Node]()
    while pending:
        one = pending.pop()
        if one not in needed:
            needed.add(one)
            pending += one.all_input_nodes
            written = private.writers(one)
            if written and one.op != "call_function":
                raise _Unknown
            pending += written
            writers += written
    return [one for one in node.graph.nodes if one in needed and one.op == "call_function"] if writers else []


def evaluated_nodes(graph: fx.Graph, held: Mapping[str, torch.Tensor]) -> Mapping[fx.Node, Any]:
    """What nodes of a captured graph hold that are made of numbers and of what is `held`, by placeholders' names."""
    found = _Evaluation(nn.Module(), held)
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "output" and found.values.keys() >= {*node.all_input_nodes}:
                with suppress(_Unknown):
                    found.of(node)
    return found.values


class _Unknown(Exception):
    pass


class _Evaluation:
    """The values of nodes of a trace, run on the host: `values` are those of what was asked for, and is made of."""

    def __init__(self, root: nn.Module, held: Mapping[str, torch.Tensor]) -> None:
        self._root, self._held = root, held
        self.values: dict[fx.Node, Any] = {}
        self.read: dict[str, torch.Tensor] = {}

    def of(self, node: fx.Node) -> Any:
        if node not in self.values:
            self.values[node] = self._made(node)
        return self.values[node]

    def _made(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self._of_model(node)
        if node.target is torch.ops.aten.lift_fresh_copy.default and node.args[0] not in self.values:
            constant = self.values[node.args[0]] = getattr(self._root, str(node.args[0].target))  # type: ignore
            return constant.clone()
        known = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        if not known or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise _Unknown
        if (decided := _decided(node)) is not None:
            return torch.full(node.meta["val"].shape, decided)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        args, kwargs = on_host((args, kwargs))
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(made, torch.Tensor) and made.dtype != node.meta["val"].dtype:  # of an autocast
            raise _Unknown
        return made

    def _of_model(self, node: fx.Node) -> torch.Tensor:
        found = self._held.get(node.name) if node.op == "placeholder" else getattr(self._root, str(node.target), None)
        if not isinstance(found, torch.Tensor) or private.mode_of(found) is not None:
            raise _Unknown
        if found.is_meta or found.requires_grad:
            raise _Unknown
        self.read[node.name] = found
        return found.detach().cpu()


_ABOVE, _BELOW = ("gt", "ge"), ("lt", "le")


def _decided(node: fx.Node) -> bool | None:
    """Whether a number drawn between 0 and 1 compares so with one that is not; None for any other node."""
    name, (drawn, limit, *_) = private.packet_name(node.target), (*node.args, None, None)
    if not isinstance(drawn, fx.Node) or private.packet_name(drawn.target) not in ("rand", "rand_like"):
        return None
    if name not in (*_ABOVE, *_BELOW) or not isinstance(limit, int | float) or 0 < limit < 1 or len(drawn.users) > 1:
        return None
    return (limit <= 0) == (name in _ABOVE)
