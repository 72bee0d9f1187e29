"""Baselines on steps so simple that their times, bytes and memory can be worked out by hand."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import sympy
from rich.console import Console

from fxpipe.block_graph import Block, BlockGraph, Component, Edge
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.comparison import Contestant, best_baseline, comparison_table
from fxpipe.costs import NodeCost
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds
from fxpipe.costs.block_values import Given, Values, Weight
from fxpipe.errors import CompileError
from fxpipe.simulation import walk
from fxpipe.staged import Staged
from fxpipe.timeline import Timeline
from passes.comparison import baselines, compare
from passes.comparison.contest import Attempt, Built, best
from passes.comparison.data_parallel import BUCKET_BYTES, ddp, zero, zero_seconds
from passes.comparison.memory import ddp_peak_bytes, zero_peak_bytes
from passes.estimate import estimated_work
from passes.frozen_layers import FrozenLayers
from passes.rehearsal.case import Case
from passes.rehearsal.op_writer import OpWriter
from passes.rehearsal.pieces import shared_out
from passes.rehearsal.pipeline_ops import pipeline_ops
from passes.schedules.named import make_schedule
from passes.tuner.candidates import Wishes

BATCH = sympy.Symbol("b", integer=True, positive=True)


class Free:
    """A device on which sums of gradients cost nothing."""

    def forward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        return 0.0

    backward_seconds = backward_input_seconds = backward_weight_seconds = forward_seconds


def network(bytes_per_second: float, size: int = 8) -> Cluster:
    return Cluster("toy", (Level(size, Link("toy", bytes_per_second, 0.0)),))


def case(
    num_blocks: int = 3,
    ranks: int = 2,
    batch_size: int = 2,
    weight_bytes: int = BUCKET_BYTES,
    saved_bytes: int = 0,
    frozen_seconds: float = 0.0,
    edges: Sequence[Edge] = (),
    cluster: Cluster | None = None,
    limit_bytes: int | None = None,
) -> Case:
    """Blocks of one second forward and two backward per sample, each with one trained weight of 4-byte numbers."""
    weights = tuple(
        Weight(f"w{i}", weight_bytes, weight_bytes // 4, True, (i,), ()) for i in range(num_blocks) if weight_bytes
    )
    kept = tuple(frozenset({i}) for i in range(num_blocks))
    values = Values((saved_bytes * BATCH,) * num_blocks, tuple(range(num_blocks)), kept, (frozenset(),) * num_blocks)
    given = (Given("x", 8 * BATCH, (0,), ()),)
    names = ("vae",) if frozen_seconds else ()

    def seconds(n: int) -> BlockSeconds:
        one, two = (float(n),) * num_blocks, (2.0 * n,) * num_blocks
        return BlockSeconds(n, one, two, one, one, (frozen_seconds * n,) * len(names))

    components = tuple(Component(name, (), ()) for name in names)
    blocks = tuple(Block(i, f"block {i}", (f"n{i}",)) for i in range(num_blocks))
    graph = BlockGraph(blocks, components, frozenset(), tuple(edges), (1.0,) * num_blocks, (), ())
    costs = BlockCosts(weights, given, values, len(names), seconds, lambda n: ((0,) * num_blocks, (0,) * len(names)))
    halves = FrozenLayers(
        names,
        ((),) * len(names),
        lambda n: ((frozen_seconds * n / 2,) * 2,) * len(names),
        lambda n: ((0.0, 0.0),) * len(names),
    )
    return Case(graph, costs, halves, Free(), cluster or network(1e30), ranks, batch_size, limit_bytes)


def edge(producer: int, *consumers: int, num_bytes: int, requires_grad: bool = True) -> Edge:
    return Edge(f"v{producer}", producer, consumers, ("main",) * len(consumers), num_bytes, True, requires_grad)


def timeline(of: Case, writer: OpWriter) -> Timeline:
    return walk(writer.ops, {}, of.cluster).timeline()


def test_ddp_reduces_every_bucket_as_soon_as_it_is_full() -> None:
    """3 s forward, 2 s backward a block, then its bucket: of two ranks a bucket takes its bytes over the bandwidth."""
    fast, slow = case(cluster=network(BUCKET_BYTES)), case(cluster=network(BUCKET_BYTES / 4))
    assert timeline(fast, ddp(fast, 1)).makespan_seconds == pytest.approx(3 + 6 + 1)
    assert timeline(slow, ddp(slow, 1)).makespan_seconds == pytest.approx(3 + 2 + 3 * 4)
    assert timeline(slow, ddp(slow, 1)).bubble_ratio == pytest.approx(1 - 9 / 17)
    assert ddp(fast, 1).wire_bytes == 2 * 3 * BUCKET_BYTES


def test_ddp_cuts_large_gradients_into_buckets_and_joins_small_ones() -> None:
    large, small = case(1, weight_bytes=BUCKET_BYTES * 5 // 2), case(8, weight_bytes=BUCKET_BYTES // 4)
    sizes = [e.num_bytes for e in timeline(large, ddp(large, 1)).collectives if e.rank == 0]
    assert sizes == [BUCKET_BYTES, BUCKET_BYTES, BUCKET_BYTES // 2]
    found = [e for e in timeline(small, ddp(small, 1)).collectives if e.rank == 0]
    assert [(e.action, e.num_bytes) for e in found] == [("4B0", BUCKET_BYTES), ("0B0", BUCKET_BYTES)]


def test_ddp_accumulates_and_reduces_once() -> None:
    several = case(batch_size=8, frozen_seconds=1.0, cluster=network(BUCKET_BYTES))
    found = timeline(several, ddp(several, 2))
    assert found.makespan_seconds == pytest.approx(4 * (1 + 3 + 6) + 1)
    assert {e.action for e in found.collectives} == {"0B1", "1B1", "2B1"}
    again = timeline(several, ddp(several, 2, True))
    assert again.makespan_seconds == pytest.approx(4 * (1 + 3 + 6 + 3) + 1)


def test_zero_gathers_one_block_ahead_and_scatters_behind() -> None:
    """Gathers and scatters take half a second: the first is waited for, the last is, all others hide."""
    of = case(cluster=network(BUCKET_BYTES))
    found = timeline(of, zero(of, 1))
    assert found.makespan_seconds == pytest.approx(0.5 + 3 + 6 + 0.5)
    starts = [e.start_seconds for e in found.collectives if e.rank == 0]
    assert starts == pytest.approx([0.0, 0.5, 1.5, 3.5, 5.5, 6.0, 7.5, 9.5])
    assert zero(of, 1).wire_bytes == 8 * BUCKET_BYTES
    assert zero_seconds(of) == pytest.approx(8 * 0.5)
    slow = case(cluster=network(BUCKET_BYTES / 100))
    assert timeline(slow, zero(slow, 1)).makespan_seconds == pytest.approx(zero_seconds(slow) + 2 + 1, rel=0.01)


def line(of: Case, num_microbatches: int, relayed: bool) -> OpWriter:
    """A stage per block and rank."""
    ranks = tuple((i,) for i in range(of.world_size))
    staged = Staged(tuple(range(of.world_size + 1)), ranks, "1f1b", False, of.world_size)
    work = estimated_work(of.graph, staged, num_microbatches)
    schedule = make_schedule("1f1b", work, ranks, (1.0,) * of.world_size, (2.0,) * of.world_size)
    sizes = (of.batch_size // num_microbatches,) * num_microbatches
    return pipeline_ops(of, staged, schedule, sizes, relayed=relayed)


def test_relays_hand_everything_on() -> None:
    edges = [edge(0, 1, num_bytes=100), edge(1, 2, num_bytes=100), edge(2, 3, num_bytes=100)]
    edges += [edge(0, 3, num_bytes=10), edge(1, 3, num_bytes=1, requires_grad=False)]
    of = case(4, ranks=4, batch_size=8, edges=edges)
    assert line(of, 4, False).wire_bytes == 8 * (2 * 300 + 2 * 10 + 1)
    assert line(of, 4, True).wire_bytes == 8 * (2 * 300 + 2 * 30 + 2)
    channels = timeline(of, line(of, 4, True)).channel_bytes
    assert channels[2, 3] == 8 * 111
    assert channels[3, 2] == 8 * 110
    assert set(channels) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}


def test_a_pipelines_bubble_is_its_ramp() -> None:
    of = case(4, ranks=4, batch_size=8, edges=[edge(i, i + 1, num_bytes=1) for i in range(3)])
    found = timeline(of, line(of, 8, False))
    assert found.makespan_seconds == pytest.approx((8 + 3) * 3)
    assert found.bubble_ratio == pytest.approx(3 / 11)


def test_gpipe_of_two_stages_runs_frozen_work_first() -> None:
    edges = [edge(i, i + 1, num_bytes=1) for i in range(3)]
    of = case(4, ranks=4, batch_size=32, frozen_seconds=0.5, edges=edges, cluster=network(1e30))
    (found,) = (c for c in baselines(of) if c.name == "GPipe, 2 stages")
    assert found.setting == "2 stages x 2 replicas, 4 micro-batches of 4"
    assert found.seconds == pytest.approx(8 * 0.5 + (4 + 1) * 4 * 6)
    assert found.bubble_ratio == pytest.approx(1 * 24 / found.seconds)


def test_baselines_by_name_and_order() -> None:
    edges = [edge(i, i + 1, num_bytes=1) for i in range(3)]
    names = [c.name for c in baselines(case(4, ranks=4, batch_size=16, edges=edges))]
    two_stages = ["GPipe, 2 stages", "GPipe, recomputed"]
    assert names == ["DDP", "ZeRO-3", *two_stages, "GPipe, relayed", "1F1B, relayed", "1F1B, direct"]
    assert [c.name for c in baselines(case(ranks=1))] == ["DDP", "ZeRO-3"]
    assert "GPipe, 2 stages" not in [c.name for c in baselines(case(ranks=3, batch_size=3))]
    with pytest.raises(CompileError, match="a batch of 2 samples does not give each of 4 ranks one"):
        baselines(case(ranks=4, batch_size=2))


def test_memory_of_data_parallel_training() -> None:
    """Weights, gradients and two averages of 4 bytes are four times the weights; x is 8 bytes a sample."""
    of = case(3, ranks=2, batch_size=16, weight_bytes=400, saved_bytes=1000)
    assert ddp_peak_bytes(of, 1) == 4 * 1200 + 8 * 8 + 8 * 3000
    assert ddp_peak_bytes(of, 4) == 4 * 1200 + 8 * 8 + 2 * 3000
    assert ddp_peak_bytes(of, 4, True) == 4 * 1200 + 8 * 8 + 2 * 1000
    assert zero_peak_bytes(of, 1) == 2 * 1200 + 3 * 400 + 8 * 8 + 8 * 3000


def test_memory_decides_on_microbatches_and_recomputation() -> None:
    def settings(limit: int) -> Contestant:
        return baselines(case(3, ranks=2, batch_size=16, weight_bytes=400, saved_bytes=1000, limit_bytes=limit))[0]

    assert settings(50_000).setting == "8 samples a rank"
    assert settings(20_000).setting == "2 x 4 samples a rank"
    assert settings(7_000).setting == "4 x 2 samples a rank, recomputed"
    assert settings(6_000).setting == "8 x 1 samples a rank, recomputed"
    hungry = settings(1_000)
    assert (hungry.setting, hungry.fits) == ("8 x 1 samples a rank, recomputed", False)


def attempt(name: str, seconds: float, peak: int, built: list[str]) -> Attempt:
    def build() -> Built:
        built.append(name)

        def ops() -> OpWriter:
            writer = OpWriter(1)
            writer.begin(0, "0F0")
            writer.run(0, seconds)
            writer.end(0)
            return writer

        return Built(peak, ops)

    return Attempt(name, 0.9 * seconds, build)


def test_only_what_may_win_is_built() -> None:
    built: list[str] = []
    rungs = [
        [attempt("slow", 5.0, 1, built), attempt("large", 1.0, 99, built), attempt("good", 2.0, 10, built)],
        [attempt("never", 1.0, 1, built)],
    ]
    found = best(case(limit_bytes=50), "x", rungs)
    assert found is not None
    assert (found.setting, found.seconds, built) == ("good", 2.0, ["large", "good"])
    too_large = [[attempt("large", 1.0, 99, built)], [attempt("less", 3.0, 70, built)]]
    least = best(case(limit_bytes=50), "x", too_large)
    assert least is not None
    assert (least.setting, least.fits) == ("less", False)
    assert best(case(), "x", []) is None


def test_shares_hold_every_sample_once() -> None:
    of = case(ranks=3, batch_size=8, frozen_seconds=1.0)
    for most in (None, 2, 1):
        pieces = [piece for of_rank in shared_out(of, most) for piece in of_rank]
        assert sorted(s for p in pieces for s in range(p.start, p.stop)) == list(range(8))
        assert all(p.stop - p.start <= (most or 8) and p.is_final(of) for p in pieces)


def test_frozen_work_in_idle_time_is_done_once_and_hides() -> None:
    """Two stages, one micro-batch each way: a third of the time is idle, which the frozen work fills."""
    edges = [edge(0, 1, num_bytes=1), Edge("z", "vae", (0,), ("conditioning",), 4, True, False)]
    of = case(2, ranks=2, batch_size=4, frozen_seconds=0.5, edges=edges, weight_bytes=10**6, cluster=network(1e5))
    plain, filled = compare(of, Wishes("1f1b", 2, 4, stages=2, microbatches=2, data_parallel=1), 0.0)[-2:]
    assert (plain.name, filled.name) == ("fxpipe", "fxpipe, filled")
    assert plain.seconds == pytest.approx(2 * 0.5 + (2 + 1) * 6, rel=0.01)
    assert filled.seconds == pytest.approx((2 + 1) * 6, rel=0.01)
    pieces = [
        re.fullmatch(r"0T\[(\d+):(\d+)\]x(\d+):(\d+)", e.action) for e in filled.timeline.actions if e.kind == "T"
    ]
    spans = [tuple(map(int, piece.groups())) for piece in pieces if piece]
    done = [(layer, sample) for a, b, c, d in spans for layer in range(a, b) for sample in range(c, d)]
    assert sorted(done) == [(layer, sample) for layer in range(2) for sample in range(4)]
    assert sum(e.seconds for e in filled.timeline.actions if e.kind == "T") == pytest.approx(4 * 0.5, abs=0.1)


def row(name: str, seconds: float, fits: bool = True) -> Contestant:
    return Contestant(name, "as it is", seconds, 10, 0.25, 2**20, 2**30, fits, Timeline((), 1))


def test_throughput_is_relative_to_the_fastest_baseline_that_fits() -> None:
    rows = [row("DDP", 1.0, False), row("1F1B", 4.0), row("GPipe", 5.0), row("fxpipe", 2.0)]
    assert best_baseline(rows) == rows[1]
    assert best_baseline(rows[:1]) is None
    console = Console(width=160)
    with console.capture() as captured:
        console.print(comparison_table(rows, 2**29))
    cells = [[c.strip() for c in text.strip("│").split("│")] for text in captured.get().splitlines() if text[0] == "│"]
    assert [c[-1] for c in cells] == ["4.00x", "1.00x", "0.80x", "2.00x"]
    assert cells[0][-2] == "1.0 GiB > 512.0 MiB"
    assert cells[3][2:6] == ["2.000 s", "5.0", "25.0%", "1.0 MiB"]
    assert replace(rows[3], seconds=5.0).samples_per_second == 2.0
