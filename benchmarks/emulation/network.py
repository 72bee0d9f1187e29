"""A cluster's links in real time: a transport whose messages and reductions arrive no sooner than they would there."""

import threading
import time
from typing import Any

import torch

from fxpipe.cluster import Cluster
from fxpipe.plan.transport import Pending, T, Transport
from fxpipe.run.transport import num_bytes
from fxpipe.simulate.collectives import Collective, SimulatedCollectives
from fxpipe.simulate.wires import Wires


class EmulatedNetwork:
    """What is under way between all ranks of this process, by the clock: the simulator's model of links, asked when
    something really is sent."""

    def __init__(self, cluster: Cluster) -> None:
        self._lock = threading.Lock()
        self._wires, self._collectives = Wires(cluster), SimulatedCollectives(cluster)
        self._ends: dict[int, float] = {}  # edge -> when its message arrives, or its collective is over; once known

    def send(self, edge: int, channel: tuple[int, int], num_bytes: int) -> None:
        with self._lock:
            now = self._advance()
            self._wires.send(now, edge, channel, num_bytes)

    def issue(self, rank: int, collective: Collective) -> None:
        with self._lock:
            span = self._collectives.issue(time.perf_counter(), rank, collective)
            if span is not None:
                self._ends[collective.edge] = span[1]

    def end_seconds(self, edge: int) -> tuple[float, bool]:
        """When a message that was sent arrives, or a collective that all have issued is over, and whether that is
        certain. Where it is not, as others may still slow a message down: when to ask again."""
        with self._lock:
            self._advance()
            return (self._ends[edge], True) if edge in self._ends else (self._wires.next_seconds, False)

    def _advance(self) -> float:
        now = time.perf_counter()
        self._ends |= {arrival.edge: arrival.end_seconds for arrival in self._wires.advance(now)}
        return now


class EmulatedDevice:
    """One rank's clock. Sleeps end late, by milliseconds on a busy machine: the next one makes up for it, unless the
    rank has waited since. What programs, executor and transport take of the rank's time is not made up for."""

    def __init__(self) -> None:
        self._late = 0.0

    def compute(self, seconds: float) -> None:
        """Be busy for `seconds`, counted from when the device was free to start."""
        self._sleep(time.perf_counter() - self._late + seconds)

    def wait(self, network: EmulatedNetwork, edge: int, since: float) -> None:
        """Be idle, from `since` on, until the network has what is waited for."""
        slept, (end, certain) = False, network.end_seconds(edge)
        while not certain or end > time.perf_counter():
            self._sleep(end)
            slept, (end, certain) = True, network.end_seconds(edge)
        if end <= since:
            self._late = min(self._late, since - end)
        else:
            self._late = time.perf_counter() - end if slept else 0.0

    def _sleep(self, until: float) -> None:
        time.sleep(max(0.0, until - time.perf_counter()))
        self._late = max(0.0, time.perf_counter() - until)


class EmulatedTransport:
    """One rank's transport, with every wait as long as on the emulated network."""

    def __init__(self, transport: Transport, network: EmulatedNetwork, device: EmulatedDevice) -> None:
        self._transport, self._network, self._device = transport, network, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        self._network.send(edge, (self.rank, dst), num_bytes(tensor))  # first: its reader may be waiting
        self._transport.send(tensor, dst, edge)

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[torch.Tensor]:
        pending = self._transport.recv(src, edge, shape, dtype, device)
        return Pending(lambda: self._waited(pending, edge))

    def all_reduce(self, tensors: list[torch.Tensor], ranks: tuple[int, ...], edge: int) -> Pending[list[torch.Tensor]]:
        self._network.issue(self.rank, Collective(edge, "reduce", ranks, sum(map(num_bytes, tensors))))
        pending = self._transport.all_reduce(tensors, ranks, edge)
        return Pending(lambda: self._waited(pending, edge))

    def reduce_scatter(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        self._network.issue(self.rank, Collective(edge, "reduce_scatter", ranks, sum(map(num_bytes, tensors))))
        pending = self._transport.reduce_scatter(tensors, owners, ranks, edge)
        return Pending(lambda: self._waited(pending, edge))

    def broadcast(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[None]:
        self._network.issue(self.rank, Collective(edge, "all_gather", ranks, sum(map(num_bytes, tensors))))
        pending = self._transport.broadcast(tensors, owners, ranks, edge)
        return Pending(lambda: self._waited(pending, edge))

    def gather(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        self._network.issue(self.rank, Collective(edge, "all_gather", ranks, sum(map(num_bytes, tensors))))
        pending = self._transport.gather(tensors, owners, ranks, edge)
        return Pending(lambda: self._waited(pending, edge))

    def _waited(self, pending: Pending[T], edge: int) -> T:
        """What a receive or a reduction gives, not before the emulated network does."""
        since = time.perf_counter()
        value = pending.wait()
        self._device.wait(self._network, edge, since)
        return value
