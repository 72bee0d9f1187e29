"""Baselines on steps so simple that their times, bytes and memory can be worked out by hand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import sympy
from rich.console import Console

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds
from fxpipe.costs.block_values import BatchValue, Values, Weight
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Block, BlockGraph, Component, Edge
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.staged import Staged
from fxpipe.plan.timeline import Timeline
from fxpipe.show.comparison import Contestant, best_baseline, comparison_table
from fxpipe.simulate import simulate
from fxpipe.simulate import timeline as simulated
from fxpipe.simulate.op_lists import Bytes, Op, StepOps
from passes.case import Case
from passes.comparison import baselines, compare
from passes.comparison.contest import Attempt, best
from passes.comparison.data_parallel import accumulated, replicated
from passes.costs.call_bytes import BackwardBytes, ForwardBytes, UnitKey
from passes.costs.frozen_layers import FrozenLayers, LayerValue
from passes.costs.gradient_flow import GradientFlow
from passes.costs.work import StepWork
from passes.placement.buckets import BUCKET_BYTES
from passes.schedules.named import make_schedule
from passes.step_ops import step_ops
from passes.tuner.bounds import reduction_seconds
from passes.tuner.plans import tuned
from passes.tuner.request import Request

BATCH = sympy.Symbol("b", integer=True, positive=True)
LOSS_BYTES = 4  # told from rank to rank


class Free(CostModel):
    """A device on which sums of gradients cost nothing."""

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return NodeSeconds(*np.zeros((3, len(table))))


@dataclass(frozen=True)
class ByHand:
    """Calls that take what they keep, hand on and give back, and nothing meanwhile."""

    costs: BlockCosts
    edges: Sequence[Edge]
    staged: Staged | None = None

    def of(self, staged: Staged) -> "ByHand":
        return replace(self, staged=staged)

    def _blocks(self, unit: UnitKey) -> tuple[range, list[range]]:
        """Those of a stage, and the runs of them that are computed again."""
        if self.staged is None or unit[0] == "T":
            return range(0), []
        return self.staged.blocks(unit[1]), [range(*run) for run in self.staged.recomputed(unit[1])]

    def forward(self, unit: UnitKey, num_samples: int) -> ForwardBytes:
        blocks, runs = self._blocks(unit)
        saved = self.costs.stage_saved_bytes({*blocks}.difference(*runs), num_samples)
        made = [e for e in self.edges if e.producer in (blocks or ["vae"]) and not set(e.consumers) <= {*blocks}]
        return ForwardBytes(saved, saved, {e.name: (e.name, e.num_bytes(num_samples)) for e in made})

    def backward(self, unit: UnitKey, num_samples: int, part: str, given_up: frozenset[str]) -> BackwardBytes:
        blocks, runs = self._blocks(unit)
        again = max((self.costs.stage_saved_bytes(run, num_samples) for run in runs), default=0)
        read = [e for e in self.edges if e.producer not in blocks and not {*blocks}.isdisjoint(e.consumers)]
        gradients = {e.name: (f"grad {e.name}", e.num_bytes(num_samples)) for e in read if e.requires_grad}
        weights = sum(weight.num_bytes for weight in self.costs.weights_of(blocks))
        return BackwardBytes(again + weights, gradients, weights)

    def layers(self, component: int, layers: tuple[int, int], num_samples: int) -> int:
        return 0


def network(bytes_per_second: float, size: int = 8) -> Cluster:
    return Cluster("toy", (Level(size, Link("toy", bytes_per_second, 0.0)),))


def case(
    num_blocks: int = 3,
    ranks: int = 2,
    batch_size: int = 2,
    weight_bytes: int = BUCKET_BYTES,
    saved_bytes: int = 0,
    frozen_seconds: float = 0.0,
    edges: Sequence[Edge] | None = None,
    cluster: Cluster | None = None,
    limit_bytes: int | None = None,
) -> Case:
    """Blocks of one second forward and two backward per sample, each with one trained weight of 4-byte numbers.

    Where `edges` are left out each block reads what the one before makes, which takes no memory.
    """
    edges = [edge(i, i + 1, num_bytes=0) for i in range(num_blocks - 1)] if edges is None else edges
    weights = tuple(
        Weight(f"w{i}", weight_bytes, weight_bytes // 4, True, (i,), ()) for i in range(num_blocks) if weight_bytes
    )
    kept = tuple(frozenset({i}) for i in range(num_blocks))
    values = Values((saved_bytes * BATCH,) * num_blocks, tuple(range(num_blocks)), kept, (frozenset(),) * num_blocks)
    given = (BatchValue("x", 8 * BATCH, (0,), ()),)
    names = ("vae",) if frozen_seconds else ()

    def seconds(n: int) -> BlockSeconds:
        one, two = (float(n),) * num_blocks, (2.0 * n,) * num_blocks
        return BlockSeconds(n, one, two, one, one, (frozen_seconds * n,) * len(names))

    components = tuple(Component(name, (), ()) for name in names)
    made = [[e.name for e in edges if e.producer == i] for i in range(num_blocks)]
    blocks = tuple(Block(i, f"block {i}", (f"n{i}", *made[i])) for i in range(num_blocks))
    graph = BlockGraph(blocks, components, frozenset(), tuple(edges), (1.0,) * num_blocks, (), ())
    costs = BlockCosts(weights, given, values, len(names), seconds)
    of_layers = tuple(
        LayerValue(e.name, (0, 1), (), tuple(int(c) for c in e.consumers), e.bytes_per_sample, e.batched)
        for e in edges
        if e.producer == "vae"
    )
    halves = FrozenLayers(
        names,
        ((),) * len(names),
        lambda n: ((frozen_seconds * n / 2,) * 2,) * len(names),
        lambda n: ((0.0, 0.0),) * len(names),
        ((), ()), of_layers, {},
    )  # fmt: skip
    work = StepWork(graph, flow(edges, num_blocks, bool(weight_bytes)), f"n{num_blocks - 1}")
    machines = cluster or network(1e30), ranks, batch_size, limit_bytes
    return Case(graph, costs, halves, work, ByHand(costs, edges), Free(), *machines)


def flow(edges: Sequence[Edge], num_blocks: int, trained: bool) -> GradientFlow:
    """What a block makes gets its gradient to its weight, and to what it reads."""
    found: dict[tuple[str, int], frozenset[tuple[str, int]]] = {}
    for block in range(num_blocks):
        reads = [(e.name, 0) for e in edges if block in e.consumers and e.requires_grad]
        sources = frozenset([*reads, *([(f"w{block}", 0)] if trained else [])])
        made = [e.name for e in edges if e.producer == block and e.requires_grad]
        found |= {(name, 0): sources for name in (*made, *([f"n{block}"] if block == num_blocks - 1 else []))}
    return GradientFlow(found, frozenset(f"w{i}" for i in range(num_blocks) if trained))


def edge(producer: int, *consumers: int, num_bytes: int, requires_grad: bool = True) -> Edge:
    name = "_".join(map(str, ("v", producer, *consumers)))
    return Edge(name, producer, consumers, ("main",) * len(consumers), num_bytes, True, requires_grad)


def ddp(of: Case, count: int, recompute: bool = False) -> StepOps:
    """One step with so many micro-batches a rank."""
    staged, sizes = replicated(of, recompute), microbatch_sizes(of.batch_size, count * of.world_size)
    return step_ops(of, staged, accumulated(of, staged, len(sizes)), sizes)


def zero(of: Case, count: int) -> StepOps:
    """The same by ZeRO-3."""
    staged, sizes = replicated(of, False), microbatch_sizes(of.batch_size, count * of.world_size)
    staged = staged.sharing("all")
    return step_ops(of, staged, accumulated(of, staged, len(sizes)), sizes)


def timeline(of: Case, ops: StepOps) -> Timeline:
    return simulated(ops, of.cluster)


def peak_bytes(of: Case, ops: StepOps) -> int:
    return simulate(ops, of.cluster).peak_bytes


def test_ddp_reduces_every_bucket_as_soon_as_it_is_full() -> None:
    """3 s forward, 2 s backward a block, then its bucket: of two ranks a bucket takes its bytes over the bandwidth."""
    fast, slow = case(cluster=network(BUCKET_BYTES)), case(cluster=network(BUCKET_BYTES / 4))
    assert timeline(fast, ddp(fast, 1)).makespan_seconds == pytest.approx(3 + 6 + 1)
    assert timeline(slow, ddp(slow, 1)).makespan_seconds == pytest.approx(3 + 2 + 3 * 4)
    assert timeline(slow, ddp(slow, 1)).bubble_ratio == pytest.approx(1 - 9 / 17)
    assert ddp(fast, 1).wire_bytes == 2 * 3 * BUCKET_BYTES + 2 * LOSS_BYTES


def test_ddp_joins_small_gradients_to_buckets() -> None:
    large, small = case(1, weight_bytes=BUCKET_BYTES * 5 // 2), case(8, weight_bytes=BUCKET_BYTES // 4)
    assert [e.num_bytes for e in timeline(large, ddp(large, 1)).collectives] == [BUCKET_BYTES * 5 // 2] * 2
    found = [e for e in timeline(small, ddp(small, 1)).collectives if e.rank == 0]
    assert [(e.action, e.num_bytes) for e in found] == [("1R0", BUCKET_BYTES), ("0R0", BUCKET_BYTES)]


def test_ddp_accumulates_and_reduces_once() -> None:
    several = case(batch_size=8, frozen_seconds=1.0, cluster=network(BUCKET_BYTES))
    found = timeline(several, ddp(several, 2))
    assert found.makespan_seconds == pytest.approx(4 * (1 + 3 + 6) + 1)
    assert {e.action for e in found.collectives if e.rank == 0} == {"0R0", "1R0", "2R0"}
    again = timeline(several, ddp(several, 2, True))
    assert again.makespan_seconds == pytest.approx(4 * (1 + 3 + 6 + 3) + 1)


def test_zero_gathers_one_block_ahead_and_scatters_behind() -> None:
    """Gathers and scatters take half a second: the first is waited for, the last is, all others hide."""
    of = case(cluster=network(BUCKET_BYTES))
    found = timeline(of, zero(of, 1))
    assert found.makespan_seconds == pytest.approx(0.5 + 3 + 6 + 0.5)
    starts = [e.start_seconds for e in found.collectives if e.rank == 0]
    assert starts == pytest.approx([0.0, 0.5, 1.5, 3.5, 5.5, 6.0, 7.5, 9.5])
    assert zero(of, 1).wire_bytes == 8 * BUCKET_BYTES + 2 * LOSS_BYTES
    slow = case(cluster=network(BUCKET_BYTES / 100))
    assert timeline(slow, zero(slow, 1)).makespan_seconds == pytest.approx(8 * 50 + 2 + 1, rel=0.01)


def test_zero_scatters_after_every_micro_batch() -> None:
    """Of the second micro-batch the first block's weights are still here: 4 gathers more, and 3 scatters."""
    of, slow = (case(batch_size=4, cluster=network(BUCKET_BYTES / of)) for of in (1, 100))
    assert timeline(of, zero(of, 2)).makespan_seconds == pytest.approx(0.5 + 2 * (3 + 6) + 0.5)
    assert zero(of, 2).wire_bytes == (8 + 4 + 3) * BUCKET_BYTES + 2 * LOSS_BYTES
    found = [e.action for e in timeline(of, zero(of, 2)).collectives if e.rank == 0 and e.kind == "reduce_scatter"]
    assert found == ["2R0", "1R0", "0R0", "2R0:1", "1R0:1", "0R0:1"]
    assert reduction_seconds(slow, replicated(slow, False).sharing("all"), 4) == pytest.approx(3 * (1 + 2) * 50)
    assert timeline(slow, zero(slow, 2)).makespan_seconds == pytest.approx((8 + 4 + 3) * 50, rel=0.02)


