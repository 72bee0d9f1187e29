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
from cost_models.flops import cost_table
from cost_models.profiled import Entry, Profile, key_of
from cost_models.roofline import Roofline
from fxpipe.capture import Capture
from fxpipe.capture.sizes import evaluate
from fxpipe.compiler import requested
from fxpipe.costs import NodeCost
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.costs.model import CostModel, NodeSeconds, node_seconds
from fxpipe.costs.polynomials import Polynomials
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged, whole_stages
from passes.blocks import analyse
from passes.costs.block_costs import block_costs
from passes.tuner.orders import Orders
from tests.captured import captured, work
from tests.steps import needed_bytes
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
    costs: CostTable

    def costed(self, model: CostModel) -> BlockCosts:
        return block_costs(self.captured, self.graph, self.costs, model)


def case(model: nn.Module, num_blocks: int) -> Case:
    found = captured(model)
    return Case(found, analyse(found, work(found), num_blocks), cost_table(found.graph))


@pytest.fixture(scope="module")
def unet() -> Case:
    return case(TinyUNet("no_grad"), 6)


@pytest.fixture(scope="module")
def tied() -> Case:
    return case(Tied(), 4)


class ByTen(CostModel):
    """A user's own model: seconds from FLOPs and bytes."""

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        counts = table.counts(num_samples)
        return NodeSeconds(
            counts.forward_flops / 10, counts.backward_input_bytes / 10, counts.backward_weight_bytes / 20
        )


class Doubled(Roofline):
    """A roofline that is changed."""

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        found = super().seconds(table, num_samples)
        return replace(found, forward=2 * found.forward)


def profiled(table: CostTable) -> Profile:
    names = list(table)
    half = len(names) // 2
    entries = (
        Entry("a", tuple(names[:half]), (1, 4), (1.0, 3.0), (2.0, 8.0)),
        Entry("b", tuple(names[half : 2 * half]), (1, 4), (0.5, 0.6), (0.0, 0.0)),
    )
    return Profile(device(), key_of(table, torch.device("cpu")), entries)


CHANGED = Doubled(peak_flops=1e12, bandwidth=1e11, matrix_efficiency=0.5, memory_efficiency=0.5, launch_seconds=1e-6)
MODELS: dict[str, Callable[[CostTable], CostModel]] = {
    "roofline": lambda table: device("A100-80GB"),
    "mixed precision": lambda table: device("H100@bfloat16"),
    "profile": profiled,
    "user's": lambda table: ByTen(),
    "user's, a roofline changed": lambda table: CHANGED,
}


@pytest.mark.parametrize("name", ["A100-80GB", "V100-32GB", "CPU"])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_seconds_of_a_table_are_those_of_its_nodes_by_hand(unet: Case, name: str, num_samples: int) -> None:
    model = device(name)
    assert isinstance(model.peak_flops, Mapping)

    def kernel(cost: NodeCost, flops: sympy.Expr, num_bytes: sympy.Expr) -> float:
        if flops == num_bytes == 0:
            return 0.0
        part = model.convolution_efficiency if cost.kind == "convolution" else None
        part = model.attention_efficiency if cost.kind == "attention" else part
        peak = model.peak_flops[cost.dtype or torch.float64]  # type: ignore[index]
        computing = evaluate(flops, num_samples) / (peak * (part or model.matrix_efficiency))
        moving = evaluate(num_bytes, num_samples) / (model.bandwidth * model.memory_efficiency)
        return max(computing, moving) + model.launch_seconds + model.ramp_seconds

    found = node_seconds(model, unet.costs, num_samples)
    for place, cost in enumerate(unet.costs.values()):
        if cost.dtype is not None and not cost.dtype.is_floating_point:
            continue
        forward = kernel(cost, cost.forward_flops, cost.bytes_read + cost.bytes_written)
        of_input = kernel(cost, cost.backward_input_flops, cost.backward_input_bytes)
        of_weight = kernel(cost, cost.backward_weight_flops, cost.backward_weight_bytes)
        taken = found.forward[place], found.backward_input[place], found.backward_weight[place]
        assert taken == pytest.approx((forward, of_input, of_weight), rel=1e-13)


def test_a_profile_shares_its_entries_out_as_its_base_would(unet: Case) -> None:
    base, profile = device(), profiled(unet.costs)
    expected, found = (node_seconds(model, unet.costs, 3) for model in (base, profile))
    first = unet.costs.positions(profile.entries[0].nodes)
    assert found.forward[first].sum() == pytest.approx(1 + 2 * 2 / 3)
    assert found.backward[first].sum() == pytest.approx(2 + 2 * 6 / 3)
    for part in ("forward", "backward"):
        of_base, measured = getattr(expected, part)[first], getattr(found, part)[first]
        np.testing.assert_allclose(measured * of_base.sum(), of_base * measured.sum(), rtol=1e-12)
    np.testing.assert_allclose(
        found.backward_input * expected.backward_weight, found.backward_weight * expected.backward_input, atol=1e-30
    )
    second = unet.costs.positions(profile.entries[1].nodes)
    assert found.backward[second].sum() == 0
    rest = np.delete(np.arange(len(unet.costs)), np.concatenate([first, second]))
    assert found.both[rest].tolist() == expected.both[rest].tolist()


