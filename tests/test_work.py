"""The work of stages told from the block graph is what their traced graphs do."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from fxpipe.plan.actions import Work
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.costs.work import StepWork
from passes.lowering.step_graphs import StepGraphs
from tests.captured import captured, work, zoo
from tests.frozen_steps import FrozenStep
from tests.models import PEER_CASES
from tests.strategies import RandomStep, StepSpec, step_specs

CPU = torch.device("cpu")
MICROBATCHES = 2


class Opaque(nn.Module):
    """Weights and values that types alone would say are trained: read for their shape, their sign or their order, by
    what is detached, or by a later layer that stops the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.like, self.order, self.steps = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) + torch.zeros_like(self.like) + torch.ones_like(x)
        stopped = self.layers[1](x)
        x = torch.tanh(self.layers[2](x)) * torch.full_like(stopped, 0.5)
        values, indices = x.sort(dim=-1)
        x = values + self.order.argsort().to(x.dtype) + indices.to(x.dtype)
        x = torch.tanh(self.layers[3](x)) + torch.round(self.steps)
        with torch.no_grad():
            shift = self.layers[4](x)
        return F.mse_loss(self.layers[5](x + shift) + stopped.detach(), target)

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 4), torch.randn(batch_size, 4)


def line(boundaries: tuple[int, ...]) -> Staged:
    stages = len(boundaries) - 1
    return Staged(boundaries, tuple((stage,) for stage in range(stages)), "1f1b", False, stages)


def random_line(graph: BlockGraph, rng: random.Random) -> Staged:
    """Any cuts, empty stages among them."""
    blocks = len(graph.blocks)
    inner = sorted(rng.choices(range(blocks + 1), k=rng.randint(0, 2 * blocks)))
    return line((0, *inner, blocks))


def check(capture: Capture, num_layouts: int, num_blocks: int = 8, seed: int = 0) -> None:
    """Equal for some random layouts, and for a stage per block."""
    batch = analyse_batch(capture, MICROBATCHES)
    graph = analyse_blocks(capture, work(capture), num_blocks)
    rng = random.Random(seed)
    known = StepWork.in_capture(capture, graph)
    layouts = [line(tuple(range(len(graph.blocks) + 1))), *(random_line(graph, rng) for _ in range(num_layouts))]
    for staged in layouts:
        assert all(a <= b for a, b in pairwise(staged.boundaries))
        layers = ((),) * len(graph.components)
        step = StepGraphs(capture, batch, known, staged, (1,) * MICROBATCHES, layers, CPU)
        assert known.of(staged, MICROBATCHES) == traced_work(step), staged.boundaries


def traced_work(step: StepGraphs) -> Work:
    """The work as the recorded graphs have it; what they return, and where gradients are, is checked as they are."""
    one = {key: step.graphs(key, 1) for key in step.units}
    producer = {value: key for key, graphs in one.items() for value in graphs.border.unit.returns}
    reads = {(producer[v], key) for key, graphs in one.items() for v in graphs.border.unit.reads if v in producer}
    stages = {index: graphs for (kind, index), graphs in one.items() if kind == "F"}
    gradients = {
        (s, producer[v.name][1])
        for (kind, s), graphs in one.items()
        for v in graphs.border.reads
        if kind == "F" and v.requires_grad and graphs.input_grads
    }

    def pairs(source: str, target: str) -> frozenset[tuple[int, int]]:
        return frozenset((a, b) for (first, a), (second, b) in reads if (first, second) == (source, target))

    return Work(
        num_stages=step.staged.num_stages,
        num_microbatches=MICROBATCHES,
        num_components=len(step.graph.components),
        empty=frozenset(range(step.staged.num_stages)) - frozenset(stages),
        backward=frozenset(s for s, graphs in stages.items() if graphs.input_grads or graphs.weight_nodes),
        input_grad=frozenset(s for s, _ in gradients),
        weight_grad=frozenset(s for s, graphs in stages.items() if graphs.weight_nodes),
        edges=pairs("F", "F"),
        grad_edges=frozenset(gradients),
        frozen_edges=pairs("T", "F"),
        component_edges=pairs("T", "T"),
    )


@pytest.mark.parametrize("name", ["sd", "controlnet", "lora", "uvit", "dit"])
def test_zoo(name: str) -> None:
    check(zoo(name), 0, 6)


@pytest.mark.parametrize("name", PEER_CASES)
def test_peer_cases(name: str) -> None:
    torch.manual_seed(0)
    check(captured(PEER_CASES[name]()), 2)


@pytest.mark.parametrize("how", ["", "doubled", "inner", "shared"])
def test_frozen_components(how: str) -> None:
    check(captured(FrozenStep(how=how)), 3)


def test_what_types_alone_would_say_trains() -> None:
    capture = captured(Opaque())
    check(capture, 20, 12)
    flow = StepWork.in_capture(capture, analyse_blocks(capture, work(capture), 12)).flow
    names = [node.name for node in capture.graph.nodes if node.op == "call_function"]
    marked = [name for name in names if capture.nodes[name].meta["requires_grad"]]
    assert {name for name in names if flow.requires_grad(name)} <= set(marked)


@given(step_specs(), st.integers(0, 99))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_random_steps(spec: StepSpec, seed: int) -> None:
    try:
        capture = captured(RandomStep(spec))
        check(capture, 2, seed=seed)
    except CompileError:
        assume(False)
