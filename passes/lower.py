"""Lowering: from stage graphs and a schedule to one straight-line program per rank.

    rank 1: 1F0 1B0                 h_0 = wait(recv(transport, 0, edge=0))
                             ->     stage_1_forward = self.stage_1_forward(h_0, target_0)
                                    loss = add_weighted(None, stage_1_forward[0][0], 0.5)
                                    stage_1_backward = self.stage_1_backward(stage_1_forward[1], constant(0.5))
                                    send(transport, stage_1_backward[0][0], dst=0, edge=1)
                                    return loss, [stage_1_backward[1][0]]

A value that a stage of the same rank reads is an edge of this graph and nothing else.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpipe import ops
from fxpipe.rank_program import Message, RankProgram
from fxpipe.schedule import Action
from passes.messages import Layout, TiedGradient, gradient_ranks, plan_messages
from passes.stage_graphs import StageGraphs, Value

PREFETCH = 1  # actions ahead of its use that a receive is posted


@dataclass(frozen=True)
class BatchSlice:
    """Where the samples are in a whole-batch value: dimension `dim` is outer x batch x inner."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class Sources:
    """Where values that no unit makes come from.

    `inputs` and `draws` (with their index) are whole-batch placeholders; `whole` the values of the graph `prologue`,
    which reads some of them; `slices` says how each is cut into micro-batches, None where all samples share it.
    """

    inputs: tuple[str, ...]
    draws: Mapping[str, int]
    prologue: StageGraphs | None
    slices: Mapping[str, BatchSlice | None]


