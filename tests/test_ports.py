"""The busiest port: by hand, and never more than a simulated step."""

from dataclasses import replace

import pytest

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.plan.block_graph import Block, BlockGraph, Edge
from fxpipe.plan.staged import Staged
from passes.placement.ports import message_seconds
from passes.tuner.bounds import reduction_seconds
from tests.test_compare_by_hand import case

NODES = Cluster("toy", (Level(2, Link("inside", 1000.0, 0.0)), Level(2, Link("across", 100.0, 0.0))))
NUM_BLOCKS = 4


def graph_of(*edges: Edge) -> BlockGraph:
    blocks = tuple(Block(i, f"block {i}", (f"node_{i}",)) for i in range(NUM_BLOCKS))
    return BlockGraph(blocks, (), frozenset(), edges, (1.0,) * NUM_BLOCKS, (), ())


def edge(producer: int, *consumers: int, num_bytes: int = 10, requires_grad: bool = True) -> Edge:
    kinds = ("main",) * len(consumers)
    return Edge(f"v{producer}", producer, consumers, kinds, num_bytes, True, requires_grad)  # type: ignore[arg-type]


def line(*ranks: tuple[int, ...]) -> Staged:
    return Staged(tuple(range(len(ranks) + 1)), ranks, "1f1b", False, 4)


ONE_EACH = line((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("edges", "staged", "seconds"),
    [
        ([edge(0, 1)], ONE_EACH, 8 * 10 / 1000),  # within a node
        ([edge(1, 2)], ONE_EACH, 8 * 10 / 100),  # across
        ([edge(1, 2), edge(0, 3)], ONE_EACH, 2 * 8 * 10 / 100),  # two channels, one port
        ([edge(0, 2, 3)], ONE_EACH, 2 * 8 * 10 / 100),  # once to each rank
        ([edge(1, 2, requires_grad=False)], ONE_EACH, 8 * 10 / 100),  # the other way is another port
        ([edge(0, 2, 3)], line((0,), (0,), (2,), (2,)), 8 * 10 / 100),  # once to a rank of two stages
        ([edge(0, 1)], line((0, 1), (2, 3), (2, 3), (2, 3)), 8 * 10 / 100),  # replicas share the port
        ([], ONE_EACH, 0.0),
    ],
)
def test_by_hand(edges: list[Edge], staged: Staged, seconds: float) -> None:
    assert message_seconds(graph_of(*edges), staged, (4, 4), NODES) == pytest.approx(seconds)


def test_replicas_share_samples_as_they_take_turns() -> None:
    """Replica 0 has micro-batches of 3 and 2 samples, replica 1 one of 3."""
    inside = line((0, 2), (1, 3), (1, 3), (1, 3))
    assert message_seconds(graph_of(edge(0, 1)), inside, (3, 3, 2), NODES) == pytest.approx(5 * 10 / 1000)


def test_reductions_of_all_stages_pass_the_nodes_port() -> None:
    """Four blocks with a weight of 500 bytes each."""
    of = replace(case(NUM_BLOCKS, ranks=4, batch_size=4, weight_bytes=500), cluster=NODES)
    twins = line((0, 2), (1, 3), (0, 2), (1, 3))
    assert reduction_seconds(of, twins, 2) == pytest.approx(4 * NODES.all_reduce_seconds((0, 2), 500))
    inside = line((0, 1), (0, 1), (2, 3), (2, 3))
    assert reduction_seconds(of, inside, 2) == pytest.approx(2 * NODES.all_reduce_seconds((0, 1), 500))
