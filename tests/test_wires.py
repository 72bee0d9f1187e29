"""Messages in flight, against a reference that works out all rates at every moment in another way."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.cluster.network import route
from fxpipe.simulate.wires import MANY, Arrival, Wires

FAST, SLOW = Link("fast", 100.0, 1.0), Link("slow", 10.0, 5.0)
ONE_NODE = Cluster("toy", (Level(8, FAST),))
CLUSTERS = {
    "two nodes": Cluster("toy", (Level(4, FAST), Level(2, SLOW))),
    "four nodes": Cluster("toy", (Level(2, FAST), Level(4, SLOW))),
    "half duplex": Cluster("toy", (Level(8, Link("half", 100.0, 1.0, duplex=False)),)),
    "bus": Cluster("toy", (Level(4, FAST), Level(2, Link("bus", 50.0, 0.0, shared=True)))),
}
Send = tuple[float, tuple[int, int], int]  # when, channel, bytes


def arrivals(cluster: Cluster, sends: list[Send]) -> dict[int, Arrival]:
    """By position in `sends`, which is in the order of time."""
    wires, found = Wires(cluster), []
    for edge, (now, channel, num_bytes) in enumerate(sends):
        found += wires.advance(now)
        wires.send(now, edge, channel, num_bytes)
    while (due := wires.next_seconds) < inf:
        found += wires.advance(due)
    assert [arrival.end_seconds for arrival in found] == sorted(arrival.end_seconds for arrival in found)
    return {arrival.edge: arrival for arrival in found}


def reference(cluster: Cluster, sends: list[Send]) -> list[float]:
    """When each message arrives: every rate anew at every start and end, by raising all of them together."""
    ends = [inf] * len(sends)
    left = [float(num_bytes) for _, _, num_bytes in sends]
    free: dict[tuple[int, int], float] = {}
    waiting, going, now = list(range(len(sends))), list[int](), 0.0
    while waiting or going:
        # Channels may be waiting for a message that is only latency by now: `free` is known, `ends` is.
        heads = {sends[i][1]: i for i in reversed(waiting)}
        busy = {sends[i][1] for i in going}
        starts = {i: max(sends[i][0], free.get(c, 0.0)) for c, i in heads.items() if c not in busy}
        for i in [i for i, start in starts.items() if start <= now]:
            waiting.remove(i)
            going.append(i)
        rates = raised_together(cluster, {i: sends[i][1] for i in going})
        until = min([start for start in starts.values() if start > now], default=inf)
        finishes = {i: now + left[i] / rates[i] for i in going}
        now_then = min([until, *finishes.values()])
        for i in list(going):
            left[i] -= rates[i] * (now_then - now)
            if finishes[i] <= now_then * (1 + 1e-12):
                going.remove(i)
                ends[i] = free[sends[i][1]] = now_then + route(cluster, *sends[i][1])[0].latency_seconds
        now = now_then
    return ends


def raised_together(cluster: Cluster, channels: dict[int, tuple[int, int]]) -> dict[int, float]:
    """Max-min fair rates: all grow alike until a port is full, whose messages then stay as they are."""
    routes = {i: route(cluster, *channel) for i, channel in channels.items()}
    rates = dict.fromkeys(channels, 0.0)
    growing = set(channels)
    while growing:
        room = {}
        for port, link in {(p, link) for link, ports in routes.values() for p in ports}:
            users = [i for i in channels if port in routes[i][1]]
            if num := len(growing.intersection(users)):
                room[port] = (link.bandwidth_bytes_per_second - sum(rates[i] for i in users)) / num
        step = min(room.values())
        for i in growing:
            rates[i] += step
        full = {port for port, more in room.items() if more <= step * (1 + 1e-9)}
        growing = {i for i in growing if not full.intersection(routes[i][1])}
    return rates


CHANNELS = st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1])
SENDS = st.lists(st.tuples(st.integers(0, 20).map(float), CHANNELS, st.integers(1, 400)), max_size=14).map(sorted)


@given(CHANNELS, st.integers(0, 10**9), st.floats(0, 1e3))
def test_a_message_alone_takes_what_the_cluster_says(channel: tuple[int, int], size: int, start: float) -> None:
    for cluster in CLUSTERS.values():
        alone = arrivals(cluster, [(start, channel, size)])[0]
        assert alone == Arrival(0, start, start + cluster.transfer_seconds(*channel, size))


@pytest.mark.parametrize("name", CLUSTERS)
@given(SENDS)
def test_messages_share_as_in_the_reference(name: str, sends: list[Send]) -> None:
    found = arrivals(CLUSTERS[name], sends)
    assert [found[i].end_seconds for i in range(len(sends))] == pytest.approx(reference(CLUSTERS[name], sends))


@given(st.lists(st.tuples(CHANNELS, st.integers(1, 400)), max_size=10, unique_by=lambda send: send[0]))
def test_messages_that_start_together_end_as_the_cluster_says(sends: list[tuple[tuple[int, int], int]]) -> None:
    for cluster in CLUSTERS.values():
        found = arrivals(cluster, [(0.0, channel, size) for channel, size in sends])
        expected = cluster.concurrent_seconds([(*channel, size) for channel, size in sends])
        assert [found[i].end_seconds for i in range(len(sends))] == pytest.approx(list(expected))


def test_a_channel_sends_one_message_at_a_time() -> None:
    found = arrivals(ONE_NODE, [(0.0, (0, 1), 100), (0.5, (0, 1), 200), (0.5, (1, 0), 100)])
    assert found == {0: Arrival(0, 0.0, 2.0), 1: Arrival(1, 2.0, 5.0), 2: Arrival(2, 0.5, 2.5)}


def test_the_longer_one_has_the_port_alone_in_the_end() -> None:
    found = arrivals(ONE_NODE, [(0.0, (0, 1), 150), (0.0, (0, 2), 50)])
    assert found == {0: Arrival(0, 0.0, 3.0), 1: Arrival(1, 0.0, 2.0)}


def test_latency_takes_no_bandwidth() -> None:
    # The first one's bytes are through after one second, when the second one starts.
    found = arrivals(ONE_NODE, [(0.0, (0, 1), 100), (1.0, (0, 2), 100)])
    assert found == {0: Arrival(0, 0.0, 2.0), 1: Arrival(1, 1.0, 3.0)}


def test_no_bytes_take_no_time() -> None:
    assert arrivals(ONE_NODE, [(3.0, (0, 1), 0)]) == {0: Arrival(0, 3.0, 3.0)}


def test_a_crowd_is_served_nearly_exactly() -> None:
    """Where rates may be late, messages gain and lose little on average, and as many bytes go through in all."""
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    sends = [(index * 0.01, pair, 400 + 37 * index % 500) for index, pair in enumerate(pairs)]
    assert len(sends) > MANY
    for cluster in CLUSTERS.values():
        found = arrivals(cluster, sends)
        expected = reference(cluster, sends)
        ends = [found[i].end_seconds for i in range(len(sends))]
        assert sum(abs(a - b) for a, b in zip(ends, expected, strict=True)) <= 0.03 * sum(expected)
        assert max(ends) == pytest.approx(max(expected), rel=0.01)