def lower(
    layout: Layout, sources: Sources, weights: Sequence[float], state: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[tuple[RankProgram, ...], tuple[Message, ...]]:
    """The program of every rank, and all messages.

    Args:
        weights: the factor of every micro-batch's loss in the whole batch's loss.
        state: parameters, buffers and constants by name, for their shapes and types.
    """
    tied = _tied_gradients(layout)
    messages = plan_messages(layout, tied)
    ranks = range(len(layout.schedule.ranks))
    writers = [_Writer(rank, layout, sources, weights, messages, tied, device) for rank in ranks]
    return tuple(writer.write(state) for writer in writers), messages


def _tied_gradients(layout: Layout) -> list[TiedGradient]:
    givers: dict[str, set[int]] = {}
    holders: dict[str, set[int]] = {}
    values: dict[str, Value] = {}
    for (unit, microbatch), rank in layout.rank_of.items():
        graphs = layout.graph(unit, microbatch)
        for name, value in graphs.state.items():
            holders.setdefault(name, set()).add(rank)
            values[name] = value
        for name in graphs.weight_grads:
            givers.setdefault(name, set()).add(rank)
    return [
        TiedGradient(values[name], tuple(sorted(ranks)), tuple(sorted(holders[name])))
        for name, ranks in sorted(givers.items())
        if len(holders[name]) > 1
    ]


@dataclass
class _Writer:
    """Writes one rank's program, action by action; the dictionaries hold what the program has at this point."""

    rank: int
    layout: Layout
    sources: Sources
    weights: Sequence[float]
    messages: tuple[Message, ...]
    tied: Sequence[TiedGradient]
    device: torch.device
    graph: fx.Graph = field(default_factory=fx.Graph)
    modules: dict[str, fx.Graph] = field(default_factory=dict)
    values: dict[tuple[str, int], fx.Node] = field(default_factory=dict)
    gradients: dict[tuple[str, int], list[fx.Node]] = field(default_factory=dict)
    saved: dict[tuple[str, int, int], fx.Node] = field(default_factory=dict)
    totals: dict[tuple[int, tuple[str, ...]], fx.Node] = field(default_factory=dict)
    posted: dict[int, fx.Node] = field(default_factory=dict)
    arrived: dict[int, fx.Node] = field(default_factory=dict)
    loss: fx.Node | None = None

    def write(self, state: Mapping[str, torch.Tensor]) -> RankProgram:
        self.transport = self.graph.placeholder("transport")
        self.random = self.graph.placeholder("random")
        self.whole: dict[str, fx.Node] = {name: self.graph.placeholder(name) for name in self._inputs_needed()}
        inputs = tuple(self.whole)
        self.incoming: dict[int, list[Message]] = {}
        for message in self.messages:
            if message.dst == self.rank:
                self.incoming.setdefault(message.src, []).append(message)
        actions = self.layout.schedule.ranks[self.rank]
        for position, action in enumerate(actions):
            for ahead in actions[position : position + 1 + PREFETCH]:
                self._post_all(ahead)
            self._call(ops.begin, (self.transport, str(action)), f"begin_{action}")
            {"F": self._forward, "T": self._forward, "B": self._backward, "I": self._backward, "W": self._weight}[
                action.kind
            ](action)
        names, gradients = self._finish()
        self.graph.output((self.loss, gradients))
        self.graph.lint()
        held = {name for graph in self.modules.values() for name in _attributes(graph)}
        held |= {g.value.name for g in self.tied if self.rank in g.holders}
        return RankProgram(
            self.rank, self.graph, self.modules, inputs, tuple(names), {n: state[n] for n in sorted(held)}
        )

    # -- what an action needs

    def _inputs_needed(self) -> list[str]:
        units = {unit for (unit, _), rank in self.layout.rank_of.items() if rank == self.rank}
        reads = {name for unit in units for name in next(iter(self.layout.graphs[unit].values())).unit.reads}
        prologue = self.sources.prologue
        if prologue is not None and reads & {v.name for v in prologue.returns}:
            reads |= set(prologue.unit.reads)
        return [name for name in self.sources.inputs if name in reads]

    def _post_all(self, action: Action) -> None:
        for message in self._messages_for(action):
            queue = self.incoming[message.src]
            while message.edge not in self.posted:
                self._post(queue[sum(m.edge in self.posted for m in queue)])

    def _messages_for(self, action: Action) -> list[Message]:
        if action.kind == "W":
            return []
        if action.kind in "FT":
            graphs = self.layout.graph((action.kind, action.stage), action.microbatch)
            wanted = {(v, False) for v in graphs.unit.reads}
        else:
            graphs = self.layout.graph(("F", action.stage), action.microbatch)
            wanted = {(v, True) for v in graphs.tangents}
        return [
            m
            for queue in self.incoming.values()
            for m in queue
            if m.microbatch == action.microbatch and (m.value, m.kind == "gradient") in wanted
        ]

    def _post(self, message: Message) -> None:
        args = (self.transport, message.src, message.edge, list(message.shape), message.dtype, str(self.device))
        node = self._call(ops.recv, args, f"recv_{_name(message)}")
        node.meta["message"] = message
        self.posted[message.edge] = node

    def _receive(self, message: Message) -> fx.Node:
        if message.edge not in self.arrived:
            node = self._call(ops.wait, (self.posted[message.edge],), _name(message))
            node.meta["val"] = _meta(message.shape, message.dtype)
            self.arrived[message.edge] = node
        return self.arrived[message.edge]

    def _read(self, name: str, microbatch: int) -> fx.Node:
        """The value of one micro-batch: made on this rank, received, or cut out of the whole batch."""
        if (name, microbatch) not in self.values:
            self.values[name, microbatch] = self._fetch(name, microbatch)
        return self.values[name, microbatch]

    def _fetch(self, name: str, microbatch: int) -> fx.Node:
        if name in self.layout.producer:
            src = self.layout.rank_of[self.layout.producer[name], microbatch]
            found = [m for m in self.incoming[src] if (m.value, m.microbatch) == (name, microbatch)]
            return self._receive(next(m for m in found if m.kind != "gradient"))
        whole, where = self._whole_batch(name), self.sources.slices[name]
        if where is None:
            return whole
        sizes = self.layout.sizes
        start = sum(sizes[:microbatch])
        place = (where.dim, where.outer, where.inner, start, start + sizes[microbatch], sum(sizes))
        return self._call(ops.slice_batch, (whole, *place), f"{name}_{microbatch}")

    def _whole_batch(self, name: str) -> fx.Node:
        if name not in self.whole:
            if name in self.sources.draws:
                self.whole[name] = self._call(ops.draw, (self.random, self.sources.draws[name]), name)
            else:
                self._run_prologue()
        return self.whole[name]

    def _run_prologue(self) -> None:
        prologue = self.sources.prologue
        assert prologue is not None
        args = tuple(self._whole_batch(name) for name in prologue.unit.reads)
        returns, _ = self._call_module("whole_batch", prologue.forward, args)
        for index, value in enumerate(prologue.returns):
            self.whole[value.name] = self._item(returns, index, value.name)

    # -- actions

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        graphs = self.layout.graph((action.kind, stage), microbatch)
        args = tuple(self._read(name, microbatch) for name in graphs.unit.reads)
        returns, saved = self._call_module(self._module(graphs, "forward"), graphs.forward, args)
        for index, value in enumerate(graphs.returns):
            node = self._item(returns, index, f"{value.name}_{microbatch}")
            node.meta["val"] = _meta(value.shape, value.dtype)
            self.values[value.name, microbatch] = node
            if value.name == self.layout.loss:
                total = (self.loss, node, self.weights[microbatch])
                self.loss = self._call(ops.add_weighted, total, f"loss_{microbatch}_total")
        if graphs.backward is not None:
            self.saved["saved", stage, microbatch] = saved
        self._send_after(action, self.values)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        graphs = self.layout.graph(("F", stage), microbatch)
        tangents = tuple(self._tangent(value, microbatch) for value in graphs.returns if value.requires_grad)
        saved = self.saved.pop(("saved", stage, microbatch))
        split = action.kind == "I" and graphs.backward_input is not None
        body = graphs.backward_input if split else graphs.backward
        assert body is not None
        name = self._module(graphs, "backward_input" if split else "backward")
        input_grads, rest = self._call_module(name, body, (saved, *tangents))
        for index, value in enumerate(graphs.input_grads):
            node = self._item(input_grads, index, f"grad_{value}_{microbatch}")
            self.gradients.setdefault((value, microbatch), []).append(node)
        if split:
            self.saved["kept", stage, microbatch] = rest
        elif graphs.weight_grads:
            self._accumulate(stage, graphs, rest)
        sums = {key: self._sum(self.gradients, key) for key in self._gradients_to_send(action)}
        self._send_after(action, sums)

    def _weight(self, action: Action) -> None:
        graphs = self.layout.graph(("F", action.stage), action.microbatch)
        assert graphs.backward_weight is not None
        kept = self.saved.pop(("kept", action.stage, action.microbatch))
        name = self._module(graphs, "backward_weight")
        (weight_grads,) = self._call_module(name, graphs.backward_weight, (kept,), parts=1)
        self._accumulate(action.stage, graphs, weight_grads)

    def _tangent(self, value: Value, microbatch: int) -> fx.Node:
        """The gradient of a returned value: the loss's own weight, or the sum of what its readers give."""
        if value.name == self.layout.loss:
            args = (float(self.weights[microbatch]), list(value.shape), value.dtype, str(self.device))
            return self._call(ops.constant, args, f"grad_loss_{microbatch}")
        parts: list[fx.Node] = []
        for rank in gradient_ranks(self.layout, value.name, microbatch):
            if rank == self.rank:
                parts.append(self._sum(self.gradients, (value.name, microbatch)))
            else:
                arrived = (m for m in self.incoming[rank] if m.kind == "gradient" and m.microbatch == microbatch)
                parts.append(self._receive(next(m for m in arrived if m.value == value.name)))
        if not parts:
            return self._call(ops.constant, (0.0, list(value.shape), value.dtype, str(self.device)), f"no_grad_{value.name}")
        return self._add(parts)

    def _accumulate(self, stage: int, graphs: StageGraphs, new: fx.Node) -> None:
        key = (stage, graphs.weight_grads)
        total = self.totals.get(key)
        self.totals[key] = new if total is None else self._call(ops.accumulate, (total, new), f"grads_stage_{stage}")

    def _gradients_to_send(self, action: Action) -> list[tuple[str, int]]:
        return [(m.value, m.microbatch) for m in self.messages if m.src == self.rank and m.action == action]

    def _send_after(self, action: Action, values: Mapping[tuple[str, int], fx.Node]) -> None:
        for message in self.messages:
            if message.src == self.rank and message.action == action:
                self._send(message, values[message.value, message.microbatch])

    def _send(self, message: Message, value: fx.Node) -> None:
        node = self._call(ops.send, (self.transport, value, message.dst, message.edge), f"send_{_name(message)}")
        node.meta["message"] = message

    # -- the end of the step

    def _finish(self) -> tuple[list[str], list[fx.Node]]:
        """Join the gradients of this rank's stages, sum those of tied parameters over ranks, pass on the loss."""
        self._call(ops.begin, (self.transport, "end of step"), "begin_end")
        parts: dict[str, list[fx.Node]] = {}
        for (_, names), total in self.totals.items():
            for index, name in enumerate(names):
                parts.setdefault(name, []).append(self._item(total, index, "grad_" + name.replace(".", "_")))
        grads = {name: self._add(nodes) for name, nodes in parts.items()}
        closing = [m for m in self.messages if m.action is None and self.rank in m.channel]
        tied = {g.value.name: g for g in self.tied}
        for gradient in self.tied:
            if self.rank in gradient.givers[1:]:
                self._send(self._closing(closing, gradient, self.rank, gradient.givers[0]), grads[gradient.value.name])
        for gradient in self.tied:
            if self.rank == gradient.givers[0]:
                received = [self._late(self._closing(closing, gradient, g, self.rank)) for g in gradient.givers[1:]]
                grads[gradient.value.name] = self._add([grads[gradient.value.name], *received])
        for message in closing:
            is_total = message.value in tied and message.src == tied[message.value].givers[0]
            if message.src == self.rank and (is_total or message.kind == "loss"):
                assert message.kind != "loss" or self.loss is not None
                self._send(message, grads[message.value] if is_total else self.loss)  # type: ignore[arg-type]
            elif message.dst == self.rank and is_total:
                grads[message.value] = self._late(message)
            elif message.dst == self.rank and message.kind == "loss":
                self.loss = self._late(message)
        return list(grads), list(grads.values())

    def _closing(self, closing: Sequence[Message], gradient: TiedGradient, src: int, dst: int) -> Message:
        return next(m for m in closing if m.value == gradient.value.name and m.channel == (src, dst))

    def _late(self, message: Message) -> fx.Node:
        queue = self.incoming[message.src]
        while message.edge not in self.posted:
            self._post(queue[sum(m.edge in self.posted for m in queue)])
        return self._receive(message)

    # -- small helpers

    def _module(self, graphs: StageGraphs, part: str) -> str:
        several = len(set(self.layout.sizes)) > 1
        return f"{graphs.unit.name}_{part}" + (f"_b{graphs.batch_size}" if several else "")

    def _call_module(self, name: str, body: fx.Graph, args: tuple[Any, ...], parts: int = 2) -> list[fx.Node]:
        self.modules[name] = body
        result = self.graph.create_node("call_module", name, args)
        return [self._item(result, index, f"{result.name}_{index}") for index in range(parts)]

    def _call(self, function: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", function, args, name=name)

    def _item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        return self._call(operator.getitem, (node, index), name)

    def _sum(self, table: dict[tuple[str, int], list[fx.Node]], key: tuple[str, int]) -> fx.Node:
        """The sum of the parts in `table[key]`, made once."""
        table[key] = [self._add(table[key])]
        return table[key][0]

    def _add(self, parts: Sequence[fx.Node]) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = self._call(torch.ops.aten.add.Tensor, (total, part), f"{parts[0].name}_sum")
        return total


def _name(message: Message) -> str:
    part = f"_{message.microbatch}" if message.microbatch >= 0 else ""
    prefix = "grad_" if message.kind == "gradient" else ""
    return prefix + message.value.replace(".", "_") + part


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attributes(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}
