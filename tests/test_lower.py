"""Stage graphs against autograd, the order of messages, and faults planted in rank programs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from fxpipe.plan import ops
from fxpipe.plan.program_check import check_programs, require_programs
from fxpipe.plan.rank_program import RankProgram, bound, nest
from fxpipe.program import Program
from passes.lowering import Lowered
from passes.lowering.joint import StageGraphs
from passes.lowering.step_graphs import StepGraphs
from passes.lowering.units import run_unit
from tests.strategies import Layer, RandomStep, StepSpec
from tests.unet import TinyUNet

CPU = torch.device("cpu")


class SharedTable(nn.Module):
    """A trained table, shifted, that two far layers read: it crosses stages without a batch, and its gradient is the
    tangent itself. The last reader has no other path to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.table + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x)) * shifted
        return x.square().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (torch.randn(batch_size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)


MIXED = StepSpec(
    2,
    tuple(
        Layer(kind, args)
        for kind, args in (
            ("linear", (0,)), ("glu", (2,)), ("transpose", (3,)), ("attention", (4,)), ("film", (5,)), ("conv", (6,)),
            ("chunk", (7,)), ("group_norm", (8,)), ("gate", (9, 3)), ("dropout", (10,)), ("norm", (11,)),
            ("cat", (12, 5)), ("add", (13, 2)), ("linear", (14,)),
        )
    ),
    (15,),
    square=True,
)  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "u-net": lambda: TinyUNet("no_grad"),
    "mixed": lambda: RandomStep(MIXED),
    "table": SharedTable,
}


@dataclass(frozen=True)
class Compiled:
    """A program, and what the compiler's steps made on the way to it."""

    program: Program
    capture: Capture
    stage_graphs: tuple[StageGraphs, ...]


@pytest.fixture(scope="module", params=MODELS)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    program = fxpipe.compile(MODELS[request.param](), 2, batch_size=4, microbatches=2, schedule="zero-bubble", stages=4)
    costed, plan = program.costed, program.plan
    step = StepGraphs(
        costed.captured, costed.batch, costed.work, plan.staged, plan.microbatch_sizes, costed.frozen.nodes, CPU
    )
    graphs = tuple(step.graphs(key, size) for key in step.units for size in sorted(set(step.sizes)))
    return Compiled(program, costed.captured, graphs)


@dataclass(frozen=True)
class Ran:
    """One unit run on random values: its graphs' results and autograd's."""

    graphs: StageGraphs
    reads: list[Tensor]
    returns: list[Tensor]
    saved: list[Tensor]
    tangents: list[Tensor]
    expected_returns: list[Tensor]
    expected_gradients: list[Tensor]


def ran(compiled: Compiled) -> Iterator[Ran]:
    for number, graphs in enumerate(compiled.stage_graphs):
        random = torch.Generator().manual_seed(number)
        reads = [_random(value, random) for value in graphs.border.reads]
        module = with_state(compiled, graphs.forward)
        with torch.no_grad():
            returns, saved = module(*reads)
        tangents = [_random(value, random) for value in graphs.border.returns if value.requires_grad]
        expected = _autograd(compiled, graphs, reads, tangents)
        yield Ran(graphs, reads, returns, saved, tangents, *expected)


def _random(value: Any, random: torch.Generator) -> Tensor:
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=random, dtype=value.dtype)
    return torch.randint(4, value.shape, generator=random, dtype=value.dtype)


def with_state(compiled: Compiled, graph: fx.Graph) -> fx.GraphModule:
    return bound(nest(compiled.program.state), graph, "part")


