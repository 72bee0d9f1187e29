"""Watching a run: a transport that reports what its rank does, as events in the terms of a prediction."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from fxpipe.plan.timeline import Event, Timeline, kind_of
from fxpipe.plan.transport import Pending, T, Transport
from fxpipe.run.transport import describe, num_bytes

Observe = Callable[[Event], None]
"""Called with every event as it ends, by the thread of its rank. Seconds are of `time.perf_counter`."""


class Observed:
    """A rank's transport that reports actions and waits as they end, and sends as transfers of no length.

    On a GPU kernels outlive their launch: there an observed rank waits for its device where an action or a wait ends,
    so that times are those of the work. That makes the step itself slower.
    """

    def __init__(self, transport: Transport, observe: Observe) -> None:
        self._transport, self._observe = transport, observe
        self._action, self._start = "", 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def set_action(self, action: str) -> None:
        self._end_action()
        self._action, self._start = action, self._now()
        self._transport.set_action(action)

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        now = self._now()
        self._transport.send(tensor, dst, edge)
        label = describe(edge, tuple(tensor.shape), tensor.dtype)
        self._observe(Event(self.rank, self._action, "transfer", now, now, dst, edge, num_bytes(tensor), label))

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[torch.Tensor]:
        pending = self._transport.recv(src, edge, shape, dtype, device)
        size = math.prod(shape) * dtype.itemsize
        return Pending(lambda: self._waited(pending, src, edge, size, describe(edge, shape, dtype)))

    def all_reduce(self, tensors: list[torch.Tensor], ranks: tuple[int, ...], edge: int) -> Pending[list[torch.Tensor]]:
        return self._told("reduce", tensors, edge, self._transport.all_reduce(tensors, ranks, edge))

    def reduce_scatter(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        return self._told("reduce_scatter", tensors, edge, self._transport.reduce_scatter(tensors, owners, ranks, edge))

    def broadcast(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[None]:
        return self._told("all_gather", tensors, edge, self._transport.broadcast(tensors, owners, ranks, edge))

    def gather(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        return self._told("all_gather", tensors, edge, self._transport.gather(tensors, owners, ranks, edge))

    def advance(self) -> None:
        self._end_action()
        self._transport.advance()

    def flush(self) -> None:
        self._end_action()
        self._transport.flush()

    def _told(self, kind: str, tensors: list[torch.Tensor], edge: int, pending: Pending[T]) -> Pending[T]:
        """A collective that has just started."""
        start, size = self._now(), sum(map(num_bytes, tensors))
        label = f"{len(tensors)} {'parameters' if kind == 'all_gather' else 'gradients'}"
        return Pending(lambda: self._waited(pending, -1, edge, size, label, (kind, start)))

    def _waited(
        self,
        pending: Pending[T],
        peer: int,
        edge: int,
        size: int,
        label: str,
        collective: tuple[str, float] | None = None,
    ) -> T:
        """Wait, and report it, and a collective (its kind, its start on this rank) until the end of the wait."""
        start = self._now()
        value = pending.wait()
        end, what = self._now(), (peer, edge, size, label)
        self._observe(Event(self.rank, self._action, "wait", start, end, *what))
        if collective is not None:
            kind, since = collective
            self._observe(Event(self.rank, self._action, kind, since, end, *what))
        return value

    def _end_action(self) -> None:
        if self._action:
            self._observe(Event(self.rank, self._action, kind_of(self._action), self._start, self._now()))
            self._action = ""

    def _now(self) -> float:
        if self._transport.device.type == "cuda":
            torch.cuda.synchronize(self._transport.device)
        return time.perf_counter()


@dataclass
class Recording:
    """Collects the events of one step: `engine = program.local_engine(observe=recording)`, then `timeline()`.

    Give each step a recording of its own, or `clear` in between. Under torchrun a process records its own rank.
    """

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)  # which threads may do at once

    def clear(self) -> None:
        self.events.clear()

    def timeline(self) -> Timeline:
        """The step from its first event on.

        A transfer lasts from its send, or from the end of the one before it on its channel, until its reader has it.
        """
        first = min((event.start_seconds for event in self.events), default=0.0)
        ordered = sorted(self.events, key=lambda event: (event.start_seconds, event.rank))
        moved = [shifted(event, -first) for event in ordered]
        others = [event for event in moved if event.kind != "transfer"]
        events = sorted([*others, *_transfers(moved)], key=lambda event: (event.start_seconds, event.rank))
        return Timeline(tuple(events), 1 + max((event.rank for event in self.events), default=-1))


def shifted(event: Event, seconds: float) -> Event:
    """The same, so much later."""
    return replace(event, start_seconds=event.start_seconds + seconds, end_seconds=event.end_seconds + seconds)


def both(one: Observe, other: Observe) -> Observe:
    """Each sees every event."""

    def see(event: Event) -> None:
        one(event)
        other(event)

    return see


def _transfers(events: Sequence[Event]) -> Iterator[Event]:
    """The sends among events in time order, with the latest time at which each can have begun and arrived.

    A channel is first in first out: a message has arrived when it is read, or a later one of its channel is.
    """
    read = {event.edge: event.end_seconds for event in events if event.kind == "wait"}
    channels: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event.kind == "transfer":
            channels.setdefault((event.rank, event.peer), []).append(event)
    for sends in channels.values():
        arrivals = [read.get(event.edge, event.start_seconds) for event in sends]
        arrivals = list(accumulate(reversed(arrivals), min))[::-1]
        free = 0.0
        for event, arrival in zip(sends, arrivals, strict=True):
            start = max(event.start_seconds, free)
            free = max(start, arrival)
            yield replace(event, start_seconds=start, end_seconds=free)
