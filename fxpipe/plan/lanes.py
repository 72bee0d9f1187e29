"""Which communicators carry the messages of ranks: a bounded number of each rank's, whatever the number of ranks.

    0 -> 1, 1 -> 0, 1 -> 2, 2 -> 1     own: a communicator of these two ranks for this direction alone, heaviest first,
                                       as long as both ranks have fewer than `num_own`
    2 -> 0, 3 -> 0, 0 -> 4, ...        shared: the rest, one communicator for each set of ranks that they connect

On NCCL a communicator does what a rank has given it one after the other, and an operation ends when both ends have come
to it. On a channel's own communicator that holds nobody up but the channel. On a shared one all ranks keep one order,
the *send order*: of a Kahn network's run, in which whoever sends has waited for earlier messages only. Right before a
rank waits for anything, it starts one batch there: its sends since the last one, and all receives up to the position of
what it waits for or has sent (`Turns`). So nothing that is started later comes earlier in the order than what has been
started, on any rank, and no rank can wait forever: of all messages that never arrive take the first. Whoever sends it
has waited for earlier ones only, and in no batch that has a later one before it sends, for those end at what is sent;
whoever receives it and waits, waits for a later one and has started it; and all batches before it, at both ends, have
earlier messages only, which have arrived. `tests/lane_check.py` runs this machine on programs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.plan.rank_program import Message
from fxpipe.plan.transport import Channel

NUM_OWN = 6
"""A rank's communicators of single channels: both directions to both neighbours of a line, and two more.

With the shared one and the stream that computes they are as many as the queues that a GPU has by default
(CUDA_DEVICE_MAX_CONNECTIONS)."""


@dataclass(frozen=True)
class Lanes:
    """Channels with a communicator of their own, and those that share one."""

    own: frozenset[Channel] = frozenset()
    shared: frozenset[Channel] = frozenset()

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every shared communicator: no rank is in two."""
        found: dict[int, set[int]] = {}
        for src, dst in self.shared:
            if src not in found or found[src] is not found.get(dst):
                joined = {src, dst}.union(found.get(src, ()), found.get(dst, ()))
                found |= dict.fromkeys(joined, joined)
        return tuple(sorted({tuple(sorted(ranks)) for ranks in found.values()}))

    def count(self, rank: int) -> int:
        """A rank's communicators for messages."""
        return sum(rank in channel for channel in self.own) + sum(rank in ranks for ranks in self.groups)


def lanes(channels: Mapping[Channel, int], num_own: int = NUM_OWN, known: Lanes | None = None) -> Lanes:
    """The communicators of channels, by the bytes they carry, beside those that there are; the same on every rank."""
    known = known or Lanes()
    own, shared = set(known.own), set(known.shared)
    used = Counter(rank for channel in own for rank in channel)
    for channel in sorted(channels.keys() - own - shared, key=lambda channel: (-channels[channel], channel)):
        if max(used[rank] for rank in channel) < num_own:
            own.add(channel)
            used.update(channel)
        else:
            shared.add(channel)
    return Lanes(frozenset(own), frozenset(shared))


@dataclass(frozen=True, eq=False)
class SendOrder:
    """All messages of one form of a step, each after those that its sender may wait for before it sends it.

    `positions` has the place of each, and of each reduction when its last rank starts it, by edge.
    """

    messages: tuple[Message, ...]
    positions: Mapping[int, int]

    @staticmethod
    def of(messages: Iterable[Message], edges: Sequence[int]) -> "SendOrder":
        """In the order of `edges`, which may be of reductions too."""
        positions = {edge: position for position, edge in enumerate(edges)}
        return SendOrder(tuple(sorted(messages, key=lambda message: positions[message.edge])), positions)

    def incoming(self, rank: int, channels: frozenset[Channel]) -> Iterator[tuple[int, Message]]:
        """What comes to a rank by these channels, with its position."""
        for message in self.messages:
            if message.dst == rank and message.channel in channels:
                yield self.positions[message.edge], message


class Turns:
    """When one rank starts its operations on the shared communicator: by their positions, in batches."""

    def __init__(self, incoming: Iterable[int] = ()) -> None:
        self._incoming, self._outgoing = sorted(incoming, reverse=True), list[int]()

    def send(self, position: int) -> None:
        self._outgoing.append(position)

    def due(self, position: float) -> list[int]:
        """What to start, at once and in this order, before the rank waits for what has this position."""
        last = max([position, *self._outgoing])
        batch, self._outgoing = self._outgoing, []
        while self._incoming and self._incoming[-1] <= last:
            batch.append(self._incoming.pop())
        return sorted(batch)
