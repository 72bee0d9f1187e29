"""Writing one rank's graph: where values come from, and the receives, sends and calls that move them.

read("h", 2)      made on this rank        its node
                  made on another rank     wait(recv(...)), the receive posted earlier, in the order of its channel
                  an input or a draw       slice_batch(whole batch, samples of micro-batch 2)
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.actions import Action
from fxpipe.plan.plan import microbatch_samples
from fxpipe.plan.rank_program import Message
from passes.lowering.layout import UnitLayout
from passes.lowering.step_graphs import WHOLE_BATCH, StepGraphs
from passes.lowering.units import Value
from passes.step_ops.exchange import MessageWriter, Use


@dataclass(frozen=True)
class RankMail:
    """The messages that come to a rank and those that it sends, each in the order of all messages."""

    incoming: Sequence[Message]
    outgoing: Sequence[Message]

    @cached_property
    def by_action(self) -> dict[Action | None, list[Message]]:
        """What is sent after each action."""
        table: dict[Action | None, list[Message]] = {}
        for message in self.outgoing:
            table.setdefault(message.action, []).append(message)
        return table


def sorted_mail(messages: Iterable[Message], ranks: Iterable[int]) -> dict[int, RankMail]:
    """The mail of these ranks."""
    incoming: dict[int, list[Message]] = {rank: [] for rank in ranks}
    outgoing: dict[int, list[Message]] = {rank: [] for rank in incoming}
    for message in messages:
        incoming.get(message.dst, []).append(message)
        outgoing.get(message.src, []).append(message)
    return {rank: RankMail(incoming[rank], outgoing[rank]) for rank in incoming}


class RankWriter(MessageWriter[Message, fx.Node]):
    """The graph of one rank as it grows. `values` holds the node of every value of every micro-batch read so far.

    Args:
        inputs, next_inputs: whole-batch inputs of this batch and of the next one that the rank reads.
        carried: the values of micro-batches that the step before has made, by (name, micro-batch).
        scaled: whether the loss is scaled before its backward.
    """

    def __init__(
        self,
        rank: int,
        layout: UnitLayout,
        step: StepGraphs,
        mail: RankMail,
        inputs: Sequence[str],
        next_inputs: Sequence[str] | None = None,
        carried: Mapping[tuple[str, int], Value] | None = None,
        scaled: bool = False,
    ) -> None:
        closing = (m for m in (*mail.incoming, *mail.outgoing) if m.action is None)
        super().__init__(rank, mail.incoming, sorted(closing, key=lambda m: m.edge))
        self.layout, self.step, self.mail, self.scaled = layout, step, mail, scaled
        self.graph = fx.Graph()
        self.modules: dict[str, fx.Graph] = {}
        self.transport = self.graph.placeholder("transport")
        self.batch = WholeBatch(self, inputs, "")
        self.next_batch = None if next_inputs is None else WholeBatch(self, next_inputs, "next_")
        self.carried = dict(carried or {})
        self._store = self.graph.placeholder("carried") if carried else None
        self._scale = self.graph.placeholder("loss_scale") if scaled else None

    # -- nodes

    def begin(self, action: str) -> None:
        self.call(ops.begin, (self.transport, action), f"begin_{action.replace(' ', '_')}")

    def call(self, function: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", function, args, name=name)

    def call_module(self, name: str, body: fx.Graph, args: tuple[Any, ...]) -> fx.Node:
        self.modules[name] = body
        return self.graph.create_node("call_module", name, args)

    def parameters(self, label: str, names: Sequence[str]) -> fx.Node:
        """A list of parameters."""
        body = fx.Graph()
        found = [body.create_node("get_attr", name) for name in names]
        for node in found:
            node.meta["val"] = self.step.state[str(node.target)]
        body.output((found,))
        return self.item(self.call_module(label, body, ()), 0, f"{label}_list")

    def item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        return self.call(operator.getitem, (node, index), name)

    def add(self, parts: Sequence[fx.Node]) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = self.call(torch.ops.aten.add.Tensor, (total, part), f"{parts[0].name}_sum")
        return total

    def filled(self, value: Value, number: float, name: str) -> fx.Node:
        """A tensor like `value` that holds `number` everywhere."""
        return self.call(ops.constant, (number, list(value.shape), value.dtype, str(self.step.device)), name)

    def loss_gradient(self, value: Value, weight: float, name: str) -> fx.Node:
        """The gradient of a micro-batch's loss: its weight in the whole batch's."""
        node = self.filled(value, weight, name)
        if self._scale is not None:
            node.args = (*node.args, self._scale)
        return node

    # -- values

    def fetch(self, name: str, microbatch: int) -> fx.Node:
        if (name, microbatch) in self.carried:
            taken = self.call(ops.take, (self._store, carried_name(name, microbatch)), name_at(name, microbatch))
            taken.meta["val"] = shape_only(self.carried[name, microbatch].shape, self.carried[name, microbatch].dtype)
            return taken
        if name in self.layout.zeros:
            border = self.layout.border(self.layout.zeros[name], microbatch)
            value = next(v for v in border.returns if v.name == name)
            return self.filled(value, 0.0, name_at(name, microbatch))
        return self.batch.samples(name, *microbatch_samples(self.layout.sizes)[microbatch], name_at(name, microbatch))

    # -- messages

    def start_receive(self, message: Message) -> fx.Node:
        return message.received(self.transport, self.step.device, f"recv_{message_name(message)}")

    def wait(self, message: Message, posted: fx.Node) -> fx.Node:
        node = self.call(ops.wait, (posted,), message_name(message))
        node.meta["val"] = shape_only(message.shape, message.dtype)
        return node

    def send(self, message: Message, value: fx.Node) -> None:
        message.sent(self.transport, value, f"send_{message_name(message)}")

    def sends_after(self, action: Action | None) -> list[Message]:
        return self.mail.by_action.get(action, [])

    def uses(self, action: Action) -> Iterable[Use]:
        if action.kind in "FT":
            reads = self.layout.units[action.kind, action.stage].reads
            return [(name, action.microbatch, False) for name in reads]
        if action.kind in "BI":
            border = self.layout.border(("F", action.stage), action.microbatch)
            return [(name, action.microbatch, True) for name in border.tangents]
        return []


def message_name(message: Message) -> str:
    """A node name for what a message carries."""
    if message.kind == "loss":
        return "loss"
    name = ("grad_" if message.kind == "gradient" else "") + message.value.replace(".", "_")
    return name_at(name, message.microbatch) if message.microbatch >= 0 else name


def carried_name(name: str, microbatch: int) -> str:
    """What a value of a micro-batch is called from one step to the next."""
    return f"{name}@{microbatch}"


def name_at(name: str, microbatch: int) -> str:
    """The node name of one micro-batch's value."""
    return f"{name}_mb{microbatch}"