def line(of: Case, num_microbatches: int) -> StepOps:
    """A stage per block and rank."""
    ranks = tuple((i,) for i in range(of.world_size))
    staged = Staged(tuple(range(of.world_size + 1)), ranks, "1f1b", False, of.world_size)
    work = of.work.of(staged, num_microbatches)
    schedule = make_schedule("1f1b", work, ranks, (1.0,) * of.world_size, (2.0,) * of.world_size)
    sizes = (of.batch_size // num_microbatches,) * num_microbatches
    return step_ops(of, staged, schedule, sizes)


def test_skips_are_sent_to_where_they_are_read() -> None:
    edges = [edge(0, 1, num_bytes=100), edge(1, 2, num_bytes=100), edge(2, 3, num_bytes=100)]
    edges += [edge(0, 3, num_bytes=10), edge(1, 3, num_bytes=1, requires_grad=False)]
    of = case(4, ranks=4, batch_size=8, edges=edges)
    assert line(of, 4).wire_bytes == 8 * (2 * 300 + 2 * 10 + 1) + 3 * LOSS_BYTES
    channels = timeline(of, line(of, 4)).channel_bytes
    assert (channels[0, 3], channels[1, 3], channels[3, 0]) == (8 * 10, 8 * 1, 8 * 10 + LOSS_BYTES)


def test_a_pipelines_bubble_is_its_ramp() -> None:
    of = case(4, ranks=4, batch_size=8, edges=[edge(i, i + 1, num_bytes=1) for i in range(3)])
    found = timeline(of, line(of, 8))
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
    assert names == ["DDP", "ZeRO-3", *two_stages, "GPipe", "1F1B"]
    assert [c.name for c in baselines(case(ranks=1))] == ["DDP", "ZeRO-3"]
    assert "GPipe, 2 stages" not in [c.name for c in baselines(case(ranks=3, batch_size=3))]
    with pytest.raises(CompileError, match="a batch of 2 samples does not give each of 4 ranks one"):
        baselines(case(ranks=4, batch_size=2))


def test_memory_of_data_parallel_training() -> None:
    """Weights, gradients and two averages of 4 bytes are four times the weights; x is 8 bytes a sample. A second
    micro-batch's gradients are there beside the first's before they are added."""
    of = case(3, ranks=2, batch_size=16, weight_bytes=400, saved_bytes=1000)
    assert peak_bytes(of, ddp(of, 1)) == 4 * 1200 + 16 * 8 + 8 * 3000
    assert peak_bytes(of, ddp(of, 4)) == 5 * 1200 + 16 * 8 + 2 * 3000
    assert peak_bytes(of, ddp(of, 4, True)) == 5 * 1200 + 16 * 8 + 2 * 1000


def test_memory_of_sharded_training() -> None:
    """Half of the weights and their averages on either rank; beside it what all four blocks save, the weights of two
    blocks, one on its way, and the gradients of the last one."""
    one = BUCKET_BYTES
    of = case(4, ranks=2, batch_size=16, saved_bytes=one)
    assert peak_bytes(of, zero(of, 1)) == 4 * 3 * one // 2 + 16 * 8 + 8 * 4 * one + 2 * one + one
    assert peak_bytes(of, ddp(of, 1)) == 4 * 3 * one + 16 * 8 + 8 * 4 * one + one
    assert [held["state"] for held in zero(case(3), 1).held] == [2 * one, one]  # whole parameters


def test_memory_decides_on_microbatches_and_recomputation() -> None:
    def settings(limit: int) -> Contestant:
        return baselines(case(3, ranks=2, batch_size=16, weight_bytes=400, saved_bytes=1000, limit_bytes=limit))[0]

    assert settings(50_000).setting == "8 samples a rank"
    assert settings(20_000).setting == "2 x 4 samples a rank"
    assert settings(8_200).setting == "4 x 2 samples a rank, recomputed"
    assert settings(7_500).setting == "8 x 1 samples a rank, recomputed"
    hungry = settings(1_000)
    assert (hungry.setting, hungry.fits) == ("8 x 1 samples a rank, recomputed", False)


def attempt(name: str, seconds: float, peak: int, built: list[str], num_samples: int = 1) -> Attempt:
    def write() -> StepOps:
        built.append(name)
        return StepOps([[Op("begin", "0F0"), Op("run", seconds=seconds, memory=Bytes(most=peak))]], [{}])

    return Attempt(name, 0.9 * seconds, num_samples, write)


def test_only_what_may_win_is_built() -> None:
    built: list[str] = []
    rungs = [
        [
            attempt("slow", 5.0, 1, built),
            attempt("large", 1.0, 99, built, num_samples=2),
            attempt("larger", 1.1, 99, built, num_samples=4),
            attempt("good", 2.0, 10, built),
        ],
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


def test_frozen_work_in_idle_time_is_done_once_and_hides() -> None:
    """Two stages, one micro-batch each way: a third of the time is idle, which the frozen work fills."""
    edges = [edge(0, 1, num_bytes=1), Edge("z", "vae", (0,), ("conditioning",), 4, True, False)]
    of = case(2, ranks=2, batch_size=4, frozen_seconds=0.5, edges=edges, weight_bytes=10**6, cluster=network(1e5))
    asked = Request("1f1b", 2, 4, stages=2, microbatches=2, data_parallel=1, fill="idle")
    plain, filled = compare(of, asked)[-2:]
    assert (plain.name, filled.name) == ("fxpipe", "fxpipe, filled")
    assert plain.seconds == pytest.approx(2 * 0.5 + (2 + 1) * 6, rel=0.01)
    assert filled.seconds == pytest.approx((2 + 1) * 6, rel=0.01)
    found = tuned(of, asked).best
    assert found.simulated is not None
    ops = step_ops(of, found.placed, found.simulated.schedule, found.sizes(of))
    frozen = [e for e in timeline(of, ops).actions if e.kind == "T"]
    pieces = [re.fullmatch(r"0T\[(\d+):(\d+)\]x(\d+):(\d+)", e.action) for e in frozen]
    spans = [tuple(map(int, piece.groups())) for piece in pieces if piece]
    done = [(layer, sample) for a, b, c, d in spans for layer in range(a, b) for sample in range(c, d)]
    assert sorted(done) == [(layer, sample) for layer in range(2) for sample in range(4)]
    assert sum(e.seconds for e in frozen) == pytest.approx(4 * 0.5, abs=0.1)


def row(name: str, seconds: float, fits: bool = True) -> Contestant:
    return Contestant(name, "as it is", seconds, 10, 0.25, 2**20, 2**30, fits)


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
