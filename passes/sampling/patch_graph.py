"""One patch's graph: its own rows of every value, and what it needs of the other patches as exchanges.

    captured                                  units 0:4 of 9, two rows each
    conv_in = conv2d(x, w, b, pad 1)          x_cut = cut_rows(x, 2, ...)               8 of 17 rows
                                              conv_in_halo = halo(x_cut, 2, 1, 1, ...)
                                              conv_in = conv2d(conv_in_halo, w, b, pad (0, 1))
    k = linear(tokens, w_k)                   k = linear(tokens, w_k)
    attention(q, k, v)                        k_whole = gather(k);  attention(q, k_whole, v_whole)

All patches have the same exchanges in the same order.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.plan import row_ops
from passes.operations import bound_arguments, call_arguments
from passes.rows import RowPlan
from passes.rows.how import Cut, Found, Joined, Moments, Resized, Same, Shaped, Split, Summed, Window
from passes.rows.layout import Place, Rows, Slot, operands_of, shape_of
from passes.sampling import exchanges
from passes.sampling.exchanges import Exchange
from passes.sampling.patches import Patch

aten = torch.ops.aten


def patch_graph(plan: RowPlan, patch: Patch) -> fx.Graph:
    """The graph of one patch: placeholders as captured, inputs whole; it returns the whole prediction.

    `meta`: "val" as it is in this patch, "path", and of exchanges "exchange".
    """
    writer = _PatchWriter(plan, patch)
    for node in plan.sized.graph.nodes:
        if node.op == "placeholder":
            writer.placeholder(node)
        elif node.op == "call_function":
            writer.call(node)
    writer.output(plan.sized.result)
    writer.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    writer.graph.lint()
    return writer.graph


class _PatchWriter:
    """The graph as it grows; `_here` has each captured value as this patch holds it."""

    def __init__(self, plan: RowPlan, patch: Patch) -> None:
        self.plan, self.patch, self.graph = plan, patch, fx.Graph()
        self._here: dict[fx.Node, fx.Node] = {}
        self._cut: dict[tuple[fx.Node, Rows], fx.Node] = {}
        self._whole: dict[fx.Node, fx.Node] = {}

    # -- nodes

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        state = self.plan.state(node)
        assert not isinstance(state, tuple)
        self._here[node] = new if state is None else self._cut_rows(node, new, state)

    def output(self, result: fx.Node) -> None:
        self.graph.output(self._wanted(result, None, "prediction"))

    def call(self, node: fx.Node) -> None:
        found = self.plan.found[node.name]
        arguments = bound_arguments(node)
        for slot, operand in operands_of(arguments):
            state = self.plan.state(operand)
            want = found.wants.get(slot, state)
            _put(arguments, slot, self._here[operand] if isinstance(state, tuple) else self._wanted(operand, want))
        if not isinstance(node.target, torch._ops.OpOverload):
            self._emit(node, node.target, tuple(arguments.values()))
            return
        write = _WRITERS[type(found.how)]
        write(self, node, found, arguments)

    def _emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """The node that stands for a captured one."""
        new = self.graph.create_node("call_function", target, args, kwargs or {}, node.name)
        new.meta = {"path": node.meta.get("path", ""), "val": self._value(node)}
        self._here[node] = new
        return new

    def _emit_call(self, node: fx.Node, target: Any, arguments: Mapping[str, Any]) -> fx.Node:
        return self._emit(node, target, *call_arguments(target, arguments))

    def _add(self, node: fx.Node, target: Any, args: tuple[Any, ...], name: str, shape: Any = None) -> fx.Node:
        """A node beside the one that stands for a captured node."""
        new = self.graph.create_node("call_function", target, args, name=f"{node.name}_{name}")
        value = node.meta["val"]
        new.meta = {"path": node.meta.get("path", ""), "val": _meta(shape or shape_of(node), value.dtype)}
        return new

    def _value(self, node: fx.Node) -> Any:
        values, state = node.meta["val"], self.plan.state(node)
        if not isinstance(values, list | tuple):
            assert not isinstance(state, tuple)
            return _meta(self.patch.shape(node, state), values.dtype)
        states = state if isinstance(state, tuple) else (state,) * len(values)
        return [_local(value, one, self.patch) for value, one in zip(values, states, strict=True)]

    # -- operands

    def _wanted(self, node: fx.Node, want: Place, kind: str = "gather") -> fx.Node:
        """A captured value as it is wanted: as it is here, cut to the patch, or whole."""
        state, here = self.plan.state(node), self._here[node]
        assert not isinstance(state, tuple)
        if state == want:
            return here
        if state is None:
            assert want is not None
            if (node, want) not in self._cut:
                self._cut[node, want] = self._cut_rows(node, here, want)
            return self._cut[node, want]
        assert want is None
        if node not in self._whole:
            whole = self._add(node, exchanges.gather, (here,), "whole")
            whole.meta["exchange"] = Exchange(node.name, kind, node, state)
            self._whole[node] = whole
        return self._whole[node]

    def _cut_rows(self, node: fx.Node, here: fx.Node, state: Rows) -> fx.Node:
        args = (here, state.dim, self.patch.stretches(state))
        return self._add(node, row_ops.cut_rows, args, "cut", self.patch.shape(node, state))

    # -- ways to compute, by `How`

    def same(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        assert isinstance(found.how, Same)
        self._emit_call(node, node.target, {**arguments, **found.how.changes})

    def shaped(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        assert isinstance(found.how, Shaped)
        first = next(iter(arguments.values()))
        assert not isinstance(found.state, tuple)
        self._emit(node, found.how.target, (first, self.patch.shape(node, found.state)))

    def window(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        how, state = found.how, found.state
        assert isinstance(how, Window)
        assert isinstance(state, Rows)
        name, operand = next(iter(arguments.items()))
        value = node.all_input_nodes[0]
        rows = self.plan.state(value)
        assert isinstance(rows, Rows)
        if how.above or how.below or how.end:
            args = (operand, rows.dim, how.above, how.below, how.end, how.fill)
            shape = self.patch.shape(value, rows)
            shape[rows.dim] += how.above + (how.end if self.patch.stop == self.patch.count else how.below)
            operand = self._add(node, exchanges.halo, args, "halo", shape)
            operand.meta["exchange"] = Exchange(node.name, "halo", value, rows)
        call = call_arguments(how.target, {**arguments, name: operand, **how.changes})
        if not how.skip and not how.target.__name__.startswith("conv_transpose"):
            self._emit(node, how.target, *call)
            return
        wider = self.graph.create_node("call_function", how.target, *call, name=f"{node.name}_wider")
        wider.meta = {"path": node.meta.get("path", ""), "val": node.meta["val"]}
        self._emit(node, aten.narrow.default, (wider, state.dim, how.skip, self.patch.size(state)))

    def moments(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        assert isinstance(found.how, Moments)
        assert isinstance(found.state, Rows)
        operand, groups = arguments["input"], found.how.num_groups
        shape = (2, shape_of(node)[0], groups)
        merged = self._add(node, exchanges.merged_moments, (operand, groups), "moments", shape)
        merged.meta["val"] = _meta(shape, torch.promote_types(node.meta["val"].dtype, torch.float32))
        merged.meta["exchange"] = Exchange(node.name, "moments", node.all_input_nodes[0], found.state)
        self._emit(node, row_ops.normalise, (operand, merged, arguments["weight"], arguments["bias"], arguments["eps"]))

    def summed(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        assert isinstance(found.how, Summed)
        args, kwargs = call_arguments(node.target, arguments)
        part = self.graph.create_node("call_function", node.target, args, kwargs, f"{node.name}_part")
        part.meta = {"path": node.meta.get("path", ""), "val": node.meta["val"]}
        if found.how.mean:
            state = self.plan.state(node.all_input_nodes[0])
            assert isinstance(state, Rows)
            share = self.patch.size(state) / state.size(self.patch.count)
            part = self._add(node, aten.mul.Tensor, (part, share), "share")
        total = self._emit(node, exchanges.total, (part,))
        total.meta["exchange"] = Exchange(node.name, "sum", node, None)

    def resized(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        how, state = found.how, found.state
        assert isinstance(how, Resized)
        assert isinstance(state, Rows)
        before = self.plan.state(node.all_input_nodes[0])
        assert isinstance(before, Rows)
        size = list(shape_of(node)[2:])
        size[state.dim - 2] = self.patch.size(before) * how.times
        changed = {**arguments, **how.changes, how.name: size}
        if size[state.dim - 2] == self.patch.size(state):
            self._emit_call(node, node.target, changed)
            return
        args, kwargs = call_arguments(node.target, changed)
        wider = self.graph.create_node("call_function", node.target, args, kwargs, f"{node.name}_wider")
        wider.meta = {"path": node.meta.get("path", ""), "val": node.meta["val"]}
        self._emit(node, aten.narrow.default, (wider, state.dim, 0, self.patch.size(state)))

    def split(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        (value,) = node.all_input_nodes
        before = self.plan.state(value)
        assert isinstance(before, Rows)
        assert isinstance(found.state, tuple)
        sizes = []
        for state, whole in zip(found.state, node.meta["val"], strict=True):
            sizes.append(whole.shape[before.dim] if state is None else self.patch.size(state))
        self._emit(node, aten.split_with_sizes.default, (next(iter(arguments.values())), sizes, before.dim))

    def cut(self, node: fx.Node, found: Found, arguments: dict[str, Any]) -> None:
        assert isinstance(found.how, Cut)
        (value,) = node.all_input_nodes
        before = self.plan.state(value)
        assert isinstance(before, Rows)
        assert not isinstance(found.state, tuple)
        size = self.patch.shape(node, found.state)[before.dim]
        start = self.patch.local(before, found.how.start)
        self._emit(node, aten.narrow.default, (next(iter(arguments.values())), before.dim, start, size))


_WRITERS: dict[type, Any] = {
    Same: _PatchWriter.same, Shaped: _PatchWriter.shaped, Window: _PatchWriter.window,
    Moments: _PatchWriter.moments, Summed: _PatchWriter.summed, Resized: _PatchWriter.resized,
    Joined: lambda writer, node, found, arguments: writer._emit_call(node, node.target, arguments),
    Split: _PatchWriter.split, Cut: _PatchWriter.cut,
}  # fmt: skip


def _put(arguments: dict[str, Any], slot: Slot, value: fx.Node) -> None:
    name, index = slot
    if index is None:
        arguments[name] = value
    else:
        arguments[name] = [*arguments[name][:index], value, *arguments[name][index + 1 :]]


def _meta(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _local(value: Any, state: Place, patch: Patch) -> Any:
    if not isinstance(value, torch.Tensor) or state is None:
        return value
    shape = list(value.shape)
    shape[state.dim] = patch.size(state)
    return _meta(shape, value.dtype)
