"""Lines cut for the shortest step: against brute force, by definition, and on clusters where the answer is plain."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Block, BlockGraph, Edge
from passes.placement.lines import LineCosts, cut_line, uneven_line
from passes.placement.lines.shortest import Stages, shortest_line
from passes.placement.lines.traffic import traffic
from passes.placement.memory import StageMemory

AMOUNTS = st.integers(0, 9).map(float)


def chain(num_blocks: int, sizes: dict[tuple[int, ...], int], frozen: tuple[int, ...] = ()) -> BlockGraph:
    """Values by (producer, consumers); those numbered in `frozen` need no gradient."""
    blocks = tuple(Block(i, f"b{i}", (f"n{i}",)) for i in range(num_blocks))
    edges = tuple(
        Edge(f"e{k}", made, readers, tuple("main" if r == made + 1 else "skip" for r in readers), size, True,
             k not in frozen)
        for k, ((made, *rest), size) in enumerate(sizes.items()) for readers in [tuple(rest)]
    )  # fmt: skip
    return BlockGraph(blocks, (), frozenset(), edges, (1.0,) * num_blocks, (), ())


@st.composite
def problems(draw: st.DrawFn) -> tuple[Stages, float]:
    size = draw(st.integers(2, 7))
    count = draw(st.integers(1, size - 1))
    stage = np.tri(size, k=-1, dtype=bool).T

    def table() -> np.ndarray:
        values = draw(st.lists(st.one_of(AMOUNTS, st.just(np.inf)), min_size=size * size, max_size=size * size))
        return np.where(stage, np.reshape(values, (size, size)), np.inf)

    messages = [np.array(draw(st.lists(AMOUNTS, min_size=size, max_size=size))) for _ in range(count)]
    return Stages([table() for _ in range(count)], messages), float(draw(st.integers(1, 5)))


@given(problems())
@settings(max_examples=200, deadline=None)
def test_no_cut_is_shorter(problem: tuple[Stages, float]) -> None:
    stages, weight = problem
    last = len(stages.messages[0]) - 1
    every = [(0, *inner, last) for inner in combinations(range(1, last), len(stages.periods) - 1)]

    def by_definition(cuts: tuple[int, ...]) -> float:
        runs = list(enumerate(pairwise(cuts)))
        sent = sum(stages.messages[k][stop] for k, (_, stop) in runs)
        return weight * max(stages.periods[k][start, stop] for k, (start, stop) in runs) + sent

    best = min(map(by_definition, every))
    found = shortest_line(stages, weight)
    if best == np.inf:
        assert found is None
    else:
        assert found is not None
        assert by_definition(found) == pytest.approx(best)  # amounts are whole: a thousandth less is no other value


def test_late_reductions_are_spread() -> None:
    """Balanced, the last two blocks are one stage, whose gradients take 40 s more than there is time for."""
    runs = np.where(np.tri(5, k=-1, dtype=bool).T, np.subtract.outer(np.arange(5.0), np.arange(5.0)).T, np.inf)
    late = np.zeros((5, 5))
    late[:, 4] = [40.0, 40.0, 40.0, 0.0, 0.0]
    nothing = [np.zeros(5), np.zeros(5)]
    assert shortest_line(Stages([runs, runs], nothing), 4.0) == (0, 2, 4)
    assert shortest_line(Stages([runs, runs], nothing, late), 4.0) == (0, 3, 4)


@given(st.lists(AMOUNTS, min_size=3, max_size=7), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_uneven_replicas_are_the_least_busy(seconds: list[float], num_stages: int, more: int) -> None:
    num_ranks, last = num_stages + more, len(seconds)
    cuts, replicas = uneven_line(seconds, num_stages, num_ranks)

    def busiest(cuts: tuple[int, ...], replicas: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) / r for (a, b), r in zip(pairwise(cuts), replicas, strict=True))

    shares = [
        tuple(b - a for a, b in pairwise((0, *inner, num_ranks)))
        for inner in combinations(range(1, num_ranks), num_stages - 1)
    ]
    every = [(0, *inner, last) for inner in combinations(range(1, last), num_stages - 1)]
    assert (cuts[0], cuts[-1], sum(replicas), min(replicas)) == (0, last, num_ranks, min(*replicas, num_ranks))
    assert min(replicas) >= 1
    assert busiest(cuts, replicas) == pytest.approx(min(busiest(c, r) for c in every for r in shares))


def test_traffic_counts_a_value_once_for_each_run_that_reads_it() -> None:
    """0 sends 5 to 1 and 3; 1 sends 2 to 2, without a gradient; 2 sends 1 to 3."""
    found = traffic(chain(4, {(0, 1, 3): 5, (1, 2): 2, (2, 3): 1}, frozen=(1,)))
    assert found.busiest[0, 1] == 5  # sent, and its gradient received
    assert found.busiest[1, 2] == 7  # 5 in, 2 out, of which a gradient goes back for 5
    assert found.busiest[2, 4] == 7  # 5 and 2 in
    assert found.busiest[1, 4] == 5  # once, though two blocks read it
    assert found.busiest[0, 4] == 0
    assert found.values.tolist() == [0, 5, 7, 6, 0]
    assert found.gradients.tolist() == [0, 5, 5, 6, 0]
    assert found.main.tolist() == [0, 5, 2, 1, 0]


def test_cuts_avoid_the_slow_link() -> None:
    """Two nodes of two: the middle cut, between nodes, goes where little crosses; within a node it does not matter."""
    graph = chain(8, {(i, i + 1): 10**9 if i != 4 else 1 for i in range(7)})
    ranks = [(0,), (1,), (2,), (3,)]
    line = LineCosts(graph, [1.0] * 8, [0.5] * 8, [0.0] * 8, 1)
    assert cut_line(line, ranks, Cluster.parse("2x2xA100+Ethernet-1"), 8)[2] == 5
    assert cut_line(line, ranks, Cluster.parse("4xA100"), 8) == (0, 2, 4, 6, 8)


def test_a_wait_counts_where_few_micro_batches_are_in_flight() -> None:
    """A message and its answer take 2 s: with 1F1B the cut that sends nothing is worth an uneven load."""
    link = Cluster.parse("2x1xA100+Ethernet-1")
    second = int(1 / (link.transfer_seconds(0, 1, 2 * 10**9) - link.transfer_seconds(0, 1, 10**9)) * 10**9)
    graph = chain(8, {(i, i + 1): second if i != 4 else 1 for i in range(7)})
    for waits, cut in ((False, 4), (True, 5)):
        line = LineCosts(graph, [1.0] * 8, [0.5] * 8, [0.0] * 8, 1, waits)
        assert cut_line(line, [(0,), (1,)], link, 100) == (0, cut, 8)


def test_memory_and_few_blocks() -> None:
    graph, cluster = chain(6, {}), Cluster.parse("2xA100")
    line = LineCosts(graph, [1.0] * 6, [0.5] * 6, [0.0] * 6, 1)
    memory = StageMemory([0.0] * 6, [1.0] * 6, [2, 1], [4, 4])
    assert cut_line(line, [(0,), (1,)], cluster, 8) == (0, 3, 6)
    assert cut_line(line, [(0,), (1,)], cluster, 8, memory) == (0, 2, 6)
    with pytest.raises(CompileError, match="no line of stages fits"):
        cut_line(line, [(0,), (1,)], cluster, 8, StageMemory([0.0] * 6, [1.0] * 6, [2, 1], [3, 3]))
    short = LineCosts(chain(2, {}), [1.0] * 2, [0.5] * 2, [0.0] * 2, 1)
    assert cut_line(short, [(0,), (1,), (0,), (1,)], cluster, 8) == (0, 1, 2, 2, 2)
