"""Saved activations: by hand, and against what the explicit stage graphs hand from forward to backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.capture import Capture
from fxpipe.capture.sizes import evaluate
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.costs.saved import SavedActivations, saved_activations
from passes.costs.work import StepWork
from passes.lowering.joint import StageGraphs
from passes.lowering.step_graphs import StepGraphs
from tests.captured import captured, work, zoo
from tests.graph_memory import ARGUMENT, NEW, call_memory
from tests.unet import TinyUNet


class Step(nn.Module):
    """Any function of a [batch, 4, 8] input and two weights of [8, 8], as a training step."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.first, self.second).sum()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 4, 8),)


SIZE = 4 * 8 * 4  # bytes of a sample


def bytes_kept(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, int]:
    """Bytes of a sample that each operation makes and some backward reads; they grow evenly with the batch."""
    saved = saved_activations(captured(Step(function)))
    found: dict[str, int] = {}
    for activation in saved.kept:
        name = activation.maker.rstrip("_0123456789")
        found[name] = found.get(name, 0) + evaluate(activation.num_bytes, 1)
        slope = evaluate(activation.num_bytes, 3) - evaluate(activation.num_bytes, 2)
        assert evaluate(activation.num_bytes, 12) == evaluate(activation.num_bytes, 2) + 10 * slope
    return found


