"""Advance: others' values of the step before, moved on by their own last change as far as one's own have kept going.

    now     = before + alpha (before - the step before that)       of every other patch
    alpha   = <d, e> / <e, e>, within [0, 1]                       d, e: one's own last change, and the one before it

No message more; what was read last is kept a step longer. Where nothing moves, and where changes are noise, that is a
plain displaced step. Moments are not advanced, nor sums of powers, which must not fall below zero.

fresh   carries two equal steps: nothing is known of the one before it        again   a fresh form that follows a step
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from fxpipe.plan import displaced_ops
from fxpipe.plan.rank_program import Message
from passes.sampling.buckets import ExchangeKey, key_of
from passes.sampling.displaced import CarryingWriter, CrossingWriter, DisplacedWriter
from passes.sampling.exchanges import Exchange

ValueFor = Callable[[int], fx.Node]
Received = Callable[[], dict[int, fx.Node]]


def _once(value_for: ValueFor) -> ValueFor:
    """Each value written once, whoever asks."""
    written: dict[int, fx.Node] = {}

    def value(dst: int) -> fx.Node:
        if dst not in written:
            written[dst] = value_for(dst)
        return written[dst]

    return value


def _own(writer: CrossingWriter, exchange: Exchange, value_for: ValueFor) -> fx.Node | None:
    """What this patch tells the others in an exchange that is advanced, in one; None where it tells nothing."""
    members = [member for bucket in writer.buckets for member in bucket.members]
    told = sorted(m.dst for m in members if key_of(m) == exchange.key and m.src == writer.patch.index)
    if exchange.key not in writer.crossing.advanced or not told:
        return None
    values = list(dict.fromkeys(map(value_for, told)))
    return writer.call(displaced_ops.flat, (values,), f"{exchange.name}_{exchange.kind}_now")


def _is_advanced(writer: CrossingWriter, bucket: Message) -> bool:
    return any(key_of(member) in writer.crossing.advanced for member in bucket.members)


def _change(writer: CrossingWriter, now: fx.Node, before: fx.Node, name: str) -> fx.Node:
    return writer.call(displaced_ops.change, (now, before), f"{name}_change")


class HistoryWriter(CarryingWriter):
    """The fresh form where displaced ones advance."""

    def swap(self, exchange: Exchange, value_for: ValueFor) -> Received:
        value_for = _once(value_for)
        received, own = super().swap(exchange, value_for), _own(self, exchange, value_for)
        if own is not None:
            name = f"{exchange.name}_{exchange.kind}"
            change = _change(self, own, self.earlier(f"{name}_last", own), name)
            self.carries |= {f"{name}_last": own, f"{name}_change": change}
        return received

    def carry(self, bucket: Message) -> fx.Node:
        flat = super().carry(bucket)
        if _is_advanced(self, bucket):
            self.carries[f"{self.name(bucket)}_earlier"] = self.earlier_bucket(bucket, flat)
        return flat

    def earlier(self, name: str, now: fx.Node) -> fx.Node:
        """One's own value of the step before."""
        return now

    def earlier_bucket(self, bucket: Message, now: fx.Node) -> fx.Node:
        """What another patch sent in the step before."""
        return now


class AgainWriter(HistoryWriter):
    """The form `again`."""

    takes_carried = True

    def earlier(self, name: str, now: fx.Node) -> fx.Node:
        return self.take(name)

    def earlier_bucket(self, bucket: Message, now: fx.Node) -> fx.Node:
        return self.arrived(bucket)

    def finish(self) -> None:
        for bucket in self.come:
            if not _is_advanced(self, bucket):
                self.arrived(bucket)
        super().finish()


class AdvancedWriter(DisplacedWriter):
    """The displaced form, and the last."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._alphas: dict[ExchangeKey, fx.Node] = {}
        self._changes: dict[int, fx.Node] = {}  # of buckets

    def swap(self, exchange: Exchange, value_for: ValueFor) -> Received:
        value_for = _once(value_for)
        received, own = super().swap(exchange, value_for), _own(self, exchange, value_for)
        if own is not None:
            name = f"{exchange.name}_{exchange.kind}"
            change, last = _change(self, own, self.take(f"{name}_last"), name), self.take(f"{name}_change")
            if self.sends:
                self.carries |= {f"{name}_last": own, f"{name}_change": change}
            alpha = self.call(displaced_ops.kept_going, (change, last), f"{name}_alpha")
            self._alphas[exchange.key] = alpha
        return received

    def arrived(self, bucket: Message) -> fx.Node:
        flat = super().arrived(bucket)
        if _is_advanced(self, bucket):
            name = f"{self.name(bucket)}_earlier"
            change = _change(self, flat, self.take(name), self.name(bucket))
            self._changes[bucket.edge] = self.unpack(bucket, change, f"{self.name(bucket)}_change")
            if self.sends:
                self.carries[name] = flat
        return flat

    def before(self, bucket: Message, member: Message) -> fx.Node:
        latest = super().before(bucket, member)
        alpha = self._alphas.get(key_of(member))
        if alpha is None:
            return latest
        name = f"{member.value}_of_{bucket.src}"
        change = self.part(self._changes[bucket.edge], bucket, member, f"{name}_change")
        return self.call(displaced_ops.advanced, (latest, change, alpha), f"{name}_advanced")
