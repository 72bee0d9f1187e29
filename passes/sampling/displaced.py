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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.plan import displaced_ops, ops
from fxpipe.plan.displaced_ops import USABLE
from fxpipe.plan.rank_program import Message
from passes.rows import RowPlan
from passes.sampling.buckets import ExchangeKey, key_of, leaving_last
from passes.sampling.exchanges import Exchange
from passes.sampling.fresh import FormWriter
from passes.sampling.patches import Patch


@dataclass(frozen=True)
class Crossing:
    """What of a step crosses to the next: all exchanges but the `fresh` ones, in `buckets`, norms as `norms` says.

    What others tell in `advanced` ones is moved on.
    """

    fresh: frozenset[ExchangeKey]
    buckets: tuple[Message, ...]
    norms: str
    advanced: frozenset[ExchangeKey]

    def of(self, exchange: Exchange) -> bool:
        return exchange.key not in self.fresh


class CrossingWriter(FormWriter):
    """What forms share whose values cross. `messages` are those of this step alone; `carries`: another step follows."""

    def __init__(
        self, plan: RowPlan, patches: Sequence[Patch], patch: Patch, messages: Sequence[Message],
        device: torch.device, crossing: Crossing, carries: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(plan, patches, patch, messages, device)
        self.crossing, self.sends = crossing, carries
        self.buckets = [bucket for bucket in crossing.buckets if patch.index in bucket.channel]
        self.come = [bucket for bucket in self.buckets if bucket.dst == patch.index]
        self.corrected = list[fx.Node]()  # of the exchanges of moments that are, where these may be used

    def corrects(self, exchange: Exchange) -> bool:
        return self.crossing.norms == "corrected" and self.crossing.of(exchange)

    def name(self, bucket: Message) -> str:
        return f"{bucket.value}_from_{bucket.src}"

    def arrived(self, bucket: Message) -> fx.Node:
        """What a patch sent in the step before."""
        name = self.name(bucket)
        return self.call(ops.wait, (self.take(name),), name)


class CarryingWriter(CrossingWriter):
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
                if key_of(member) == exchange.key:
                    self._arrived[member.edge] = received[bucket.src]
                    if all(one.edge in self._arrived for one in bucket.members):
                        self.carry(bucket)
        return received

    def carry(self, bucket: Message) -> fx.Node:
        """What has come instead of a bucket, as it would be in one."""
        values = [self._arrived[member.edge] for member in bucket.members]
        flat = self.call(displaced_ops.pack, (values,), f"packed_{self.name(bucket)}")
        self.carries[self.name(bucket)] = self.call(displaced_ops.done, (flat,), f"done_{self.name(bucket)}")
        return flat

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        exchange: Exchange = node.meta["exchange"]
        if self.corrects(exchange):
            self.carries[f"{exchange.name}_own"] = own
            if USABLE not in self.carries:
                self.carries[USABLE] = self.call(displaced_ops.uncounted, (own,), USABLE)
        return super().merged(node, own, received)


class DisplacedWriter(CrossingWriter):
    """The displaced form, and the last, which sends no bucket."""

    takes_carried = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._made: dict[int, fx.Node] = {}
        self._unpacked: dict[int, fx.Node] = {}
        self._late = leaving_last(self.buckets)
        self._last_waited = next(reversed(self.messages), None)

    def swap(self, exchange: Exchange, value_for: Callable[[int], fx.Node]) -> Callable[[], dict[int, fx.Node]]:
        key = exchange.key
        if not self.crossing.of(exchange):
            received = super().swap(exchange, value_for)
            if self.sends and key == self._last_waited:
                self._close(bucket for bucket in self.buckets if bucket.edge in self._late)
            return received
        if self.sends:
            self._send(key, value_for)
        read = [(bucket, member) for bucket in self.come for member in bucket.members if key_of(member) == key]
        return lambda: {bucket.src: self.before(bucket, member) for bucket, member in read}

    def _send(self, key: ExchangeKey, value_for: Callable[[int], fx.Node]) -> None:
        """Keep what buckets take; send, and post, those that this exchange fills."""
        for bucket in self.buckets:
            for member in bucket.members:
                if key_of(member) == key and member.src == self.patch.index:
                    self._made[member.edge] = self._kept(member, value_for(member.dst))
        full = (bucket for bucket in self.buckets if bucket.edge not in self._late)
        self._close(bucket for bucket in full if key_of(bucket.members[-1]) == key)

    def _kept(self, member: Message, value: fx.Node) -> fx.Node:
        """A value until its bucket leaves; a few rows are copied, or all of what they are rows of would be kept."""
        if member.kind != "halo":
            return value
        return self.call(displaced_ops.flat, ([value],), f"{member.value}_edge_for_{member.dst}")

    def _close(self, buckets: Iterable[Message]) -> None:
        for bucket in sorted(buckets, key=lambda one: one.src == self.patch.index):  # posted before sent, as fresh
            self._leave(bucket)

    def _leave(self, bucket: Message) -> None:
        if bucket.src == self.patch.index:
            values = [self._made.pop(member.edge) for member in bucket.members]
            flat = self.call(displaced_ops.pack, (values,), f"{bucket.value}_to_{bucket.dst}")
            bucket.sent(self.transport, flat, f"send_{bucket.value}_to_{bucket.dst}")
        else:
            name = self.name(bucket)
            self.carries[name] = bucket.received(self.transport, self.device, f"recv_{name}")

    def before(self, bucket: Message, member: Message) -> fx.Node:
        """A value of the step before; its bucket is waited for where the first of its members is read."""
        if bucket.edge not in self._unpacked:
            self._unpacked[bucket.edge] = self.unpack(bucket, self.arrived(bucket), self.name(bucket))
        return self.part(self._unpacked[bucket.edge], bucket, member, f"{member.value}_of_{bucket.src}")

    def unpack(self, bucket: Message, flat: fx.Node, name: str) -> fx.Node:
        shapes = [list(member.shape) for member in bucket.members]
        return self.call(displaced_ops.unpack, (flat, shapes), f"unpacked_{name}")

    def part(self, values: fx.Node, bucket: Message, member: Message, name: str) -> fx.Node:
        return self.call(operator.getitem, (values, bucket.members.index(member)), name)

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        exchange: Exchange = node.meta["exchange"]
        if self.crossing.of(exchange) and self.crossing.norms == "separate":
            return own
        if not self.corrects(exchange):
            return super().merged(node, own, received)
        before = self.take(f"{exchange.name}_own")
        if self.sends:
            self.carries[f"{exchange.name}_own"] = own
        args = (self.ordered(own, received), [before], [self.patch.index], self.counts(node))
        moments, usable = corrected(self, args, node)
        self.corrected.append(usable)
        return moments

    def finish(self) -> None:
        if self.sends and self.corrected:
            self.carries[USABLE] = self.call(displaced_ops.counted, (self.take(USABLE), self.corrected), USABLE)
        if not self.taken:
            self.graph.erase_node(self._carried)


def corrected(writer: FormWriter, args: tuple[Any, ...], node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The moments, and where they are corrected ones."""
    both = writer.call(displaced_ops.corrected, args, f"{node.name}_corrected")
    return writer.call(operator.getitem, (both, 0), node.name, None, node), writer.call(
        operator.getitem, (both, 1), f"{node.name}_usable"
    )
