"""Seconds of messages and collectives on a cluster's links.

    0 -> 8 and 1 -> 9 on 2x8 devices    both leave by node 0's port and enter by node 1's: half the bandwidth each
    0 -> 1 and 1 -> 0                   the two directions of a duplex link do not meet

A message of n bytes takes latency + n / bandwidth (Hockney, Parallel Computing 20, 1994). Messages at the same time
share each port max-min fairly (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). A collective is the
cheapest of a ring, a tree and a hierarchical algorithm; additions are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import ceil, inf, log2
from typing import TYPE_CHECKING

from fxpipe.errors import CompileError

if TYPE_CHECKING:
    from fxpipe.cluster import Cluster
    from fxpipe.cluster.links import Link

Routed = tuple[int, int, float]
Port = tuple[int, str, int]


def route(cluster: Cluster, source: int, target: int) -> tuple[Link, tuple[Port, ...]]:
    """The link that joins two ranks, and the ports of it that a message between them uses."""
    if (source, target) not in cluster.routes:
        cluster.routes[source, target] = _route(cluster, source, target)
    return cluster.routes[source, target]


def _route(cluster: Cluster, source: int, target: int) -> tuple[Link, tuple[Port, ...]]:
    for rank in (source, target):
        if not 0 <= rank < cluster.num_ranks:
            raise CompileError(f"rank {rank} is not in the cluster of {cluster.num_ranks} devices")
    span = 1
    for index, level in enumerate(cluster.levels):
        ends = source // span, target // span
        span *= level.size
        if source // span == target // span:
            return level.link, _ports(level.link, index, ends, source // span)
    raise AssertionError("the last level joins all ranks")


def _ports(link: Link, level: int, ends: tuple[int, int], group: int) -> tuple[Port, ...]:
    if link.shared:
        return ((level, "bus", group),)
    if link.duplex:
        return (level, "out", ends[0]), (level, "in", ends[1])
    return (level, "port", ends[0]), (level, "port", ends[1])


def transfer_seconds(cluster: Cluster, source: int, target: int, num_bytes: float) -> float:
    """Seconds for one message from rank to rank on idle links; no bytes, or to itself: no message."""
    if source == target or not num_bytes:
        return 0.0
    link, _ = route(cluster, source, target)
    return link.latency_seconds + num_bytes / link.bandwidth_bytes_per_second


def taken_seconds(cluster: Cluster, source: int, target: int, num_bytes: float) -> float:
    """Seconds of computation that a message costs its sender, and its receiver as much."""
    if source == target or not num_bytes:
        return 0.0
    link, _ = route(cluster, source, target)
    return link.overhead_seconds + link.taken_share * num_bytes / link.bandwidth_bytes_per_second


def fair_rates(routes: Mapping[int, tuple[Link, tuple[Port, ...]]]) -> dict[int, float]:
    """Bytes per second of every message under way, by progressive filling: the fullest port is shared out first.

    Messages over the same ports have the same rate, and are treated as one.
    """
    left: dict[Port, float] = {}
    count: dict[Port, int] = {}
    for link, ports in routes.values():
        for port in ports:
            left[port] = link.bandwidth_bytes_per_second
            count[port] = count.get(port, 0) + 1
    share, tightest = min(((left[port] / num, port) for port, num in count.items()), default=(0.0, None))
    if tightest is None or count[tightest] == len(routes):  # one port for all, as nearly always
        return dict.fromkeys(routes, share)
    alike: dict[tuple[Port, ...], list[int]] = {}
    for message, (_, ports) in routes.items():
        alike.setdefault(ports, []).append(message)
    rates: dict[int, float] = {}
    for share, group in _filled(left, count, {ports: len(messages) for ports, messages in alike.items()}):
        rates |= dict.fromkeys(alike[group], share)
    return rates


def _filled(
    left: dict[Port, float], count: dict[Port, int], sizes: Mapping[tuple[Port, ...], int]
) -> Iterator[tuple[float, tuple[Port, ...]]]:
    """The rate of every group of messages, groups by the ports they use; `left` and `count` are used up."""
    users: dict[Port, dict[tuple[Port, ...], None]] = {port: {} for port in left}
    for group in sizes:
        for port in group:
            users[port][group] = None
    # A port's share never falls as others are shared out, so what the heap holds of it is a bound from below.
    shares = [(left[port] / count[port], port) for port in left]
    heapify(shares)
    while shares:
        bound, tightest = heappop(shares)
        if not count[tightest]:
            continue
        share = left[tightest] / count[tightest]
        if share > bound:
            heappush(shares, (share, tightest))
            continue
        for group in list(users[tightest]):
            yield share, group
            for port in group:
                left[port] -= share * sizes[group]
                count[port] -= sizes[group]
                del users[port][group]


def concurrent_seconds(cluster: Cluster, transfers: Sequence[Routed]) -> tuple[float, ...]:
    """When each of several messages (source, target, bytes) ends, all started at once and sharing links fairly."""
    ends = [0.0] * len(transfers)
    under_way = {i: route(cluster, a, b) for i, (a, b, size) in enumerate(transfers) if a != b and size}
    left = {i: float(transfers[i][2]) for i in under_way}
    now = 0.0
    while under_way:
        rates = fair_rates(under_way)
        step = min(left[i] / rates[i] for i in under_way)
        now += step
        for i in list(under_way):
            left[i] -= rates[i] * step
            if left[i] <= 1e-9 * transfers[i][2]:
                ends[i] = now + under_way.pop(i)[0].latency_seconds
    return tuple(ends)


def all_reduce_seconds(cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """Seconds until all `ranks` hold the sum of their `num_bytes`, by the cheapest of three algorithms.

    Ring: 2(n-1) steps of a part each (Patarasuk and Yuan, JPDC 69, 2009). Tree: up and down a pair of binary trees, all
    bytes twice through every port (Sanders, Speck, Traff, Parallel Computing 35, 2009). Hierarchical: reduce-scatter
    within the nodes, rings across them on every part, gather within (Cho et al., BlueConnect, SysML 2019).
    """
    if len(ranks) < 2 or not num_bytes:
        return 0.0
    found = _group(cluster, tuple(ranks))
    tree = 2 * ceil(log2(found.num)) * found.ring.latency + 2 * found.ring.busy * num_bytes
    return min(2 * found.ring.seconds(num_bytes), tree, 2 * found.hierarchical_seconds(num_bytes))


def all_gather_seconds(cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """Seconds until all `ranks` hold all `num_bytes`, of which each had an equal part; a reduce-scatter's too.

    A ring of n-1 steps (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005), or one across nodes and one within.
    """
    return 0.0 if len(ranks) < 2 or not num_bytes else _group(cluster, tuple(ranks)).gather_seconds(num_bytes)


def ring_taken_seconds(cluster: Cluster, ranks: Sequence[int], rank: int, num_bytes: float) -> float:
    """Seconds of computation that a gather of `num_bytes`, or a reduce-scatter, costs one of its ranks: as many as the
    messages that it sends around a ring cost it, and those that it receives."""
    place, count = ranks.index(rank), len(ranks)
    of_one = taken_seconds(cluster, rank, ranks[(place + 1) % count], num_bytes / count)
    return 2 * (count - 1) * of_one


@dataclass(frozen=True)
class _Rings:
    """Rings of `num` ranks, all at once: the latency of a step, and of the busiest port seconds per byte that each rank
    sends to the next."""

    num: int
    latency: float
    busy: float

    def seconds(self, num_bytes: float) -> float:
        """Of num - 1 steps, each of an equal part."""
        return (self.num - 1) * (self.latency + self.busy * num_bytes / self.num)


@dataclass(frozen=True)
class _Group:
    """The ranks of a collective: one ring, and rings `across` nodes that are filled evenly with several each, and
    those `within` nodes, of which equal ones count once."""

    num: int
    ring: _Rings
    inside: int = 1
    across: _Rings | None = None
    within: tuple[_Group, ...] = ()

    def gather_seconds(self, num_bytes: float) -> float:
        return min(self.ring.seconds(num_bytes), self.hierarchical_seconds(num_bytes))

    def hierarchical_seconds(self, num_bytes: float) -> float:
        """A gather (or a reduce-scatter): across the nodes, a ring per place in a node, then in all nodes at once."""
        if self.across is None:
            return inf
        within = max(node.gather_seconds(num_bytes) for node in self.within)
        return self.across.seconds(num_bytes / self.inside) + within


@lru_cache(maxsize=1 << 14)
def _group(cluster: Cluster, ranks: tuple[int, ...]) -> _Group:
    if len(set(ranks)) < len(ranks):
        raise CompileError(f"a collective over ranks {list(ranks)} names one twice")
    ranks = tuple(sorted(ranks))
    ring, nodes = _rings(cluster, [ranks]), _nodes(cluster, ranks)
    inside = len(nodes[0])
    if inside == 1 or len(nodes) == 1 or any(len(node) != inside for node in nodes):
        return _Group(len(ranks), ring)
    across = _rings(cluster, list(zip(*nodes, strict=True)))
    within = dict.fromkeys(_group(cluster, tuple(node)) for node in nodes)
    return _Group(len(ranks), ring, inside, across, tuple(within))


def _rings(cluster: Cluster, rings: Sequence[Sequence[int]]) -> _Rings:
    latency = 0.0
    seconds: defaultdict[Port, float] = defaultdict(float)
    for source, target in ((ring[i - 1], ring[i]) for ring in rings for i in range(len(ring))):
        link, ports = route(cluster, source, target)
        latency = max(latency, link.latency_seconds)
        for port in ports:
            seconds[port] += 1 / link.bandwidth_bytes_per_second
    return _Rings(len(rings[0]), latency, max(seconds.values()))


def _nodes(cluster: Cluster, ranks: Sequence[int]) -> list[list[int]]:
    """The ranks by the members of the outermost level that they are several of."""
    span, groups = cluster.num_ranks, dict[int, list[int]]()
    for level in reversed(cluster.levels):
        span //= level.size
        groups = {}
        for rank in ranks:
            groups.setdefault(rank // span, []).append(rank)
        if len(groups) > 1:
            break
    return list(groups.values())
