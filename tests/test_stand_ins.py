"""Some of equal pipelines stand for all: which do, and that a step of theirs is about as long as that of all."""

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cluster import Cluster
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.simulate import simulate
from passes.placement.place import place
from passes.placement.shape import shape
from passes.schedules.policies import PLAIN
from passes.step_ops import step_ops
from passes.tuner.orders import Orders
from passes.tuner.stand_ins import stand_ins
from tests.test_tune import on

CLUSTERS = ("8xA100-80GB", "2x4xV100", "4x2xV100+Ethernet-10", "8xA100-PCIe", "8xCPU")


@pytest.mark.parametrize(
    ("cluster", "size", "strided", "expected"),
    [
        ("8x8xA100-80GB", 1, False, [0]),
        ("8x8xA100-80GB", 2, False, [0]),
        ("8x8xA100-80GB", 16, False, [0]),  # two nodes each, and the links of both to themselves
        ("8x8xA100-80GB", 8, True, [*range(8)]),  # one rank in every node: all share the nodes' links
        ("8x8xA100-80GB", 2, True, [*range(8)]),  # a rank in a node, one four nodes on: two nodes of ranks
        ("2x6xA100-80GB", 4, False, [0, 1]),  # in the first node, across both, in the second: of each kind
        ("8xCPU", 2, False, [*range(4)]),  # a bus that all share
    ],
)
def test_who_stands_for_whom(cluster: str, size: int, strided: bool, expected: list[int]) -> None:
    where = Cluster.parse(cluster)
    count = where.num_ranks // size
    ways = [range(p, where.num_ranks, count) if strided else range(p * size, (p + 1) * size) for p in range(count)]
    found = stand_ins(where, [tuple(way) for way in ways])
    assert found == expected


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(CLUSTERS),
    st.sampled_from((PLAIN, "gpipe", "zero-bubble", "wave")),
    st.sampled_from((2, 4, 8)),
    st.integers(1, 3),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_some_take_as_long_as_all(
    cluster: str, name: str, copies: int, microbatches: int, more: int, ahead: bool, strided: bool, sharded: bool
) -> None:
    """But for the loss, which all ranks tell each other in the end."""
    count = copies * microbatches
    of = on(8, count + min(more, count - 1), cluster)
    sizes = microbatch_sizes(of.batch_size, count)
    wanted = shape(name, 8, None, copies, strided and copies < 8)
    staged = place(of, of.costs.at(sizes[0]), wanted, count)
    orders = Orders(of, replace(staged, sharded=sharded), count, ahead)
    numbers = stand_ins(of.cluster, staged.pipelines)
    whole = simulate(step_ops(of, orders.staged, orders.named(), sizes), of.cluster)
    ranks = [rank for number in numbers for rank in staged.pipelines[number]]
    schedule = orders.of_all(orders.of_one, numbers)
    part = simulate(step_ops(of, orders.staged, schedule, sizes, only=ranks), of.cluster)
    link = of.cluster.levels[-1].link
    size, levels = of.costs.loss_bytes, ceil(log2(8))
    told = 2 * levels * (link.latency_seconds + 8 * size / link.bandwidth_bytes_per_second)
    told += levels * (levels + 1) / 2 * of.adding_seconds(size)  # a parent adds what all its children have sent
    assert part.seconds <= whole.seconds * (1 + 1e-9)
    assert whole.seconds <= part.seconds * (1 + 1e-9) + told
    assert part.peak_bytes <= whole.peak_bytes
