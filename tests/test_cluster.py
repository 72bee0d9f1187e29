"""Clusters: their text, and seconds of messages and collectives by hand."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import network as measuring
from cost_models.devices import DEVICES
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import ALIASES, FAMILIES, INSIDE, LINKS, Link
from fxpipe.cluster.network import fair_rates, route
from fxpipe.errors import CompileError

ROOT = Path(__file__).parent.parent
FLOAT16 = torch.float16
GIGABIT = 125e6
FAST, SLOW = Link("fast", 100.0, 1.0), Link("slow", 10.0, 5.0)
TWO_NODES = Cluster("toy", (Level(4, FAST), Level(2, SLOW)))
ONE_NODE = Cluster("toy", (Level(4, FAST),))


@pytest.mark.parametrize(
    ("text", "shown", "ranks", "links"),
    [
        ("8xA100-80GB", "8xA100-80GB", 8, ["NVSwitch-3"]),
        ("8x8xA100-80GB+EFA", "8x8xA100-80GB+EFA-400", 64, ["NVSwitch-3", "EFA-400"]),
        ("2x8xV100", "2x8xV100-32GB+Ethernet-10", 16, ["NVLink-2", "Ethernet-10"]),
        ("4xA100-PCIe", "4xA100-80GB-PCIe-4", 4, ["PCIe-4"]),
        ("2x4xA100-80GB-PCIe+ethernet-25", "2x4xA100-80GB-PCIe-4+Ethernet-25", 8, ["PCIe-4", "Ethernet-25"]),
        (" 2 x rtx 4090 ", "2xRTX-4090", 2, ["PCIe-4"]),
        ("2x8xL40-PCIe", "2x8xL40+Ethernet-10", 16, ["PCIe-4", "Ethernet-10"]),
        ("8xB200", "8xB200", 8, ["NVSwitch-5"]),
        ("2xA6000-NVLink", "2xRTX-A6000-NVLink-3", 2, ["NVLink-3"]),
        ("4xNVIDIA RTX 6000 Ada", "4xRTX-6000-Ada", 4, ["PCIe-4"]),
        ("1xCPU", "1xCPU", 1, ["loopback"]),
    ],
)
def test_text(text: str, shown: str, ranks: int, links: list[str]) -> None:
    cluster = Cluster.parse(text)
    assert str(cluster) == shown
    assert Cluster.parse(shown) == cluster
    assert cluster.num_ranks == ranks
    assert [level.link.name for level in cluster.levels] == links


@given(
    st.sampled_from([(device, link) for device, links in INSIDE.items() for link in links]),
    st.lists(st.integers(1, 16), min_size=1, max_size=2),
    st.sampled_from(list(FAMILIES)),
    st.integers(1, 3200),
)
def test_every_short_text_parses_back(pair: tuple[str, str], sizes: list[int], family: str, gigabits: int) -> None:
    head = "x".join(map(str, sizes)) + f"x{pair[0]}-{pair[1]}"
    text = head + (f"+{family}-{gigabits}" if len(sizes) == 2 else "")
    if pair[1] == "NVLink-3" and sizes[-1] > 2:
        with pytest.raises(CompileError, match=f"NVLink-3 joins 2 devices, not {sizes[-1]}"):
            Cluster.parse(text)
        return
    cluster = Cluster.parse(text)
    assert "=" not in str(cluster)
    assert Cluster.parse(str(cluster)) == cluster


def test_own_links_are_toml_and_parse_back(tmp_path: Path) -> None:
    text = str(TWO_NODES)
    assert text.startswith('device = "toy"')
    assert Cluster.parse(text) == TWO_NODES
    (tmp_path / "mine.toml").write_text(text)
    assert Cluster.parse(str(tmp_path / "mine.toml")) == TWO_NODES
    named = Cluster.parse('device = "H100"\n[[level]]\nsize = 8\nlink = "NVSwitch-4"')
    assert named == Cluster.parse("8xH100")


LEVEL = 'device = "CPU"\n[[level]]\n'
WRONG = [
    ("", "is not understood; write it as 8xA100-80GB"),
    ("A100-80GB", "is not understood"),
    ("8xA100-80GB+", "is not understood"),
    ("2x2x2xA100", "unknown device '2xA100'"),
    ("8xB300", "unknown device 'B300'; known are A100-80GB"),
    ("4xRTX-3090-NVLink", "NVLink-3 joins 2 devices, not 4; leave the link out"),
    ("8xA100-Token", "A100-80GB comes with NVSwitch-3 or PCIe-4, not with 'token'"),
    ("0xA100", "at least one member, got 0"),
    ("8xA100+EFA", "has one node"),
    ("2x8xA100+Pigeon", "unknown network 'Pigeon'; choose one of EFA, IB, Ethernet"),
    ("2x8xA100+Ethernet-0", "bandwidth 0.0 bytes/s must be 1 or more"),
    ("nowhere.toml", "no cluster file nowhere.toml"),
    ("device = 3", 'has device = "..."'),
    ("device = ", "does not parse"),
    ('device = "CPU"\nlevel = []', "at least one level"),
    ('device = "CPU"\nlevel = [3]', "[[level]] tables, the innermost first"),
    ('device = "CPU"\nrack = 2', "unknown key 'rack' in a cluster's TOML; known are device, level"),
    (LEVEL + "size = 2\nspeed = 1", "unknown key 'speed' in a level's TOML"),
    (LEVEL + 'size = 2\nlink = "string"', "unknown link 'string'"),
    (LEVEL + 'size = 0\nlink = "PCIe-4"', "at least one member, got 0"),
    (LEVEL + "size = 2\nbandwidth_bytes_per_second = 1e9", "needs both"),
    (LEVEL + "size = 2\nbandwidth_bytes_per_second = 0\nlatency_seconds = 0", "must be 1 or more"),
    (LEVEL + "size = 2\nbandwidth_bytes_per_second = inf\nlatency_seconds = 0", "both finite"),
    (LEVEL + "size = 2\nbandwidth_bytes_per_second = nan\nlatency_seconds = 0", "must be 1 or more"),
    (LEVEL + f"size = 2\nbandwidth_bytes_per_second = {10**400}\nlatency_seconds = 0", "both finite"),
    (LEVEL + 'size = 2\nbandwidth_bytes_per_second = "1"\nlatency_seconds = 0', "cannot be '1'"),
    (LEVEL + "size = 2\nbandwidth_bytes_per_second = 1.0\nlatency_seconds = true", "cannot be True"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_wrong_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(CompileError) as caught:
        Cluster.parse(text)
    assert says in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CompileError, match=r"binary.toml cannot be read: .*; write it as 8xA100-80GB"):
        Cluster.parse(str(tmp_path / "binary.toml"))


def test_devices_of_clusters_have_rooflines() -> None:
    assert set(INSIDE) == set(DEVICES)
    assert {link for links in INSIDE.values() for link in links} == set(LINKS)
    assert set(ALIASES.values()) <= set(INSIDE)


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "CPU"])
def test_numbers_of_devices_and_links_can_be(name: str) -> None:
    """A peak that was read with sparsity, or in the wrong unit, falls out of what devices of ten years have."""
    device = DEVICES[name]
    half, brain, single, double = (device._peak(t) for t in (FLOAT16, torch.bfloat16, torch.float32, torch.float64))
    assert half >= 1.9 * single > single > double > half / 400
    assert brain in (half, single)
    assert 30 < half / device.bandwidth < 450  # operations for every byte
    assert 3e8 < (device.memory_bytes or 0) / 16 < 2e10
    assert device.bandwidth > 4 * max(LINKS[link].bandwidth_bytes_per_second for link in INSIDE[name])
    for link in INSIDE[name]:
        assert Cluster.parse(f"2x{name}-{link}").levels[0].link == LINKS[link]
        assert 10e9 < LINKS[link].bandwidth_bytes_per_second < 1e12


def test_every_cluster_that_the_guides_name_is_one() -> None:
    texts = [path.read_text() for folder in (".", "docs") for path in (ROOT / folder).glob("*.md")]
    found = {name for text in texts for name in re.findall(r"(?:--cluster |cluster=\"|`\")(\d+x[^\"`\s)]+)", text)}
    assert len(found) >= 3
    for name in found:
        assert Cluster.parse(name).num_ranks > 1


def test_a_cluster_may_be_larger_than_the_world() -> None:
    assert TWO_NODES.require(5) is TWO_NODES
    with pytest.raises(CompileError, match=r"world_size=9, but the cluster 2x4xtoy-fast\+slow has 8 devices"):
        TWO_NODES.require(9)


def test_a_message_takes_the_link_that_joins_its_ranks() -> None:
    assert TWO_NODES.transfer_seconds(0, 3, 200) == 1 + 2
    assert TWO_NODES.transfer_seconds(3, 4, 200) == 5 + 20
    assert TWO_NODES.transfer_seconds(0, 3, 0) == TWO_NODES.transfer_seconds(2, 2, 200) == 0
    with pytest.raises(CompileError, match="rank 8 is not in the cluster of 8"):
        TWO_NODES.transfer_seconds(0, 8, 1)


def test_concurrent_messages_share_ports_fairly() -> None:
    assert TWO_NODES.concurrent_seconds([(0, 1, 100), (1, 0, 100), (2, 3, 100)]) == (2, 2, 2)  # nothing shared
    assert TWO_NODES.concurrent_seconds([(0, 1, 100), (0, 2, 100)]) == (3, 3)  # one port out
    assert TWO_NODES.concurrent_seconds([(0, 4, 10), (1, 5, 10), (0, 1, 100)]) == (7, 7, 2)  # the node's port
    # The short one ends after 2 * 50 / 100 s, then the long one has the port alone: 1 + 1 s.
    assert TWO_NODES.concurrent_seconds([(0, 1, 50), (0, 2, 150), (3, 3, 9), (3, 0, 0)]) == (2, 3, 0, 0)


def test_half_duplex_and_shared_links() -> None:
    half = Cluster("toy", (Level(3, Link("half", 100.0, 1.0, duplex=False)),))
    assert half.concurrent_seconds([(0, 1, 100), (1, 0, 100)]) == (3, 3)
    bus = Cluster("toy", (Level(4, Link("bus", 100.0, 1.0, duplex=False, shared=True)),))
    assert bus.concurrent_seconds([(0, 1, 100), (2, 3, 100)]) == (3, 3)
    assert half.concurrent_seconds([(0, 1, 100), (2, 1, 50)]) == (2.5, 2)


PAIRS = st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1])


@given(st.lists(PAIRS, min_size=1, max_size=12))
def test_rates_are_max_min_fair(pairs: list[tuple[int, int]]) -> None:
    """Every message has a full port on which no other is faster; no port carries more than it can."""
    routes = {i: route(TWO_NODES, *pair) for i, pair in enumerate(pairs)}
    rates = fair_rates(routes)
    load: dict[object, list[float]] = {}
    for i, (_, ports) in routes.items():
        for port in ports:
            load.setdefault(port, []).append(rates[i])
    for i, (link, ports) in routes.items():
        capacity = link.bandwidth_bytes_per_second
        assert all(sum(load[port]) <= capacity * (1 + 1e-9) for port in ports)
        assert any(sum(load[p]) >= capacity * (1 - 1e-9) and rates[i] >= max(load[p]) * (1 - 1e-9) for p in ports)


def test_collectives_in_one_node() -> None:
    large, ranks = 1e6, [0, 1, 2, 3]
    assert ONE_NODE.all_gather_seconds(ranks, large) == pytest.approx(3 * (1 + large / 4 / 100))
    assert ONE_NODE.all_reduce_seconds(ranks, large) == pytest.approx(6 * (1 + large / 4 / 100))
    assert ONE_NODE.all_reduce_seconds(ranks, 1) == pytest.approx(4 * 1 + 2 / 100)  # few bytes: the tree's fewer steps
    for collective in (ONE_NODE.all_gather_seconds, ONE_NODE.all_reduce_seconds):
        assert collective([2], large) == collective(ranks, 0) == 0
        with pytest.raises(CompileError, match="names one twice"):
            collective([1, 1], large)


def test_collectives_across_nodes() -> None:
    large, ranks = 1e6, list(range(8))
    # Across: one of two parts of every place's quarter, all four through the node's port. Then within the nodes.
    gather = (5 + large / 10 / 2) + 3 * (1 + large / 4 / 100)
    assert TWO_NODES.all_gather_seconds(ranks, large) == pytest.approx(gather)
    assert TWO_NODES.all_reduce_seconds(ranks, large) == pytest.approx(2 * gather)
    # Uneven nodes: a ring through both, the node's port in every step.
    assert TWO_NODES.all_gather_seconds([0, 1, 4], large) == pytest.approx(2 * (5 + large / 3 / 10))


@given(st.sets(st.integers(0, 7), min_size=2), st.floats(1, 1e9))
def test_collectives_are_no_faster_than_their_bytes(ranks: set[int], num_bytes: float) -> None:
    least = (len(ranks) - 1) / len(ranks) * num_bytes / 100
    gather = TWO_NODES.all_gather_seconds(sorted(ranks), num_bytes)
    assert gather >= least * (1 - 1e-9)
    assert 2 * gather >= TWO_NODES.all_reduce_seconds(sorted(ranks), num_bytes) >= 2 * least * (1 - 1e-9)


@pytest.mark.parametrize(("both", "bandwidth", "duplex"), [(0.9, 0.9, True), (0.5, 1.0, False)])
def test_a_measured_link_is_what_a_direction_reaches_beside_the_other(
    both: float, bandwidth: float, duplex: bool
) -> None:
    (level,) = measuring.cluster(1e-4, GIGABIT, both * GIGABIT, 0.25, 5e-4, 2).levels
    assert level.link.bandwidth_bytes_per_second == pytest.approx(bandwidth * GIGABIT)
    assert (level.link.duplex, level.link.shared, level.link.taken_share) == (duplex, not duplex, 0.25)
    assert level.link.overhead_seconds == 5e-4