KEPT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], dict[str, int]]] = {
    "inputs and weights are nobody's": (lambda x, v, w: F.linear(x, v), {}),
    "an operand that the backward reads": (lambda x, v, w: F.silu(F.linear(x, v)), {"linear": SIZE}),
    "a result that the backward reads": (lambda x, v, w: torch.tanh(F.linear(x, v)), {"tanh": SIZE}),
    "nothing for a sum": (lambda x, v, w: F.linear(x, v) + x, {}),
    "once, for two readers": (lambda x, v, w: (y := F.linear(x, v)).sin() + y.cos(), {"linear": SIZE}),
    "a view is what it shows": (lambda x, v, w: F.linear(x, v).view(-1, 8)[1:].sin(), {"linear": SIZE}),
    "a copy is not": (lambda x, v, w: F.linear(x, v).transpose(1, 2).reshape(-1, 8).sin(), {"reshape": SIZE}),
    "part of a list": (lambda x, v, w: F.linear(x, v).chunk(2, -1)[1].sin(), {"linear": SIZE}),
    "statistics that only the backward sees": (
        lambda x, v, w: F.layer_norm(F.linear(x, v), (8,)), {"linear": SIZE, "layer_norm": 2 * 4 * 4},
    ),
    "a frozen value that a trained product reads": (lambda x, v, w: F.linear(x.sin(), v), {"sin": SIZE}),
    "what is computed from weights alone": (lambda x, v, w: F.linear(x, v.exp()), {"exp": 8 * 8 * 4}),
    "nothing behind a detach": (lambda x, v, w: F.linear(F.linear(x, w).sin().detach(), v), {"sin": SIZE}),
    "what a mean over the batch leaves": (lambda x, v, w: F.linear(x, v).mean((0, 1)).sin(), {"mean": 8 * 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    function, expected = KEPT[name]
    assert bytes_kept(function) == expected


def test_a_product_of_samples_grows_with_the_square() -> None:
    saved = saved_activations(captured(Step(lambda x, v, w: (y := F.linear(x, v).mean(1)) @ y.mT @ y)))
    (square,) = (a for a in saved.kept if evaluate(a.num_bytes, 4) == 4 * 4 * 4)
    assert evaluate(square.num_bytes, 7) == 7 * 7 * 4


def test_each_result_of_an_operation_grows_with_the_square() -> None:
    def ranked(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        best, places = ((y := F.linear(x, v).mean(1)) @ y.mT).sort(1)
        return best.sin() @ w[places % 8].mean(1)

    kept = [a.num_bytes for a in saved_activations(captured(Step(ranked))).kept if a.maker.startswith("sort")]
    assert [evaluate(one, 7) for one in kept] == [7 * 7 * 4, 7 * 7 * 8]


@pytest.mark.parametrize(
    ("loss", "name"), [(F.cross_entropy, "cross_entropy"), (lambda z, t: torch.linalg.slogdet(z)[1], "linalg_slogdet")]
)
def test_what_an_operation_makes_inside_grows_with_the_square(loss: Callable[..., Tensor], name: str) -> None:
    def contrasted(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, v).mean(1)
        return loss(y @ y.mT, torch.arange(len(y)))

    kept = [a.num_bytes for a in saved_activations(captured(Step(contrasted))).kept if a.maker.startswith(name)]
    assert 7 * 7 * 4 in [evaluate(one, 7) for one in kept]


def test_a_graph_of_one_batch_size_has_numbers() -> None:
    capture = captured(Step(lambda x, v, w: sum(row.sin().mean() for row in F.linear(x, v))), 3)
    assert not capture.batch
    saved = saved_activations(capture)
    assert {a.maker.rstrip("_0123456789") for a in saved.kept} == {"linear"}
    assert sum(int(a.num_bytes) for a in saved.kept) == 3 * SIZE


class Mixed(nn.Module):
    """A no_grad prefix, dropout, fused attention with an expanded key, autocast and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.key = nn.Parameter(torch.randn(1, 2, 6, 8))

    def forward(self, target: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](target).sin()
        key = self.key.expand(x.shape[0], -1, -1, -1)
        query = self.layers[1](x).unflatten(-1, (2, 8)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)
        x = F.dropout(F.gelu(self.layers[2](x)), 0.3, training=True)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[4](torch.tanh(self.layers[3](x))).float()
        y = x.clone()
        y[:, 1:] *= 2.0
        return F.mse_loss(self.layers[5](y), target)

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 6, 16),)


def stage_per_block(capture: Capture, graph: BlockGraph, batch_size: int) -> list[StageGraphs]:
    """The explicit graphs of every block."""
    num_blocks = len(graph.blocks)
    alone = Staged(tuple(range(num_blocks + 1)), ((0,),) * num_blocks, "1f1b", False, 1)
    batch, work, layers = analyse_batch(capture, 2), StepWork.in_capture(capture, graph), ((),) * len(graph.components)
    step = StepGraphs(capture, batch, work, alone, (batch_size,), layers, torch.device("cpu"))
    return [step.graphs(("F", block.index), batch_size) for block in graph.blocks]


def graph_bytes(stage: StageGraphs, edges: set[str]) -> int:
    """Bytes that a stage graph's forward saves: its own, and other blocks' values."""
    saved = set(call_memory(stage.forward).outputs[1])
    read = {stage.border.reads[storage.index] for storage in saved if storage.owner == ARGUMENT}
    made = sum(storage.num_bytes for storage in saved if storage.owner == NEW)
    return made + sum(value.num_bytes for value in read if value.name in edges)


def kept_in(saved: SavedActivations, nodes: set[str], batch_size: int) -> int:
    """Bytes that the backward of these nodes reads, whoever made them."""
    return sum(evaluate(a.num_bytes, batch_size) for a in saved.kept if a.keepers & nodes)


CAPTURES: dict[str, Callable[[], Any]] = {
    "tiny": lambda: captured(TinyUNet("no_grad")),
    "mixed": lambda: captured(Mixed()),
    **{name: lambda name=name: zoo(name) for name in ("lora", "uvit")},
}


@pytest.mark.parametrize("name", CAPTURES)
def test_blocks_keep_what_their_stage_graphs_save(name: str) -> None:
    capture = CAPTURES[name]()
    analyse_batch(capture, 2)  # first, as in the compiler: it leaves nothing in the graph that nobody reads
    graph = analyse_blocks(capture, work(capture), 8)
    saved, edges = saved_activations(capture), {edge.name for edge in graph.edges}
    stages = stage_per_block(capture, graph, 3)
    expected = [graph_bytes(stage, edges) for stage in stages]
    found = [kept_in(saved, set(stage.border.unit.nodes), 3) for stage in stages]
    assert sum(found) == pytest.approx(sum(expected), rel=0.02)
    assert found == pytest.approx(expected, rel=0.1)
