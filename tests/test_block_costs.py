"""Block costs against what they stand for: node by node seconds, state, and the simulator's memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxpipe
from cost_models.devices import device
from cost_models.flops import node_costs
from cost_models.profiled import Entry, key_of, with_measurements
from cost_models.roofline import Roofline
from fxpipe.block_graph import BlockGraph
from fxpipe.capture import Capture
from fxpipe.costs import CostModel, NodeCost, Seconds, evaluate, node_seconds
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.costs.polynomials import Polynomials
from fxpipe.costs.table import CostTable, seconds_of_table
from fxpipe.errors import CompileError
from fxpipe.memory import ADAMW_BYTES
from passes.block_costs import block_costs
from passes.blocks import analyse
from passes.estimate import BlockTimes, estimated_work
from passes.order import Resources, order
from passes.room import Room
from tests.captured import captured, work
from tests.models import ZOO
from tests.unet import TinyUNet

S = sympy.Symbol("s", integer=True, positive=True)
COUNTS = st.integers(0, 10**9)


@given(st.lists(st.tuples(COUNTS, COUNTS, st.integers(0, 10**6), st.sampled_from([1, 2, 3])), max_size=6))
def test_polynomials_are_their_expressions(terms: list[tuple[int, int, int, int]]) -> None:
    expressions = [a + b * S + c * S**2 + sympy.floor(S / d) * (d - 1) for a, b, c, d in terms]
    expressions += [sympy.Integer(7), 3 * S, S * (S + 1), S**3, sympy.Symbol("t") + S, S / 2]
    table = Polynomials(expressions)
    for num_samples in (1, 6):
        assert table.at(num_samples).tolist() == [evaluate(e, num_samples) for e in expressions]


class Tied(nn.Module):
    """A frozen encoder; four layers, the last one with the first one's weight; a buffer that several read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i == 1) for i in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.layers[2].weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        target = h = torch.tanh(self.encoder(x))
        for layer in self.layers:
            h = F.silu(layer(h)) * self.get_buffer("scale")
        return F.mse_loss(h, target) + x.mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 4, 8),)


@dataclass(frozen=True)
class Case:
    """A model cut into blocks, and costed."""

    captured: Capture
    graph: BlockGraph
    costs: Mapping[str, NodeCost]

    def costed(self, model: CostModel) -> BlockCosts:
        return block_costs(self.captured, self.graph, self.costs, model)


def case(model: nn.Module, num_blocks: int) -> Case:
    found = captured(model)
    costs = {node.name: cost for node, cost in node_costs(found.graph.nodes).items()}
    return Case(found, analyse(found, work(found), num_blocks), costs)


@pytest.fixture(scope="module")
def unet() -> Case:
    return case(TinyUNet("no_grad"), 6)


@pytest.fixture(scope="module")
def tied() -> Case:
    return case(Tied(), 4)


class ByTen:
    """A user's own model: seconds from FLOPs and bytes, node by node."""

    def forward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        return evaluate(cost.forward_flops, num_samples) / 10

    def backward_input_seconds(self, cost: NodeCost, num_samples: int) -> float:
        return evaluate(cost.backward_input_bytes, num_samples) / 10

    def backward_weight_seconds(self, cost: NodeCost, num_samples: int) -> float:
        return evaluate(cost.backward_weight_bytes, num_samples) / 20

    def backward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        return self.backward_input_seconds(cost, num_samples) + self.backward_weight_seconds(cost, num_samples)


class OfGraph(ByTen):
    """A user's own model that knows the nodes of a graph."""

    def node_seconds(self, graph: fx.Graph, costs: Mapping[str, NodeCost], num_samples: int) -> Seconds:
        numbers = {name: float(i * num_samples) for i, name in enumerate(costs)}
        return Seconds(numbers, {name: 3 * number for name, number in numbers.items()})


class Doubled(Roofline):
    """A subclass whose seconds its parent's arrays would not know of."""

    def forward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        return 2 * super().forward_seconds(cost, num_samples)


def profiled(graph: fx.Graph, names: list[str]) -> CostModel:
    half = len(names) // 2
    entries = (
        Entry("a", tuple(names[:half]), (1, 4), (1.0, 3.0), (2.0, 8.0)),
        Entry("b", tuple(names[half:]), (1, 4), (0.5, 0.6), (0.0, 0.0)),
    )
    return with_measurements(device(), key_of(graph, torch.device("cpu")), entries)


