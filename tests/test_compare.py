"""Comparisons: contestants and fxpipe's plans through one simulator and one count of memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.compiler import requested
from passes.case import Case
from passes.comparison import baselines, compare, ours
from passes.fill.per_device import no_fill, per_device
from passes.fill.problem import FillProblem
from passes.tuner.request import Request
from tests.steps import needed_bytes
from tests.unet import TinyUNet

PROMPT = Cluster("A100-80GB", (Level(8, Link("prompt", 1e9, 1e-9)),))


def case_of(model: nn.Module, world_size: int, batch_size: int) -> Case:
    asked = requested(model, world_size, batch_size=batch_size, cluster=PROMPT)
    return asked.case(asked.analysed())[0]


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


def test_ours_fits_where_data_parallel_training_fits() -> None:
    """Where links are free and micro-batches cost, no plan beats data parallel's."""
    with torch.device("meta"):
        case = case_of(LargePictures(), 2, 256)
    free = baselines(case)[0]
    case = replace(case, limit_bytes=free.peak_bytes)
    rows = {row.name: row for row in compare(case, Request("auto", 2, 256, budget_seconds=0.0))}
    assert rows["DDP"].setting == "128 samples a rank"
    for name in ("fxpipe", "fxpipe, filled"):
        assert rows[name].fits
        assert rows[name].seconds <= rows["DDP"].seconds


def test_searched_orders_have_the_room_that_the_named_one_needs() -> None:
    """Also where frozen work of the next batch would like more of it than is left."""
    options: dict[str, Any] = {"stages": 2, "data_parallel": 1, "budget": 0.0}
    free = fxpipe.compile(LargePictures(), 2, batch_size=64, **options)
    limit = int(0.9 * needed_bytes(free))
    assert needed_bytes(fxpipe.compile(LargePictures(), 2, batch_size=64, memory_limit=limit, **options)) <= limit


def test_frozen_work_waits_for_room() -> None:
    layers = case_of(LargePictures(), 2, 64).frozen
    little, enough = (max(map(max, layers.largest_at(size))) for size in (1, 64))

    def problem(room: float | None, *idle: tuple[float, float], whole: bool = False) -> FillProblem:
        return FillProblem(1.0, (idle, idle), layers.components(64, room, whole), 64)

    assert per_device(problem(little, (0.5, 0.6))).tail_seconds == 0.0, "one by one the samples fit into idle time"
    at_once, one_by_one = no_fill(problem(enough)).tail_seconds, no_fill(problem(little)).tail_seconds
    assert no_fill(problem(None)).tail_seconds == at_once < one_by_one


@pytest.mark.parametrize("world_size", [2, 4])
def test_filled_plans_are_those_of_compiled_programs(world_size: int) -> None:
    program = fxpipe.compile(TinyUNet("no_grad"), world_size, batch_size=16, budget=0.0, cluster=PROMPT)
    request = Request("auto", world_size, 16, budget_seconds=0.0)
    plain, filled = ours(case_of(TinyUNet("no_grad"), world_size, 16), request)
    assert filled.setting == str(program.plan.outcomes[0])
    form = "steady" if program.plan.steady else "step"
    assert filled.seconds == pytest.approx(program.plan.predicted[form].seconds, rel=1e-5)
    assert plain.seconds >= filled.seconds
