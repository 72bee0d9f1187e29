"""Displaced forms: others' values are those of the step before (Li et al., "DistriFusion", CVPR 2024).

fresh       k_from_1 = wait(recv(...)); ...                carries done(pack([k_from_1, v_from_1]))
displaced   send(pack([k, v]), to 1)                       carries recv(bucket of 1), of which nobody waits in this step
            k_from_1, v_from_1 = unpack(wait(take(carried bucket of 1)))
            k_whole = cat([k, k_from_1]), v_whole = ...    one's own rows of now beside the others' of before
last        as displaced, without send and recv

What a patch reads is a property of these graphs, never of timing: of others the step before, even if newer values have
arrived. Where nothing changes from a step to the next a displaced step is exact.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan import displaced_ops, ops, row_ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import FALLEN, SampleProgram
from passes.rows import RowPlan
from passes.sampling.buckets import Key, displaced_messages, key_of
from passes.sampling.exchanges import Exchange
from passes.sampling.fresh import FormWriter
from passes.sampling.messages import exchange_nodes, messages_of
from passes.sampling.patches import Patch

Norms = Literal["corrected", "merged", "sync", "separate"]
"""The moments of a displaced group norm: the others' of the step before moved on as one's own have moved; as they were;
all of this step, waited for; one's own alone, which is not exact where nothing changes."""

Messages = dict[str, tuple[Message, ...]]


def displaced_programs(
    plan: RowPlan, patches: Sequence[Patch], graphs: Sequence[fx.Graph], device: torch.device, norms: Norms
) -> tuple[tuple[SampleProgram, ...], Messages]:
    """One program per patch with the forms fresh, displaced and last; every form's messages in order of channels."""
    everything = messages_of(patches, graphs)
    fresh = {key for graph in graphs for key in _read_by_all(graph)}
    fresh |= {key_of(m) for m in everything if m.kind == "moments" and norms == "sync"}
    fresh |= {_key(node) for node in exchange_nodes(graphs[0])} - {key_of(m) for m in everything}
    dropped = {key_of(m) for m in everything if m.kind == "moments" and norms == "separate"} - fresh
    displaced = displaced_messages([m for m in everything if key_of(m) not in dropped], fresh)
    messages = {"fresh": tuple(everything), "displaced": displaced}
    messages["last"] = tuple(message for message in displaced if not message.crosses)
    programs = []
    for patch, graph in zip(patches, graphs, strict=True):
        forms = {}
        for form in messages:
            kind: type[_CrossingWriter] = _CarryingWriter if form == "fresh" else _DisplacedWriter
            writer = kind(plan, patches, patch, messages[form], displaced, fresh, norms, device, form != "last")
            forms[form] = writer.write(graph)
        programs.append(SampleProgram(patch.index, forms, writer.inputs, writer.state))
    return tuple(programs), messages


