"""The chain of a block graph on a cluster: numbers worked out by hand, and a captured U-Net."""

import pytest
import sympy
import torch

from cost_models.devices import device
from cost_models.flops import node_costs
from fxpipe.block_graph import Block, BlockGraph, Component, Edge, Kind
from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds, Values, Weight
from fxpipe.errors import CompileError
from passes.block_costs import block_costs
from passes.blocks import analyse
from passes.chains import all_plans, solve_equal
from passes.chains.of_blocks import chain_of, cut_bytes
from tests.captured import captured, work
from tests.unet import TinyUNet

S = sympy.Symbol("s")


def edge(name: str, producer: int | str, consumers: tuple[int, ...], size: int, requires_grad: bool = True) -> Edge:
    kinds: tuple[Kind, ...] = ("main",) * len(consumers)
    return Edge(name, producer, consumers, kinds, size, True, requires_grad)


GRAPH = BlockGraph(
    blocks=tuple(Block(i, f"block{i}", (f"n{i}",)) for i in range(4)),
    components=(Component("text", ("t",), ()),),
    local=frozenset(),
    edges=(
        edge("a", 0, (1,), 10),
        edge("b", 1, (2,), 20),
        edge("c", 2, (3,), 40),
        edge("skip", 0, (2, 3), 100),
        edge("mask", 1, (3,), 1000, requires_grad=False),
        edge("text", "text", (0, 1, 2, 3), 7),
    ),
    block_seconds=(1.0,) * 4,
    component_seconds=(1.0,),
    unused=(),
)


def costs() -> BlockCosts:
    weights = tuple(Weight(f"w{i}", 4 * (i + 1), i + 1, i != 3, (i,), ()) for i in range(4))
    values = Values(
        tuple(S * 8 * (i + 1) for i in range(4)),
        (0, 1, 2, 3),
        tuple(frozenset({i}) for i in range(4)),
        (frozenset(),) * 4,
    )
    return BlockCosts(
        weights,
        (),
        values,
        1,
        lambda n: BlockSeconds(n, (1.0 * n,) * 4, (2.0 * n,) * 4, (1.0 * n,) * 4, (1.0 * n,) * 4, (5.0,)),
        lambda n: ((0,) * 4, (0,)),
    )


def test_a_cut_carries_all_that_crosses_it() -> None:
    """Skips are passed on; a mask has no gradient; what a frozen component makes comes from elsewhere."""
    assert cut_bytes(GRAPH, gradients=False) == (0, 110, 1120, 1140, 0)
    assert cut_bytes(GRAPH, gradients=True) == (0, 110, 120, 140, 0)


def test_bytes_and_seconds_of_blocks() -> None:
    chain = chain_of(GRAPH, costs(), Cluster.parse("4xA100-80GB"), 4, optimizer_bytes=100)
    assert chain.seconds(3) == ((3.0,) * 4, (6.0,) * 4)
    assert chain.gradient_bytes == (4, 8, 12, 0)  # the last weight is not trained
    assert chain.state_bytes == (4 + 4 + 100, 8 + 8 + 200, 12 + 12 + 300, 16)
    assert chain.saved_bytes == (8, 16, 24, 32)


def test_links_of_stages_across_nodes() -> None:
    """2 nodes of 4 over 100 Gbit/s, of which 10 GB/s are reached: so many messages of a stage share a node's port."""
    cluster = Cluster.parse("2x4xA100-80GB+IB-100")
    chain = chain_of(GRAPH, costs(), cluster, 8)
    assert isinstance(chain.p2p, dict)
    assert isinstance(chain.all_reduce, dict)
    assert list(chain.p2p) == [1, 2, 4, 8]
    rates = {r: link.bandwidth_bytes_per_second / 1e9 for r, link in chain.p2p.items()}
    assert [rates[r] for r in (1, 2, 4)] == pytest.approx([10.0, 5.0, 2.5])
    assert chain.p2p[1].latency_seconds == pytest.approx(cluster.transfer_seconds(3, 4, 1), rel=1e-4)
    assert sorted(chain.all_reduce) == [2, 4, 8]
    for r, link in chain.all_reduce.items():
        for num_bytes in (1 << 20, 1 << 28, 1 << 30):
            seconds = link.latency_seconds + num_bytes / link.bandwidth_bytes_per_second
            assert seconds == pytest.approx(cluster.all_reduce_seconds(range(r), num_bytes), rel=0.2)


def test_links_of_any_number_of_replicas() -> None:
    chain = chain_of(GRAPH, costs(), Cluster.parse("2x4xA100-80GB+IB"), 8, replicas=range(1, 9))
    assert sorted(chain.all_reduce) == [2, 3, 4, 5, 6, 7, 8]  # type: ignore[arg-type]


def test_a_cluster_too_small_is_refused() -> None:
    with pytest.raises(CompileError, match="world_size=8, but the cluster 4xA100-80GB has 4 devices"):
        chain_of(GRAPH, costs(), Cluster.parse("4xA100-80GB"), 8)


def test_a_captured_u_net() -> None:
    """Every block's seconds, bytes and cuts are there, and plans follow."""
    capture = captured(TinyUNet().double())
    graph = analyse(capture, work(capture), 8)
    found = {node.name: cost for node, cost in node_costs(capture.graph.nodes).items()}
    table = block_costs(capture, graph, found, device("A100-80GB"), torch.device("cpu"))
    chain = chain_of(graph, table, Cluster.parse("8xA100-80GB"), 8)
    assert chain.num_blocks == len(graph.blocks)
    assert chain.forward_bytes[0] == chain.forward_bytes[-1] == 0
    assert min(chain.forward_bytes[1:-1]) > 0
    assert chain.seconds(4) == (table.at(4).forward_seconds, table.at(4).backward_seconds)
    plans = all_plans(chain, 8, 32)
    assert {plan.num_stages for plan in plans} == {s for s in (1, 2, 4, 8) if s <= chain.num_blocks}
    for plan in plans[:3]:
        again = solve_equal(chain, plan.num_stages, plan.num_microbatches, plan.replicas[0], batch_size=32)
        assert again == plan
