"""Messages in flight: when each arrives, if all that use a port share it.

    0 -> 1, 150 bytes    |== 50 B/s ==|== 100 B/s ==|latency|        both leave by rank 0's port of 100 B/s;
    0 -> 2,  50 bytes    |== 50 B/s ==|latency|                      the longer one has it alone in the end

A channel sends one message at a time, first in first out. Its bytes get the max-min fair share of the ports on their
route (`network.fair_rates`), worked out anew whenever a message begins or ends, for those messages alone that share
ports with it, directly or through others. The link's latency follows the bytes, so that a message alone takes
`Cluster.transfer_seconds`. Where more than MANY messages share, rates may be late by 5 % of the time these still need:
a crowd of n begins and ends 2n times, and n rates each time would be too many.

Time is the caller's: simulated seconds, or a clock's.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from fxpipe.cluster import Cluster
from fxpipe.cluster.links import Link
from fxpipe.cluster.network import Port, fair_rates, route

Channel = tuple[int, int]
MANY, LATE = 32, 0.05


class Arrival(NamedTuple):
    """A message that has arrived: when its channel began to send it, and when all of it was there."""

    edge: int
    start_seconds: float
    end_seconds: float


@dataclass(slots=True, eq=False)
class _Flow:
    """A message under way: `left` bytes at `since` seconds, at `rate` bytes per second from then on.

    Its next event, `due`, is its arrival where `arriving`, else the end of its bytes. One that has all its ports alone
    is arriving from the start: nobody need be told when its bytes end, at `bytes_end`.
    """

    channel: Channel
    link: Link
    ports: tuple[Port, ...]
    start: float
    left: float
    since: float
    rate: float
    bytes_end: float
    due: float
    arriving: bool = True


class Wires:
    """All channels of a cluster. Calls come in the order of time; what is due by then is taken with `advance` first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._now = cluster, 0.0
        self._routes: dict[Channel, tuple[Link, tuple[Port, ...]]] = {}
        self._flows: dict[int, _Flow] = {}
        self._queues: dict[Channel, deque[tuple[int, int]]] = {}  # of busy channels: (edge, bytes) yet to be sent
        self._users: dict[Port, dict[int, _Flow]] = {}
        self._changed: dict[Port, None] = {}  # ports whose users have changed since rates were worked out
        self._rates_due = 0.0  # no new rates before
        self._events: list[tuple[float, int]] = []  # (seconds, edge), void unless the flow is due then

    def send(self, now: float, edge: int, channel: Channel, num_bytes: int) -> None:
        """Hand a message of `num_bytes` to its channel at `now` seconds; `edge` names it among those in flight."""
        assert now == self._now or self._now < now <= self.next_seconds, "time goes forward, past no event"
        self._now = now
        if channel in self._queues:
            self._queues[channel].append((edge, num_bytes))
        else:
            self._queues[channel] = deque()
            self._start(edge, channel, num_bytes)

    @property
    def next_seconds(self) -> float:
        """When something happens next if nothing more is sent; infinite if nothing is in flight."""
        first = self._first()
        if not self._changed:
            return first
        if self._now < self._rates_due:
            return min(first, self._rates_due)
        if first > self._now:  # else more may change at this very time
            self._share()
            first = self._first()
        return first

    def _first(self) -> float:
        events, flows = self._events, self._flows
        while events and ((flow := flows.get(events[0][1])) is None or flow.due != events[0][0]):
            heapq.heappop(events)
        return events[0][0] if events else inf

    def advance(self, now: float) -> list[Arrival]:
        """Let time pass until `now`; the messages that arrive by then, in the order of time."""
        arrivals = []
        while (due := self.next_seconds) <= now:
            self._now = due
            if self._events and self._events[0][0] == due:  # else new rates are due, and `next_seconds` makes them
                edge = heapq.heappop(self._events)[1]
                flow = self._flows[edge]
                if flow.arriving:
                    arrivals.append(self._arrive(edge, flow))
                else:
                    self._leave(edge, flow)
                    self._expect(edge, flow, due + flow.link.latency_seconds, arriving=True)
        self._now = max(now, self._now)
        return arrivals

    def _start(self, edge: int, channel: Channel, num_bytes: int) -> None:
        if channel not in self._routes:
            self._routes[channel] = route(self._cluster, *channel)
            self._users |= {port: {} for port in self._routes[channel][1] if port not in self._users}
        now, (link, ports) = self._now, self._routes[channel]
        rate = link.bandwidth_bytes_per_second
        seconds, latency = num_bytes / rate, link.latency_seconds if num_bytes else 0.0
        assert edge not in self._flows, f"edge {edge} is in flight already"
        flow = _Flow(channel, link, ports, now, num_bytes, now, rate, now + seconds, now + (latency + seconds))
        self._flows[edge] = flow
        heapq.heappush(self._events, (flow.due, edge))
        if num_bytes:
            self._enter(edge, flow)

    def _enter(self, edge: int, flow: _Flow) -> None:
        most = 1
        for port in flow.ports:
            users = self._using(port)
            users[edge] = flow
            most = max(most, len(users))
        if most > 1:
            self._changed.update(dict.fromkeys(flow.ports))
            self._go(edge, flow, flow.rate / most)  # a bound from below, until rates are worked out

    def _leave(self, edge: int, flow: _Flow) -> None:
        for port in flow.ports:
            self._users[port].pop(edge, None)
            if self._users[port]:
                self._changed[port] = None

    def _arrive(self, edge: int, flow: _Flow) -> Arrival:
        del self._flows[edge]
        self._leave(edge, flow)
        queue = self._queues[flow.channel]
        if queue:
            self._start(queue[0][0], flow.channel, queue.popleft()[1])
        else:
            del self._queues[flow.channel]
        return Arrival(edge, flow.start, self._now)

    def _using(self, port: Port) -> dict[int, _Flow]:
        """The messages whose bytes go through a port; of those that had it alone, some may have ended unseen."""
        users = self._users[port]
        for edge in [e for e, flow in users.items() if flow.arriving and flow.bytes_end <= self._now]:
            del users[edge]
        return users

    def _go(self, edge: int, flow: _Flow, rate: float) -> None:
        """Give a message another rate from now on."""
        flow.left = max(0.0, flow.left - flow.rate * (self._now - flow.since))
        flow.since, flow.rate = self._now, rate
        self._expect(edge, flow, self._now + flow.left / rate, arriving=False)

    def _expect(self, edge: int, flow: _Flow, due: float, arriving: bool) -> None:
        flow.due, flow.arriving = due, arriving
        heapq.heappush(self._events, (due, edge))

    def _share(self) -> None:
        """Work out the rates of all messages whose ports have changed, and of those that share ports with them."""
        flows = self._joined(list(self._changed))
        self._changed.clear()
        rates = fair_rates({edge: (flow.link, flow.ports) for edge, flow in flows.items()})
        for edge, rate in rates.items():
            if rate != flows[edge].rate:
                self._go(edge, flows[edge], rate)
        if len(flows) > MANY:
            left = sum(flow.left - flow.rate * (self._now - flow.since) for flow in flows.values())
            self._rates_due = self._now + LATE * left / sum(rates.values())

    def _joined(self, ports: list[Port]) -> dict[int, _Flow]:
        """The messages that use these ports, or share a port with one that does, and so on."""
        found: dict[int, _Flow] = {}
        seen = set(ports)
        while ports:
            for edge, flow in self._using(ports.pop()).items():
                if edge not in found:
                    found[edge] = flow
                    new = [port for port in flow.ports if port not in seen]
                    seen.update(new)
                    ports += new
        return found