def _read_by_all(graph: fx.Graph) -> set[Key]:
    """The exchanges after which every patch makes the whole prediction: all must read the same, so they stay fresh."""
    (output,) = graph.find_nodes(op="output")
    seen, keys, todo = set[fx.Node](), set[Key](), [*output.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        exchange: Exchange | None = node.meta.get("exchange")
        if exchange is None:
            todo += node.all_input_nodes
        elif exchange.state is not None and not exchange.state.all_rows:
            raise CompileError(
                "displaced patches would predict entries that belong to no row each in their own way; use mode='exact'"
            )
        else:
            keys.add(_key(node))
    return keys


def _key(node: fx.Node) -> Key:
    exchange: Exchange = node.meta["exchange"]
    return exchange.name, exchange.kind


class _CrossingWriter(FormWriter):
    """What forms share whose values cross to the next step.

    Args:
        messages: of this form. crossing: of the displaced form, among them the buckets. fresh: the exchanges that never
            cross. carries: whether a step follows that reads what this one makes.
    """

    def __init__(
        self, plan: RowPlan, patches: Sequence[Patch], patch: Patch, messages: Sequence[Message],
        crossing: Sequence[Message], fresh: Collection[Key], norms: Norms, device: torch.device, carries: bool,
    ) -> None:  # fmt: skip
        mine = [message for message in messages if patch.index in message.channel]
        super().__init__(plan, patches, patch, [message for message in mine if not message.crosses], device)
        self.fresh, self.norms = fresh, norms
        self.buckets = [message for message in crossing if message.crosses and patch.index in message.channel]
        self.come = [bucket for bucket in self.buckets if bucket.dst == patch.index]
        self.sends = carries

    def is_fresh(self, exchange: Exchange) -> bool:
        return (exchange.name, exchange.kind) in self.fresh

    def corrects(self, exchange: Exchange) -> bool:
        return self.norms == "corrected" and not self.is_fresh(exchange)

    def name(self, bucket: Message) -> str:
        return f"{bucket.value}_from_{bucket.src}"


class _CarryingWriter(_CrossingWriter):
    """The fresh form before displaced ones: what has arrived is also carried, in the buckets that they read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrived: dict[int, fx.Node] = {}

    def swap(self, exchange: Exchange, value_for: Callable[[int], fx.Node]) -> Callable[[], dict[int, fx.Node]]:
        received = super().swap(exchange, value_for)
        return lambda: self._carried_on(exchange, received())

    def _carried_on(self, exchange: Exchange, received: dict[int, fx.Node]) -> dict[int, fx.Node]:
        for bucket in self.come:
            for member in bucket.members:
                if key_of(member) == (exchange.name, exchange.kind):
                    self._arrived[member.edge] = received[bucket.src]
                    self._carry(bucket)
        return received

    def _carry(self, bucket: Message) -> None:
        """Once all members are there."""
        if all(member.edge in self._arrived for member in bucket.members):
            values = [self._arrived[member.edge] for member in bucket.members]
            flat = self.call(displaced_ops.pack, (values,), f"packed_{self.name(bucket)}")
            self.carries[self.name(bucket)] = self.call(displaced_ops.done, (flat,), self.name(bucket))

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        exchange: Exchange = node.meta["exchange"]
        if self.corrects(exchange):
            self.carries[f"{exchange.name}_own"] = own
        return super().merged(node, own, received)


class _DisplacedWriter(_CrossingWriter):
    """The displaced form, and the last, which sends no bucket."""

    takes_carried = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._made: dict[int, fx.Node] = {}
        self._unpacked: dict[int, fx.Node] = {}
        self._num_fallen: list[fx.Node] = []

    def swap(self, exchange: Exchange, value_for: Callable[[int], fx.Node]) -> Callable[[], dict[int, fx.Node]]:
        if self.is_fresh(exchange):
            return super().swap(exchange, value_for)
        key = exchange.name, exchange.kind
        if self.sends:
            self._send(key, value_for)
        read = [(bucket, member) for bucket in self.come for member in bucket.members if key_of(member) == key]
        return lambda: {bucket.src: self._before(bucket, member) for bucket, member in read}

    def _send(self, key: Key, value_for: Callable[[int], fx.Node]) -> None:
        """Keep what buckets take; send, and post, those of which this exchange is the last."""
        for bucket in self.buckets:
            for member in bucket.members:
                if key_of(member) == key and member.src == self.patch.index:
                    self._made[member.edge] = value_for(member.dst)
        for bucket in self.buckets:
            if key_of(bucket.members[-1]) == key:
                self._close(bucket)

    def _close(self, bucket: Message) -> None:
        if bucket.src == self.patch.index:
            values = [self._made.pop(member.edge) for member in bucket.members]
            flat = self.call(displaced_ops.pack, (values,), f"{bucket.value}_to_{bucket.dst}")
            args: tuple[Any, ...] = (self.transport, flat, bucket.dst, bucket.edge)
            node = self.call(ops.send, args, f"send_{bucket.value}_to_{bucket.dst}")
        else:
            args = (bucket.src, bucket.edge, list(bucket.shape), bucket.dtype, str(self.device))
            node = self.call(ops.recv, (self.transport, *args), f"recv_{self.name(bucket)}")
            self.carries[self.name(bucket)] = node
        node.meta["message"] = bucket

    def _before(self, bucket: Message, member: Message) -> fx.Node:
        """What a patch sent in the step before; its bucket is waited for where the first of its members is read."""
        if bucket.edge not in self._unpacked:
            name = self.name(bucket)
            flat = self.call(ops.wait, (self.take(name),), name)
            shapes = [list(one.shape) for one in bucket.members]
            self._unpacked[bucket.edge] = self.call(displaced_ops.unpack, (flat, shapes), f"unpacked_{name}")
        place = bucket.members.index(member)
        return self.call(operator.getitem, (self._unpacked[bucket.edge], place), f"{member.value}_of_{bucket.src}")

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        exchange: Exchange = node.meta["exchange"]
        if self.is_fresh(exchange) or self.norms == "merged":
            return super().merged(node, own, received)
        if self.norms == "separate":
            return own
        before = self.take(f"{exchange.name}_own")
        if self.sends:
            self.carries[f"{exchange.name}_own"] = own
        args = (self.ordered(own, received), [before], [self.patch.index], self.counts(node))
        both = self.call(displaced_ops.corrected_moments, args, f"{node.name}_corrected")
        self._num_fallen.append(self.call(operator.getitem, (both, 1), f"{node.name}_fallen"))
        return self.call(operator.getitem, (both, 0), node.name, None, node)

    def finish(self) -> None:
        if self._num_fallen:
            self.carries[FALLEN] = self.call(row_ops.add_up, (self._num_fallen,), FALLEN)
        if not self.taken:
            self.graph.erase_node(self._carried)
