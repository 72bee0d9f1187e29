"""Writing one rank's graph: where values come from, and the receives, sends and calls that move them.

read("h", 2)      made on this rank        its node
                  made on another rank     wait(recv(...)), the receive posted earlier, in the order of its channel
                  an input or a draw       slice_batch(whole batch, samples of micro-batch 2)
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpipe import ops
from fxpipe.rank_program import Message
from fxpipe.schedule import Action
from passes.lowering.messages import Layout
from passes.lowering.stage_graphs import StageGraphs
from passes.lowering.units import Value


@dataclass(frozen=True)
class BatchSlice:
    """Where the samples are in a whole-batch value: dimension `dim` is outer x batch x inner."""

    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class Sources:
    """Where values that no unit makes come from.

    `inputs` and `draws` (with their index) are whole-batch values; `prologue` makes further ones from some of them;
    `slices` says how each is cut into micro-batches, None where all samples share it.
    """

    inputs: tuple[str, ...]
    draws: Mapping[str, int]
    prologue: StageGraphs | None
    slices: Mapping[str, BatchSlice | None]

    def inputs_for(self, reads: Collection[str]) -> list[str]:
        """The inputs among what is read, and those that the prologue needs for it."""
        wanted = set(reads)
        if self.prologue is not None and wanted & {v.name for v in self.prologue.returns}:
            wanted |= set(self.prologue.unit.reads)
        return [name for name in self.inputs if name in wanted]


class RankWriter:
    """The graph of one rank as it grows. `values` holds the node of every value of every micro-batch read so far.

    Args:
        inputs, next_inputs: whole-batch inputs of this batch and of the next one that the rank reads.
        carried: shape and type of the values of micro-batches that the step before has made.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        sources: Sources,
        messages: Sequence[Message],
        device: torch.device,
        next_inputs: Sequence[str] | None = None,
        carried: Mapping[tuple[str, int], torch.Tensor] | None = None,
        trains: bool = True,
    ) -> None:
        self.rank, self.layout, self.sources, self.messages, self.device = rank, layout, sources, messages, device
        self.graph = fx.Graph()
        self.modules: dict[str, fx.Graph] = {}
        self.transport = self.graph.placeholder("transport")
        self.batch = WholeBatch(self, self._inputs_needed() if trains else [], "")
        self.next_batch = None if next_inputs is None else WholeBatch(self, next_inputs, "next_")
        self.carried = dict(carried or {})
        self._store = self.graph.placeholder("carried") if carried else None
        self.values: dict[tuple[str, int], fx.Node] = {}
        self._posted: dict[int, fx.Node] = {}
        self._arrived: dict[int, fx.Node] = {}

    # -- nodes

    def begin(self, action: str) -> None:
        self.call(ops.begin, (self.transport, action), f"begin_{action.replace(' ', '_')}")

    def call(self, function: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", function, args, name=name)

    def call_module(self, name: str, body: fx.Graph, args: tuple[Any, ...]) -> fx.Node:
        self.modules[name] = body
        return self.graph.create_node("call_module", name, args)

    def item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        return self.call(operator.getitem, (node, index), name)

    def add(self, parts: Sequence[fx.Node]) -> fx.Node:
        """The sum of one or more nodes, from first to last."""
        total = parts[0]
        for part in parts[1:]:
            total = self.call(torch.ops.aten.add.Tensor, (total, part), f"{parts[0].name}_sum")
        return total

    def filled(self, value: Value, number: float, name: str) -> fx.Node:
        """A tensor like `value` that holds `number` everywhere."""
        return self.call(ops.constant, (number, list(value.shape), value.dtype, str(self.device)), name)

    # -- values

    def read(self, name: str, microbatch: int) -> fx.Node:
        """A value of one micro-batch: made here or in the step before, received, or cut from the whole batch."""
        if (name, microbatch) not in self.values:
            self.values[name, microbatch] = self._fetch(name, microbatch)
        return self.values[name, microbatch]

    def _fetch(self, name: str, microbatch: int) -> fx.Node:
        if name in self.layout.producer:
            return self.receive(self._incoming_by_use[name, microbatch, False][0])
        if (name, microbatch) in self.carried:
            taken = self.call(ops.take, (self._store, carried_name(name, microbatch)), name_at(name, microbatch))
            taken.meta["val"] = self.carried[name, microbatch]
            return taken
        sizes = self.layout.sizes
        if name in self.layout.zeros:
            return self.filled(self.layout.zeros[name][sizes[microbatch]], 0.0, name_at(name, microbatch))
        start = sum(sizes[:microbatch])
        return self.batch.samples(name, start, start + sizes[microbatch], name_at(name, microbatch))

    def _inputs_needed(self) -> list[str]:
        units = {unit for (unit, _), rank in self.layout.rank_of.items() if rank == self.rank}
        reads = {name for unit in units for name in next(iter(self.layout.graphs[unit].values())).unit.reads}
        return self.sources.inputs_for(reads)

    # -- messages

    def gradients_from_others(self, value: str, microbatch: int) -> dict[int, Message]:
        """The gradient of `value` that each other rank sends, by rank."""
        return {m.src: m for m in self._incoming_by_use.get((value, microbatch, True), ())}

    def post_all(self, action: Action) -> None:
        """Post every receive that `action` needs, and those before it on the same channels."""
        for use in self._uses(action):
            for message in self._incoming_by_use.get(use, ()):
                self.post(message)

    def post(self, message: Message) -> None:
        queue = self._queues[message.src]
        while message.edge not in self._posted:
            following = queue.pop(0)
            args = (self.transport, following.src, following.edge, list(following.shape), following.dtype)
            node = self.call(ops.recv, (*args, str(self.device)), f"recv_{message_name(following)}")
            node.meta["message"] = following
            self._posted[following.edge] = node

    def receive(self, message: Message) -> fx.Node:
        self.post(message)
        if message.edge not in self._arrived:
            node = self.call(ops.wait, (self._posted[message.edge],), message_name(message))
            node.meta["val"] = shape_only(message.shape, message.dtype)
            self._arrived[message.edge] = node
        return self._arrived[message.edge]

    def send(self, message: Message, value: fx.Node) -> None:
        node = self.call(ops.send, (self.transport, value, message.dst, message.edge), f"send_{message_name(message)}")
        node.meta["message"] = message

    def sends_after(self, action: Action | None) -> list[Message]:
        return self._outgoing.get(action, [])

    def _uses(self, action: Action) -> list[tuple[str, int, bool]]:
        if action.kind in "FT":
            graphs = self.layout.graph((action.kind, action.stage), action.microbatch)
            return [(name, action.microbatch, False) for name in graphs.unit.reads]
        if action.kind in "BI":
            graphs = self.layout.graph(("F", action.stage), action.microbatch)
            return [(name, action.microbatch, True) for name in graphs.tangents]
        return []

    @cached_property
    def _queues(self) -> dict[int, list[Message]]:
        """Receives not yet posted, in the order of each channel."""
        queues: dict[int, list[Message]] = {}
        for message in self.messages:
            if message.dst == self.rank:
                queues.setdefault(message.src, []).append(message)
        return queues

    @cached_property
    def _incoming_by_use(self) -> dict[tuple[str, int, bool], list[Message]]:
        """Messages by (value, micro-batch, whether a gradient)."""
        uses: dict[tuple[str, int, bool], list[Message]] = {}
        for message in self.messages:
            if message.dst == self.rank:
                uses.setdefault((message.value, message.microbatch, message.kind == "gradient"), []).append(message)
        return uses

    @cached_property
    def _outgoing(self) -> dict[Action | None, list[Message]]:
        table: dict[Action | None, list[Message]] = {}
        for message in self.messages:
            if message.src == self.rank:
                table.setdefault(message.action, []).append(message)
        return table


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
        whole, where = self._value(name), self._writer.sources.slices[name]
        if where is None:
            return whole
        place = (where.dim, where.outer, where.inner, start, stop, sum(self._writer.layout.sizes))
        return self._writer.call(ops.slice_batch, (whole, *place), label)

    def _value(self, name: str) -> fx.Node:
        draws = self._writer.sources.draws
        if name not in self._whole:
            if name in draws:
                self._whole[name] = self._writer.call(ops.draw, (self._random, draws[name]), self._prefix + name)
            else:
                self._run_prologue()
        return self._whole[name]

    def _run_prologue(self) -> None:
        prologue = self._writer.sources.prologue
        assert prologue is not None
        result = self._writer.call_module("whole_batch", prologue.forward, tuple(map(self._value, prologue.unit.reads)))
        returns = self._writer.item(result, 0, f"{self._prefix}whole_batch_values")
        for index, value in enumerate(prologue.returns):
            self._whole[value.name] = self._writer.item(returns, index, self._prefix + value.name)


def shape_only(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What the dump prints beside a value."""
    return torch.empty(shape, dtype=dtype, device="meta")
