"""Bounds on a step hold for whatever is simulated."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.plan.block_graph import Edge
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.staged import Staged
from fxpipe.simulate import simulate
from passes.placement.shape import shape
from passes.schedules.named import make_schedule
from passes.step_ops import step_ops
from passes.tuner.bounds import compute_seconds, ordered_seconds, placed_seconds, reduction_seconds, shares_may_slow
from passes.tuner.orders import Orders
from tests.test_compare_by_hand import case, edge


def skips(num_blocks: int) -> Sequence[Edge]:
    """Each block's value is read by the next one, the first one's by the last too."""
    line = [edge(i, i + 1, num_bytes=8) for i in range(num_blocks - 1)]
    return [edge(0, 1, num_blocks - 1, num_bytes=8), *line[1:]]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(1, 6),
    st.sampled_from([1e0, 1e2, 1e9]),
    st.booleans(),
    st.integers(0, 3),
)
def test_no_step_is_shorter_than_its_bounds(
    name: str, stages: int, replicas: int, microbatches: int, bandwidth: float, shared: bool, more: int
) -> None:
    world = stages * replicas
    cluster = Cluster("toy", (Level(world, Link("toy", bandwidth, 0.1, duplex=not shared, shared=shared)),))
    count = microbatches * replicas
    of = case(
        stages + 2, world, 2 * count + min(more, count - 1), weight_bytes=64, edges=skips(stages + 2), cluster=cluster
    )
    ranks = tuple(tuple(range(s * replicas, (s + 1) * replicas)) for s in range(stages))
    staged = Staged((0, *range(3, stages + 3)), ranks, name, False, world)
    work = of.work.of(staged, count)
    schedule = make_schedule(name, work, ranks, (1.0,) * stages, (2.0,) * stages, world_size=world)
    sizes = microbatch_sizes(of.batch_size, count)
    found = simulate(step_ops(of, staged, schedule, sizes), cluster).seconds
    assert max(placed_seconds(of, staged, sizes), reduction_seconds(of, staged, len(sizes))) <= found * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(1, 4),
    st.sampled_from([1e0, 1e2, 1e9]),
    st.sampled_from([(0, True, True), (64, False, False), (64, True, False), (64, False, True)]),
    st.integers(0, 3),
)
def test_no_order_is_shorter_than_when_it_is_alone(
    name: str, stages: int, replicas: int, microbatches: int, bandwidth: float, far: tuple[int, bool, bool], more: int
) -> None:
    """Values that are of all samples, and those that no gradient comes back of, travel as such."""
    world, count = stages * replicas, microbatches * replicas
    cluster = Cluster("toy", (Level(world, Link("toy", bandwidth, 0.1)),))
    line = [edge(i, i + 1, num_bytes=8) for i in range(stages - 1)]
    read_last = Edge("far", 0, (stages - 1,), ("conditioning",), *far)
    samples = 4 * count + min(more, count - 1)
    of = case(stages, world, samples, weight_bytes=64, edges=[*line, read_last], cluster=cluster)
    ranks = tuple(tuple(stage + stages * copy for copy in range(replicas)) for stage in range(stages))
    staged = Staged(tuple(range(stages + 1)), ranks, name, False, world)
    orders = Orders(of, staged, count, ahead=False)
    found = simulate(step_ops(of, staged, orders.named(), microbatch_sizes(of.batch_size, count)), cluster).seconds
    assert ordered_seconds(of, staged, orders.named_alone) <= found * (1 + 1e-9)


def test_uneven_micro_batches_take_what_each_of_them_does() -> None:
    """Two of two samples and one of one, where messages take nothing."""
    of = case(2, 2, 5, edges=[edge(0, 1, num_bytes=0)])
    staged = Staged((0, 1, 2), ((0,), (1,)), "1f1b", False, 2)
    orders = Orders(of, staged, 3, ahead=False)
    found = simulate(step_ops(of, staged, orders.named(), (2, 2, 1)), of.cluster).seconds
    assert ordered_seconds(of, staged, orders.named_alone) == pytest.approx(found)


def test_gradients_of_a_weight_that_blocks_share_are_summed_once() -> None:
    """Two blocks of a stage with one weight, whose sum takes as long as all else."""
    of = case(2, 2, 2, weight_bytes=64, cluster=Cluster("toy", (Level(2, Link("toy", 10.0, 0.0)),)))
    shared = replace(of.costs.weights[0], blocks=(0, 1))
    of = replace(of, costs=replace(of.costs, weights=(shared,)))
    staged = Staged((0, 2), ((0, 1),), "1f1b", False, 2)
    orders = Orders(of, staged, 2, ahead=False)
    found = simulate(step_ops(of, staged, orders.named(), (1, 1)), of.cluster).seconds
    assert 2 * 6 < ordered_seconds(of, staged, orders.named_alone) <= found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_backbones_do_not_wait_for_each_other(name: str, microbatches: int) -> None:
    """Two of two blocks each, whose losses the last block adds up."""
    lines = [edge(0, 1, num_bytes=0), edge(2, 3, num_bytes=0), edge(1, 4, num_bytes=0), edge(3, 4, num_bytes=0)]
    of = case(5, 3, microbatches, edges=lines)
    staged, bound = Staged((0, 2, 4, 5), ((0,), (1,), (2,)), name, False, 3), shape(name, 3, 3, 1)
    orders = Orders(of, staged, microbatches, ahead=False)
    found = simulate(step_ops(of, staged, orders.named(), (1,) * microbatches), of.cluster).seconds
    assert compute_seconds(of, bound, microbatches, ahead=False) <= found * (1 + 1e-9)


@pytest.mark.parametrize("taken", [0.0, 0.5])
def test_sharing_out_may_be_slower_where_links_take_from_computation(taken: float) -> None:
    """Sums at a step's end are paid for while a rank waits; what it trained for others, from its first forward on."""
    link = Link("toy", 1e9, 0.0, taken_share=taken)
    of = case(3, 2, 2, cluster=Cluster("toy", (Level(2, link),)))
    assert shares_may_slow(of, Staged((0, 3), ((0, 1),), "1f1b", False, 2), 1) == bool(taken)