MODELS: dict[str, Callable[[Case], CostModel]] = {
    "roofline": lambda case: device("A100-80GB"),
    "mixed precision": lambda case: device("H100@bfloat16"),
    "profile": lambda case: profiled(case.captured.graph, list(case.costs)),
    "user's": lambda case: ByTen(),
    "user's, of the graph": lambda case: OfGraph(),
    "user's, a roofline changed": lambda case: Doubled(1e12, 1e11, 0.5, 0.5, 1e-6),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_samples", [1, 5])
def test_seconds_of_a_table_are_those_of_its_nodes(unet: Case, name: str, num_samples: int) -> None:
    model = MODELS[name](unet)
    expected = node_seconds(model, unet.captured.graph, unet.costs, num_samples)
    found = seconds_of_table(model, unet.captured.graph, CostTable(unet.costs))(num_samples)
    np.testing.assert_allclose(found.forward, list(expected.forward.values()), rtol=1e-12)
    backward = found.backward_input + found.backward_weight
    np.testing.assert_allclose(backward, list(expected.backward.values()), rtol=1e-12)
    inputs = np.array([model.backward_input_seconds(cost, num_samples) for cost in unet.costs.values()])
    weights = np.array([model.backward_weight_seconds(cost, num_samples) for cost in unet.costs.values()])
    np.testing.assert_allclose(found.backward_input * weights, found.backward_weight * inputs, rtol=1e-9, atol=1e-30)


def test_a_profile_of_another_graph_is_refused(unet: Case, tied: Case) -> None:
    with pytest.raises(CompileError, match="the profile is of another graph"):
        tied.costed(profiled(unet.captured.graph, list(unet.costs)))


def test_blocks_and_components_cost_what_their_nodes_do(unet: Case) -> None:
    model = device("A100-80GB")
    costs, seconds = unet.costed(model), node_seconds(model, unet.captured.graph, unet.costs, 3)
    times = costs.at(3)
    assert times is costs.at(3)
    assert times.num_samples == 3
    for block in unet.graph.blocks:
        forward, backward = (sum(of[n] for n in block.nodes) for of in (seconds.forward, seconds.backward))
        assert times.forward_seconds[block.index] == pytest.approx(forward)
        assert times.backward_seconds[block.index] == pytest.approx(backward)
        parts = times.input_gradient_seconds[block.index] + times.weight_gradient_seconds[block.index]
        assert parts == pytest.approx(backward)
    frozen = [sum(seconds.forward[n] for n in component.nodes) for component in unet.graph.components]
    assert list(times.component_seconds) == pytest.approx(frozen)
    assert len(costs.parameter_bytes) == costs.num_blocks == len(unet.graph.blocks)


def test_weights_of_blocks_and_components(tied: Case) -> None:
    costs = tied.costed(device())
    first, last = costs.shared["layers.0.weight"]
    assert set(costs.shared) <= {"layers.0.weight", "scale"}
    assert (first, last) == (0, costs.num_blocks - 1)
    assert costs.component_bytes == (9 * 8 * 4,)
    both = costs.weights_of({first, last})
    assert [weight.name for weight in both].count("layers.0.weight") == 1
    assert costs.parameter_bytes[first] + costs.parameter_bytes[last] > sum(weight.num_bytes for weight in both)
    everywhere = costs.weights_of(range(costs.num_blocks))
    assert sum(w.num_elements for w in everywhere if w.trained) == 2 * 64 + 8
    assert sum(w.num_bytes for w in everywhere) == (3 * 64 + 8 + 8) * 4
    assert sum(costs.trained_elements) == 3 * 64 + 8  # the tied one twice
    assert sum(costs.trained_bytes) == 4 * sum(costs.trained_elements)


def test_saved_bytes_by_hand(tied: Case) -> None:
    """Each silu keeps its operand, each product its input where its weight is trained, the loss both operands."""
    costs, row = tied.costed(device()), 4 * 8 * 4
    assert [size // row for size in costs.saved_bytes(1)] == [3, 1, 2, 2]  # with block 0 what the frozen encoder made
    assert costs.saved_bytes(5) == tuple(5 * size for size in costs.saved_bytes(1))
    stages = {(0,): 2, (1,): 2, (2,): 1, (3,): 4, (1, 2): 3, (2, 3): 5, (0, 1, 2, 3): 8}
    assert {blocks: costs.stage_saved_bytes(blocks, 2) // (2 * row) for blocks in stages} == stages


def test_inputs_are_what_recomputation_saves(tied: Case) -> None:
    costs, row = tied.costed(device()), 4 * 8 * 4
    assert [size // row for size in costs.saved_bytes_recomputed(1)] == [1, 1, 1, 1]
    stages = {(0,): 1, (1,): 1, (3,): 2, (2, 3): 2, (0, 1, 2, 3): 1}
    assert {blocks: costs.stage_saved_bytes(blocks, 3, recomputed=True) // (3 * row) for blocks in stages} == stages
    assert costs.given_bytes([1], 5) == costs.given_bytes(range(4), 5) == 5 * row


def test_a_stage_keeps_no_more_than_its_blocks(unet: Case) -> None:
    costs = unet.costed(device())
    for start in range(costs.num_blocks):
        for stop in range(start + 1, costs.num_blocks + 1):
            alone = sum(costs.stage_saved_bytes([block], 3) for block in range(start, stop))
            whole = costs.stage_saved_bytes(range(start, stop), 3)
            assert whole <= alone
            again = costs.stage_saved_bytes(range(start, stop), 3, recomputed=True)
            assert again <= sum(costs.saved_bytes_recomputed(3)[start:stop]) + sum(
                evaluate(costs.values.num_bytes[v], 3) for v, m in enumerate(costs.values.maker) if m is None
            )
    everything = costs.stage_saved_bytes(range(costs.num_blocks), 3)
    assert sum(costs.saved_bytes(3)) == everything


def test_inputs_of_a_recomputed_block_are_its_edges(unet: Case) -> None:
    costs = unet.costed(device())
    for block in range(costs.num_blocks):
        edges = unet.graph.inputs(block)
        assert costs.stage_saved_bytes([block], 4, recomputed=True) == sum(edge.num_bytes(4) for edge in edges)


@pytest.mark.parametrize("name", ["unet2d"])
def test_memory_agrees_with_the_simulator(name: str) -> None:
    batch_size, microbatches, world_size = 32, 4, 2
    program = fxpipe.compile(
        ZOO[name](torch.float32), world_size, batch_size=batch_size, microbatches=microbatches, schedule="1f1b",
        data_parallel=1,
    )  # fmt: skip
    staged, costing = program.plan.staged, program.costing
    costs = block_costs(program.capture, program.plan.blocks, costing.costs, costing.model)
    num_samples = batch_size // microbatches
    for rank, simulated in enumerate(program.simulate().peak_bytes):
        blocks = [
            block for s in range(staged.num_stages) if rank in staged.stage_ranks[s] for block in staged.blocks(s)
        ]
        weights = costs.weights_of(blocks)
        state = sum(w.num_bytes for w in weights) + sum(costs.component_bytes)
        trained = sum(w.num_bytes + ADAMW_BYTES * w.num_elements for w in weights if w.trained)
        saved = (world_size - rank) * sum(costs.saved_bytes(num_samples)[block] for block in blocks)
        temporary = max(costs.temporary_bytes(num_samples)[block] for block in blocks)
        predicted = state + trained + saved + temporary + costs.given_bytes(blocks, batch_size)
        assert predicted == pytest.approx(simulated, rel=0.25)


class Deep(nn.Module):
    """Stages that save much more than what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(4))) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.zeros(batch_size, 64, 16),)


@pytest.mark.parametrize(("schedule", "stages"), [("zero-bubble", 2), ("zb-v", 4)])
def test_plans_need_what_their_programs_do_when_recomputed(schedule: str, stages: int) -> None:
    """What the first part of a backward computes again waits for the second."""
    options: dict[str, Any] = {"schedule": schedule, "stages": stages, "recompute": True}
    program = fxpipe.compile(Deep(), 2, batch_size=64, microbatches=4, **options)
    assert program.plan.outcomes[0].peak_bytes == pytest.approx(program.needed_bytes, rel=0.15)
    limit = int(1.15 * program.needed_bytes)
    within = fxpipe.compile(Deep(), 2, batch_size=64, microbatches=4, memory_limit=limit, **options)
    assert within.plan.staged == program.plan.staged


def test_searched_orders_split_no_backward_that_recomputes() -> None:
    program = fxpipe.compile(Deep(), 2, batch_size=64, microbatches=4, schedule="1f1b")
    captured, graph, costing = program.capture, program.plan.blocks, program.costing
    costs = block_costs(captured, graph, costing.costs, costing.model)
    room, times = Room(costs, 64), BlockTimes.of(costs, 16)
    for recompute in (frozenset[int](), frozenset({0, 1})):
        staged = replace(program.plan.staged, recompute=recompute)
        resources = Resources.of(room, staged, times, costing.cluster, None)
        found = order(graph, staged, estimated_work(graph, staged, 4), resources, budget_seconds=0.0)
        assert found.schedule.is_split == (not recompute)
