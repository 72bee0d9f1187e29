"""Comparisons: op lists have the times and bytes of rank programs, baselines are those one can work out by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.simulation import walk
from passes.block_costs import block_costs
from passes.comparison import compare, ours
from passes.comparison.memory import ddp_peak_bytes
from passes.fill import per_device
from passes.frozen_layers import Ahead, frozen_layers
from passes.placement.ports import busiest_port_seconds
from passes.rehearsal.case import Case
from passes.rehearsal.memory import frozen_bytes
from passes.rehearsal.op_writer import OpWriter
from passes.rehearsal.pipeline_ops import pipeline_ops
from passes.tuner.candidates import Wishes
from tests.test_block_costs import Tied
from tests.unet import TinyUNet

PROMPT = Cluster("A100-80GB", (Level(8, Link("prompt", 1e9, 1e-9)),))


def case_of(program: fxpipe.Program, limit_bytes: int | None = None) -> Case:
    """What a program was planned from."""
    captured, graph, costing = program.capture, program.plan.blocks, program.costing
    costs = block_costs(captured, graph, costing.costs, costing.model)
    layers = frozen_layers(captured, graph, costing.costs, costing.model)
    size = sum(program.plan.microbatch_sizes)
    return Case(graph, costs, layers, costing.model, costing.cluster, program.world_size, size, limit_bytes)


def seconds(writer: OpWriter, cluster: Cluster) -> float:
    return walk(writer.ops, {}, cluster).timeline().makespan_seconds


PROGRAMS = [
    ("unet", 2, {"schedule": "1f1b", "microbatches": 3}),
    ("unet", 2, {"schedule": "wave", "microbatches": 4}),
    ("unet", 4, {"schedule": "gpipe", "microbatches": 4, "data_parallel": 2}),
    ("unet", 2, {"schedule": "zero-bubble", "microbatches": 4, "recompute": True}),
    ("tied", 3, {"schedule": "1f1b", "microbatches": 5}),
    ("unet", 3, {"schedule": "interleaved", "microbatches": 3}),
]


@pytest.mark.parametrize(("name", "world_size", "options"), PROGRAMS, ids=lambda value: str(value))
def test_op_lists_take_what_rank_programs_take(name: str, world_size: int, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = TinyUNet("no_grad") if name == "unet" else Tied()
    program = fxpipe.compile(model, world_size, batch_size=8, cluster=PROMPT, **options)  # type: ignore[arg-type]
    case = case_of(program)
    writer = pipeline_ops(case, program.plan.staged, program.schedule, program.plan.microbatch_sizes)
    predicted, found = program.simulate(), walk(writer.ops, {}, PROMPT).timeline()
    assert found.makespan_seconds == pytest.approx(predicted.makespan_seconds, rel=0.025)
    assert found.busy_seconds == pytest.approx(predicted.busy_seconds, rel=0.025)
    sent: dict[tuple[int, int], int] = {}
    tied = set(case.costs.shared)
    for message in program.step.messages:
        if message.kind != "loss" and message.value not in tied:
            sent[message.channel] = sent.get(message.channel, 0) + message.num_bytes
    assert found.channel_bytes == dict(sorted(sent.items()))
    assert found.reduced_bytes == pytest.approx(predicted.reduced_bytes) or tied


SLOW = Cluster("A100-80GB", (Level(2, Link("inside", 1e7, 1e-6)), Level(2, Link("across", 1e6, 1e-6))))


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, {"schedule": "wave"}, {"schedule": "gpipe", "data_parallel": 2}]
)
def test_no_step_is_shorter_than_its_busiest_port_needs(options: dict[str, object]) -> None:
    program = fxpipe.compile(TinyUNet(), 4, batch_size=8, microbatches=4, cluster=SLOW, **options)  # type: ignore[arg-type]
    gradients = case_of(program).costs.trained_bytes
    bound = busiest_port_seconds(program.plan.blocks, program.plan.staged, 8, SLOW, gradients)
    assert 0.3 * program.simulate().makespan_seconds < bound <= program.simulate().makespan_seconds


class LargePictures(nn.Module):
    """A frozen convolution whose operands take much memory for a moment, before layers that save even more."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(3, 32, 3, padding=1).requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(8)))

    def forward(self, pictures: Tensor) -> Tensor:
        features = nn.functional.avg_pool2d(self.frozen(pictures), 2).flatten(2).mT
        return self.layers(features).square().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.empty(batch_size, 3, 16, 16, device="meta"),)


def test_frozen_work_needs_no_room_beside_all_that_is_saved() -> None:
    """Where links are free and micro-batches cost, no plan beats data parallel's; ours has to fit where that fits."""
    with torch.device("meta"):
        model = LargePictures()
    program = fxpipe.compile(model, 2, batch_size=256, microbatches=2, schedule="1f1b", cluster=PROMPT)
    case = case_of(program)
    limit = int(1.2 * ddp_peak_bytes(case, 1))
    case = replace(case, limit_bytes=limit)
    assert limit < ddp_peak_bytes(case, 1) + frozen_bytes(case, 128)
    rows = {row.name: row for row in compare(case, Wishes("auto", 2, 256), 0.0)}
    assert rows["DDP"].setting == "128 samples a rank"
    for name in ("fxpipe", "fxpipe, filled"):
        assert rows[name].fits
        assert rows[name].seconds <= 1.005 * rows["DDP"].seconds


def test_searched_orders_have_the_room_that_the_named_one_needs() -> None:
    """Also where frozen work of the next batch would like more of it than is left."""
    limit = 4_919_424
    options: dict[str, Any] = {"stages": 2, "data_parallel": 1, "memory_limit": limit, "budget": 0.0}
    program = fxpipe.compile(LargePictures(), 2, batch_size=64, **options)
    assert program.needed_bytes <= limit


def test_frozen_work_waits_for_room() -> None:
    program = fxpipe.compile(LargePictures(), 2, batch_size=64, microbatches=2, schedule="1f1b", cluster=PROMPT)
    layers = case_of(program).frozen
    little, enough = (max(map(max, layers.largest_at(size))) for size in (1, 64))
    idle, room = (((0.5, 0.6),), ((0.5, 0.6),)), (little, enough)
    hidden = Ahead(layers, 64, room).filled(1.0, idle, per_device, free=True)[1]
    assert hidden.tail_seconds == 0.0, "one by one the samples fit into idle time"
    after = Ahead(layers, 64, room).filled(1.0, ((), ()), per_device, free=True)[1]
    one_by_one = Ahead(layers, 64, room).filled(1.0, ((), ()), per_device, free=False)[1]
    at_once = Ahead(layers, 64).filled(1.0, ((), ()), per_device, free=False)[1]
    assert after.tail_seconds == at_once.tail_seconds < one_by_one.tail_seconds
    together = Ahead(layers, 64, room, whole=True).filled(1.0, idle, per_device, free=True)[1]
    assert min(piece.start_seconds for pieces in together.ranks for piece in pieces) >= 1.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_filled_plans_are_those_of_compiled_programs(world_size: int) -> None:
    program = fxpipe.compile(TinyUNet("no_grad"), world_size, batch_size=16, budget=0.0, cluster=PROMPT)
    plain, filled = ours(case_of(program), Wishes("auto", world_size, 16), 0.0)
    assert filled.setting == str(program.plan.outcomes[0])
    assert filled.seconds == pytest.approx(program.simulate(filled=True).makespan_seconds, rel=0.03)
    assert plain.seconds >= filled.seconds