def test_parts_that_the_base_takes_for_free_share_equally() -> None:
    table = CostTable({name: NodeCost() for name in "abc"}, fx.Graph())
    entries = (Entry("all", ("a", "c"), (1,), (2.0,), (4.0,)), Entry("none", (), (1,), (1.0,), (1.0,)))
    found = node_seconds(Profile(device(), key_of(table, torch.device("cpu")), entries), table, 3)
    assert (found.forward.tolist(), found.backward_input.tolist()) == ([3, 0, 3], [6, 0, 6])
    assert found.backward_weight.tolist() == [0, 0, 0]


class Wrong(CostModel):
    def __init__(self, found: Any) -> None:
        self.found = found

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        return self.found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, r"cost_model Wrong: seconds\(table, 3\) is None; return fxpipe.NodeSeconds of three arrays"),
        (NodeSeconds(*np.zeros((3, 1))), r"forward has shape \(1,\); return one number for each of 2 nodes"),
        (NodeSeconds(*np.array([[0, 1], [0, 1], [1, np.nan]])), r"backward_weight is nan for 'b'; seconds are finite"),
        (
            NodeSeconds(*np.array([[0, 1], [-1, 1], [1, 1]])),
            r"backward_input is -1.0 for 'a'; seconds are finite",
        ),
        (NodeSeconds(*np.array([[0, np.inf], [1, 1], [1, 1]])), r"forward is inf for 'b'"),
        (NodeSeconds("ab", "cd", "ef"), r"return fxpipe.NodeSeconds of three arrays"),  # type: ignore[arg-type]
    ],
)
def test_what_are_no_seconds_is_refused(found: Any, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        node_seconds(Wrong(found), CostTable({"a": NodeCost(), "b": NodeCost()}), 3)


def test_a_model_of_the_users_moves_memory_as_a_kernel_of_its_own() -> None:
    class Bytes(CostModel):
        def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
            counts = table.counts(num_samples)
            return NodeSeconds(counts.bytes_read + 2 * counts.bytes_written, *np.zeros((2, len(table))))

    assert (Bytes().moving_seconds(5, 7), Bytes().drawing_seconds("randn", 9), Bytes().memory_bytes) == (19, 0, None)
    with pytest.raises(TypeError, match="seconds"):
        CostModel()  # type: ignore[misc]
    for name in ("A100-80GB", "CPU"):
        model = device(name)
        assert model.moving_seconds(10**7, 10**6) == CostModel.moving_seconds(model, 10**7, 10**6)


def test_a_profile_of_another_graph_is_refused(unet: Case, tied: Case) -> None:
    with pytest.raises(CompileError, match="the profile is of another graph"):
        tied.costed(profiled(unet.costs)).at(1)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_components_cost_what_their_nodes_do(unet: Case, name: str) -> None:
    model = MODELS[name](unet.costs)
    costs, found = unet.costed(model), node_seconds(model, unet.costs, 3)
    forward_of, backward_of = unet.costs.by_name(found.forward), unet.costs.by_name(found.backward)
    times = costs.at(3)
    assert times is costs.at(3)
    assert times.num_samples == 3
    for block in unet.graph.blocks:
        forward, backward = (sum(of[n] for n in block.nodes) for of in (forward_of, backward_of))
        assert times.forward_seconds[block.index] == pytest.approx(forward)
        assert times.backward_seconds[block.index] == pytest.approx(backward)
        parts = times.input_gradient_seconds[block.index] + times.weight_gradient_seconds[block.index]
        assert parts == pytest.approx(backward)
    frozen = [sum(forward_of[n] for n in component.nodes) for component in unet.graph.components]
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
    assert program.plan.outcomes[0].peak_bytes == pytest.approx(needed_bytes(program), rel=0.02)
    limit = int(1.02 * needed_bytes(program))
    within = fxpipe.compile(Deep(), 2, batch_size=64, microbatches=4, memory_limit=limit, **options)
    assert within.plan.staged == program.plan.staged


def test_searched_orders_split_no_backward_that_recomputes() -> None:
    asked = requested(Deep(), 2, batch_size=64, microbatches=4)
    case, _ = asked.case(asked.analysed())
    boundaries = (0, len(case.blocks) // 2, len(case.blocks))
    for recompute in ((), whole_stages(boundaries)):
        staged = Staged(boundaries, ((0,), (1,)), "1f1b", False, 2, recompute)
        schedule, *_ = Orders(case, staged, 4, ahead=False).searched(0.0, None, ())
        assert schedule.is_split == (not recompute)