def _autograd(
    compiled: Compiled, graphs: StageGraphs, reads: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The unit's own operations under autograd: what it returns, gradients of reads and of weights."""
    reads = [r.clone().requires_grad_(v.requires_grad) for r, v in zip(reads, graphs.border.reads, strict=True)]
    state = {name: compiled.program.state[name] for name in graphs.border.state}
    border = graphs.border
    returns = run_unit(compiled.capture, border.unit, border.batch_size, CPU, [*state.values()], reads)
    if not border.has_backward:
        return returns, []
    targets = [r for r, v in zip(reads, border.reads, strict=True) if v.name in border.input_grads]
    targets += [state[name] for name in border.weight_grads]
    sources = [r for r, v in zip(returns, border.returns, strict=True) if v.requires_grad]
    found = torch.autograd.grad(sources, targets, tangents, allow_unused=True)
    return returns, [torch.zeros_like(t) if g is None else g for g, t in zip(found, targets, strict=True)]


def test_stage_graphs_equal_autograd(compiled: Compiled) -> None:
    trained = 0
    for run in ran(compiled):
        for ours, theirs in zip(run.returns, run.expected_returns, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
        if run.graphs.border.has_backward:
            trained += 1
            with torch.no_grad():
                inputs, weights = with_state(compiled, run.graphs.backward)(run.saved, *run.tangents)
            for ours, theirs in zip([*inputs, *weights], run.expected_gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert trained >= 3


def test_split_backward_equals_whole_backward_bit_for_bit(compiled: Compiled) -> None:
    split = 0
    for run in ran(compiled):
        if not run.graphs.border.splits:
            continue
        split += 1
        with torch.no_grad():
            whole = with_state(compiled, run.graphs.backward)(list(run.saved), *run.tangents)
            inputs, kept = with_state(compiled, run.graphs.backward_input)(list(run.saved), *run.tangents)
            assert all(isinstance(value, Tensor) for value in kept)  # of several results those that are needed
            (weights,) = with_state(compiled, run.graphs.backward_weight)(kept)
        assert len(inputs) == len(run.graphs.border.input_grads)
        assert len(weights) == len(run.graphs.border.weight_grads)
        for ours, theirs in zip([*inputs, *weights], [*whole[0], *whole[1]], strict=True):
            assert torch.equal(ours, theirs)
        assert kept == []
    assert split >= 1


def test_backward_frees_what_it_was_given(compiled: Compiled) -> None:
    for run in ran(compiled):
        if run.graphs.border.has_backward:
            with torch.no_grad():
                with_state(compiled, run.graphs.backward)(run.saved, *run.tangents)
            assert run.saved == []


def test_weight_gradients_own_their_memory(compiled: Compiled) -> None:
    """They are accumulated in place, so nothing else may live there."""
    for run in ran(compiled):
        if run.graphs.border.has_backward:
            saved = list(run.saved)
            with torch.no_grad():
                inputs, weights = with_state(compiled, run.graphs.backward)(run.saved, *run.tangents)
            others = [*run.reads, *run.returns, *saved, *run.tangents, *inputs, *compiled.program.state.values()]
            memory = [t.untyped_storage().data_ptr() for t in weights]
            assert len({*memory}) == len(weights)
            assert not {*memory} & {t.untyped_storage().data_ptr() for t in others}


def test_values_that_cross_are_contiguous(compiled: Compiled) -> None:
    for run in ran(compiled):
        assert all(value.is_contiguous() for value in run.returns)
        if run.graphs.border.has_backward:
            with torch.no_grad():
                inputs, _ = with_state(compiled, run.graphs.backward)(run.saved, *run.tangents)
            assert all(value.is_contiguous() for value in inputs)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble", "wave"])
def test_three_microbatches_accumulate_exactly(model: str, schedule: str) -> None:
    step = MODELS[model]()
    program = fxpipe.compile(step, 2, batch_size=5, microbatches=3, schedule=schedule)
    batch = step.example_inputs(5)  # type: ignore[operator]
    report = program.verify(*batch) if isinstance(batch, tuple) else program.verify(**batch)
    assert report.ok, str(report)


# -- messages and the programs' checker


@pytest.fixture(scope="module")
def step() -> Program:
    """Two ranks, a line of two stages, two micro-batches: messages both ways."""
    return fxpipe.compile(TinyUNet(), 2, batch_size=4, microbatches=2, schedule="1f1b")


def copied(program: RankProgram) -> RankProgram:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return replace(program, graph=graph)


def nodes(program: RankProgram, target: object) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.target is target]


def faults(programs: list[RankProgram], step: Lowered) -> str:
    for program in programs:
        program.graph.lint()
    found = check_programs(programs, step.messages, step.sends.positions)
    with pytest.raises(CompileError) as caught:
        require_programs(programs, step.messages, step.sends.positions)
    assert all(fault in str(caught.value) for fault in found)
    return "\n".join(found)


def test_both_ends_of_a_channel_have_one_order(step: Program) -> None:
    messages = step.step.messages
    assert [m.edge for m in messages] == list(range(len(messages)))
    assert {m.kind for m in messages} >= {"main", "skip", "gradient", "loss"}
    for channel in {m.channel for m in messages}:
        src, dst = channel
        sent = [n.args[3] for n in nodes(step.step.programs[src], ops.send) if n.args[2] == dst]
        received = [n.args[2] for n in nodes(step.step.programs[dst], ops.recv) if n.args[1] == src]
        assert sent == received == [m.edge for m in messages if m.channel == channel]


def test_right_programs_have_no_faults(step: Program) -> None:
    lowered = step.step
    assert check_programs([copied(p) for p in lowered.programs], lowered.messages, lowered.sends.positions) == []


def test_swapped_receives_are_shown(step: Program) -> None:
    programs = [copied(p) for p in step.step.programs]
    first, second = nodes(programs[1], ops.recv)[:2]
    first.prepend(second)
    text = faults(programs, step.step)
    edges = [m.edge for m in step.step.messages if m.channel == (0, 1)]
    assert f"channel 0 -> 1: planned edges {edges}, rank 1 receives {[edges[1], edges[0], *edges[2:]]}" in text
    assert f"{second.format_node()}  <-- HERE" in text


def test_a_dropped_send_is_shown(step: Program) -> None:
    programs = [copied(p) for p in step.step.programs]
    dropped, following = nodes(programs[0], ops.send)[:2]
    programs[0].graph.erase_node(dropped)
    text = faults(programs, step.step)
    edges = [m.edge for m in step.step.messages if m.channel == (0, 1)]
    assert f"planned edges {edges}, rank 0 sends {edges[1:]}" in text
    assert f"{following.format_node()}  <-- HERE" in text


def test_the_last_send_dropped_is_shown_at_the_end(step: Program) -> None:
    programs = [copied(p) for p in step.step.programs]
    programs[0].graph.erase_node(nodes(programs[0], ops.send)[-1])
    (*_, end) = programs[0].graph.nodes
    assert f"{end.format_node()}  <-- HERE" in faults(programs, step.step)


def test_another_shape_is_shown(step: Program) -> None:
    programs = [copied(p) for p in step.step.programs]
    received = nodes(programs[1], ops.recv)[0]
    message = step.step.messages[received.args[2]]
    received.update_arg(3, [*message.shape, 1])
    text = faults(programs, step.step)
    assert f"rank 1 receives another shape than {message}" in text
    assert f"{received.format_node()}  <-- HERE" in text


def test_a_receive_without_wait_is_shown(step: Program) -> None:
    programs = [copied(p) for p in step.step.programs]
    first, second = nodes(programs[1], ops.wait)[:2]
    first.replace_all_uses_with(second)
    received = first.args[0]
    programs[1].graph.erase_node(first)
    text = faults(programs, step.step)
    assert "rank 1 never waits for a message" in text
    assert f"{received.format_node()}  <-- HERE" in text  # type: ignore[union-attr]
