"""Writing one patch's graph: the node of every captured value, and values cut to the patch or gathered where needed.

wanted(positions, rows)    the same for all patches, cut      cut_rows(positions, 1, ...)
wanted(k, None)            this patch's, gathered             gather(k)
"""

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.plan import row_ops
from passes.operations import call_arguments
from passes.rows import RowPlan
from passes.rows.layout import Place, Rows, shape_of
from passes.sampling import exchanges
from passes.sampling.exchanges import Exchange
from passes.sampling.halos import Early
from passes.sampling.of_inputs import of_inputs
from passes.sampling.patches import Patch

Arguments = tuple[Any, ...] | Mapping[str, Any]
"""Of a call, all of them or by the names of its schema."""


class PatchWriter:
    """The graph as it grows; `here` has the node of each captured value as this patch holds it."""

    def __init__(
        self, plan: RowPlan, patch: Patch, early: Collection[str], early_halos: Mapping[fx.Node, Early],
        has_inputs: bool, made: Set[str] | None,
    ) -> None:  # fmt: skip
        self.plan, self.patch, self.early, self.graph = plan, patch, early, fx.Graph()
        self.early_halos, self.has_inputs, self.made = early_halos, has_inputs, made
        self.here: dict[fx.Node, fx.Node] = {}
        self.more_rows: dict[fx.Node, int] = {}  # than a patch has, of the others' around it
        self._cut: dict[tuple[fx.Node, Rows], fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self._of_inputs: dict[fx.Node, fx.Node] = {}
        self.heads: dict[fx.Node, fx.Node] = {}

    # -- nodes

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta.update(node.meta)
        self._of_inputs[node] = new
        state = self.plan.state(node)
        assert not isinstance(state, tuple)
        self.here[node] = new if state is None else self.cut_rows(node, new, state)

    def read(self, node: fx.Node) -> None:
        """A value of another stage, as this patch holds it."""
        self.here[node] = self.graph.placeholder(node.name)
        self.here[node].meta.update(kind="read", val=self._value(node))

    def output(self, result: fx.Node) -> None:
        self.graph.output(self.wanted(result, None, "prediction"))

    def emit(self, node: fx.Node, target: Any, args: Arguments) -> fx.Node:
        """The node that stands for a captured one."""
        self.here[node] = new = self._call(node, target, args, node.name, self._value(node))
        if node.name in self.early:
            new.meta["early"] = True
        return new

    def add(
        self, node: fx.Node, target: Any, args: Arguments, name: str, shape: Any = None,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:  # fmt: skip
        """A node beside the one that stands for a captured node, of its shape and type where none is given."""
        value = meta(shape or shape_of(node), dtype or node.meta["val"].dtype)
        return self._call(node, target, args, f"{node.name}_{name}", value)

    def several(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], name: str, values: Sequence[torch.Tensor]
    ) -> list[fx.Node]:
        """The results of an operation beside a captured node."""
        new = self._call(node, target, args, f"{node.name}_{name}", list(values))
        parts = [self.graph.call_function(operator.getitem, (new, index)) for index in range(len(values))]
        for part, value in zip(parts, values, strict=True):
            part.meta = {"path": node.meta.get("path", ""), "val": value}
        return parts

    def _call(self, node: fx.Node, target: Any, args: Arguments, name: str, value: Any) -> fx.Node:
        args, kwargs = call_arguments(target, args) if isinstance(args, Mapping) else (args, None)
        new = private.create_node(self.graph, "call_function", target, args, kwargs, name)
        new.meta = {"path": node.meta.get("path", ""), "val": value}
        return new

    def _value(self, node: fx.Node) -> Any:
        values, state = node.meta["val"], self.plan.state(node)
        if not isinstance(values, list | tuple):
            assert not isinstance(state, tuple)
            shape = self.patch.shape(node, state)
            if state is not None:
                shape[state.dim] += self.more_rows.get(node, 0)
            return meta(shape, values.dtype)
        states = state if isinstance(state, tuple) else (state,) * len(values)
        return [_local(value, one, self.patch) for value, one in zip(values, states, strict=True)]

    # -- operands

    def wanted(self, node: fx.Node, want: Place, kind: str = "gather") -> fx.Node:
        """A captured value as it is wanted: as it is here, cut to the patch, or whole."""
        state, here = self.plan.state(node), self.here[node]
        assert not isinstance(state, tuple)
        if state is want or state == want:
            return here
        if state is None:
            assert want is not None
            if (node, want) not in self._cut:
                self._cut[node, want] = self.cut_rows(node, here, want)
            return self._cut[node, want]
        assert want is None
        if node not in self.whole:
            shape = list(shape_of(node))
            shape[state.dim] -= sum(state.pad)
            whole = self.add(node, exchanges.gather, (here,), "whole", shape)
            whole.meta["exchange"] = Exchange(node.name, kind, node, state)
            if any(state.pad):  # which was left to who reads it
                pad = [0] * 2 * (len(shape) - 1 - state.dim) + [*state.pad] + [0] * 2 * (state.dim - 2)
                whole = self.add(node, torch.ops.aten.pad.default, (whole, pad, state.mode), "padded")
            self.whole[node] = whole
        return self.whole[node]

    def all_rows(self, value: fx.Node) -> fx.Node | None:
        """All rows of a value that is made of inputs here, row by row; None of any other."""
        made = of_inputs(self.plan, value) if self.has_inputs else None
        if made is None or not (self.made is None or self.made >= {node.name for node in made}):
            return None
        for node in made:
            if node not in self._of_inputs:
                call = self.plan.calls[node.name]
                operands = {one: self._of_inputs.get(one, self.here[one]) for one in call.operands.values()}
                arguments = fx.map_arg(dict(call.arguments), operands.__getitem__)
                self._of_inputs[node] = self.add(node, node.target, arguments, "all")
        return self._of_inputs[value]

    def cut_rows(self, node: fx.Node, here: fx.Node, state: Rows) -> fx.Node:
        args = (here, state.dim, self.patch.stretches(state))
        return self.add(node, row_ops.cut_rows, args, "cut", self.patch.shape(node, state))


def meta(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _local(value: Any, state: Place, patch: Patch) -> Any:
    if not isinstance(value, torch.Tensor) or state is None:
        return value
    shape = list(value.shape)
    shape[state.dim] = patch.size(state)
    return meta(shape, value.dtype)