class WholeBatch:
    """The whole-batch values of one batch on one rank: inputs, random draws, and what the prologue makes of them."""

    def __init__(self, writer: RankWriter, inputs: Sequence[str], prefix: str) -> None:
        self._writer, self._prefix = writer, prefix
        self._random = writer.graph.placeholder(f"{prefix}random")
        self._whole = {name: writer.graph.placeholder(prefix + name) for name in inputs}
        self.inputs = tuple(inputs)

    def samples(self, name: str, start: int, stop: int, label: str) -> fx.Node:
        """Samples from `start` to before `stop` of a value; all of one that every sample shares."""
        whole, where = self._value(name), self._writer.step.samples(name)
        if where is None:
            return whole
        place = (where.dim, where.outer, where.inner, start, stop, self._writer.step.batch_size)
        return self._writer.call(ops.slice_batch, (whole, *place), label)

    def _value(self, name: str) -> fx.Node:
        draws = self._writer.step.capture.draws
        if name not in self._whole:
            if name in draws:
                self._whole[name] = self._writer.call(ops.draw, (self._random, draws[name].index), self._prefix + name)
            else:
                self._run_prologue()
        return self._whole[name]

    def _run_prologue(self) -> None:
        graphs = self._writer.step.graphs(WHOLE_BATCH, self._writer.step.batch_size)
        args = tuple(map(self._value, graphs.border.unit.reads))
        result = self._writer.call_module("whole_batch", graphs.forward, args)
        returns = self._writer.item(result, 0, f"{self._prefix}whole_batch_values")
        for index, value in enumerate(graphs.border.returns):
            self._whole[value.name] = self._writer.item(returns, index, self._prefix + value.name)


def shape_only(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What the dump prints beside a value."""
    return torch.empty(shape, dtype=dtype, device="meta")
