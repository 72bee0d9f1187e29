"""Messages over communicators: those of `fxpipe.plan.lanes`, a bounded number of each rank's.

    own      isend, irecv as the program says: nothing but the channel itself waits for it
    shared   begin      the form's send order: what comes here, and when
             send, recv are noted
             turn       before the rank waits: a batch of all that is due, sends and receives, in the send order

So receives on the shared communicator may start before the program posts them, and never later than the order allows;
`tests/lane_check.py` runs programs on the same `Turns`. Work in flight ends where a rank waits for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from fxpipe.plan.lanes import Lanes, SendOrder, Turns, lanes
from fxpipe.plan.rank_program import Message
from fxpipe.plan.transport import Channel
from fxpipe.run.transport import message_tag


class Started(Protocol):
    """A send or receive that has been given to the transport."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


def begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank takes part in what it starts"
    return work


@dataclass
class Coming:
    """A message whose work may be started later, and the tensor that it is in or comes into."""

    work: Started | None = None
    buffer: torch.Tensor | None = None

    def wait(self, *timeout: timedelta) -> bool:
        assert self.work is not None, "a message is waited for before its turn"
        return self.work.wait(*timeout)

    def is_completed(self) -> bool:
        return self.work is not None and self.work.is_completed()

    @property
    def tensor(self) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer


class Grouped:
    """One rank's communicators; `num_own` of them are of single channels at most."""

    def __init__(self, rank: int, device: torch.device, timeout: timedelta, num_own: int) -> None:
        self._rank, self._device, self._timeout, self._num_own = rank, device, timeout, num_own
        self.lanes = Lanes()
        self._own: dict[Channel, dist.ProcessGroup] = {}
        self._shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._retired: list[dist.ProcessGroup] = []
        self._order: SendOrder | None = None
        self._form = 0  # counts forms: what an earlier one has posted is started
        self._turns = Turns()
        self._incoming: dict[int, Message] = {}  # by position, of this form, not yet started
        self._outgoing: dict[int, tuple[Coming, int, int]] = {}  # by position: what, to whom, its tag
        self._received: dict[int, Coming] = {}  # by edge: started, not yet asked for; or asked for, not yet started

    # -- communicators

    def open(self, channels: Mapping[Channel, int]) -> None:
        """Collective: communicators for more channels. A shared one that grows is made anew.

        A first message of each channel builds what NCCL builds late, which would otherwise make the first send block.
        """
        before, self.lanes = self.lanes, lanes(channels, self._num_own, self.lanes)
        for channel in sorted(self.lanes.own - before.own):
            group = self._made(channel)
            if group is not None:
                self._own[channel] = group
                self._greet([channel], group)
        for ranks in sorted(set(self.lanes.groups) - set(before.groups)):
            group = self._made(ranks)
            if group is not None:
                self._retired += self._shared.values()
                self._shared = {ranks: group}
                self._greet([c for c in sorted(self.lanes.shared) if self._rank in c], group)

    def _made(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Collective over all ranks; None on those that have no part in it."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        group = dist.new_group(sorted(ranks), backend=backend, timeout=self._timeout)
        return group if self._rank in ranks else None

    def _greet(self, channels: list[Channel], group: dist.ProcessGroup) -> None:
        ops = []
        for src, dst in channels:
            token, sends = torch.zeros(1, device=self._device), src == self._rank
            ops.append(dist.P2POp(dist.isend if sends else dist.irecv, token, dst if sends else src, group))
        for work in _started(ops):
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def groups(self) -> list[dist.ProcessGroup]:
        return [*self._own.values(), *self._shared.values(), *self._retired]

    def retire(self) -> None:
        """Nothing is on its way: ends communicators that larger ones have replaced."""
        while self._retired:
            dist.destroy_process_group(self._retired.pop())

    def with_ranks(self) -> Iterator[tuple[tuple[int, ...], dist.ProcessGroup]]:
        yield from self._own.items()
        yield from self._shared.items()

    # -- messages

    def begin(self, sends: Callable[[], SendOrder]) -> None:
        """A form: what comes to this rank on the shared communicator."""
        self._form += 1
        if not self._shared:
            return
        assert not self._incoming, "a form begins before the one before it has ended"
        self._order = sends()
        self._incoming = dict(self._order.incoming(self._rank, self.lanes.shared))
        self._turns = Turns(self._incoming)

    def send(self, tensor: torch.Tensor, dst: int, edge: int, tag: int) -> Started:
        channel = self._rank, dst
        if channel in self._own:
            return begun(dist.isend(tensor, dst, group=self._own[channel], tag=tag))
        going, position = Coming(buffer=tensor), self._position(edge, channel)
        self._outgoing[position] = going, dst, tag
        self._turns.send(position)
        return going

    def recv(self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> Coming:
        channel = src, self._rank
        if channel in self._own:
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
            return Coming(begun(dist.irecv(buffer, src, group=self._own[channel], tag=tag)), buffer)
        self._position(edge, channel)
        return self._received.pop(edge, None) or self._received.setdefault(edge, Coming())

    def turn(self, edge: int | None) -> Callable[[], None]:
        """Starts what is due before a wait for a message or reduction of this form, or before its end (None)."""
        if not self._shared:
            return lambda: None
        form = self._form
        position: float = math.inf if edge is None or self._order is None else self._order.positions[edge]
        return lambda: self._start(position if form == self._form else -1)

    def _position(self, edge: int, channel: Channel) -> int:
        assert channel in self.lanes.shared, f"channel {channel} is used before open_channels has opened it"
        assert self._order is not None, f"channel {channel} shares a communicator, and no form has begun"
        return self._order.positions[edge]

    def _start(self, position: float) -> None:
        """The batch that is due."""
        (group,) = self._shared.values()
        coming, ops = list[Coming](), list[dist.P2POp]()
        for due in self._turns.due(position):
            if due in self._outgoing:
                going, dst, tag = self._outgoing.pop(due)
                ops.append(dist.P2POp(dist.isend, going.tensor, dst, group, tag))
                coming.append(going)
            else:
                coming.append(self._receive(self._incoming.pop(due), group, ops))
        for one, work in zip(coming, _started(ops), strict=True):
            one.work = work

    def _receive(self, message: Message, group: dist.ProcessGroup, ops: list[dist.P2POp]) -> Coming:
        buffer = torch.empty(message.shape, dtype=message.dtype, device=self._device)
        tag = message_tag(message.edge, tuple(message.shape), message.dtype)
        ops.append(dist.P2POp(dist.irecv, buffer, message.src, group, tag))
        one = self._received.pop(message.edge, None) or self._received.setdefault(message.edge, Coming())
        one.buffer = buffer
        return one


def _started(ops: list[dist.P2POp]) -> list[dist.Work]:
    """The work of each; NCCL has one for all."""
    works = dist.batch_isend_irecv(ops) if ops else []
    return works if len(works) == len(ops) else works * len(ops)
