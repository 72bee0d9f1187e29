"""Runs of blocks whose values a backward computes again: the same gradients, bit for bit, from less that is kept."""

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fxpipe.capture import Capture
from fxpipe.plan.rank_program import bound, nest
from fxpipe.plan.staged import Run, Staged
from passes.batch import analyse as analyse_batch
from passes.blocks import analyse as analyse_blocks
from passes.costs.work import StepWork
from passes.lowering.joint import StageGraphs
from passes.lowering.step_graphs import StepGraphs
from passes.lowering.units import Value
from tests.captured import captured, work
from tests.graph_memory import call_memory
from tests.models import PEER_CASES, ZOO
from tests.strategies import cuts
from tests.unet import TinyUNet

CPU = torch.device("cpu")
SIZE = 2
MODELS = {
    "u-net": lambda: TinyUNet("no_grad").double(),
    "skips": lambda: PEER_CASES["nested_skips"](torch.float64),
    "dropout": lambda: PEER_CASES["dropout"](torch.float64),
    "lora": lambda: ZOO["lora"](torch.float64),
    "uvit": lambda: ZOO["uvit"](torch.float64),
}


@cache
def analysed(name: str) -> tuple[Capture, StepWork, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    capture = captured(model)
    analyse_batch(capture, 2)
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    state = named | {f"_constants.{name}": tensor for name, tensor in capture.constants.items()}
    return capture, StepWork.in_capture(capture, analyse_blocks(capture, work(capture), 8)), state


def graphs_of(name: str, boundaries: tuple[int, ...], runs: tuple[Run, ...]) -> list[StageGraphs]:
    capture, known, _ = analysed(name)
    stages = len(boundaries) - 1
    staged = Staged(boundaries, tuple((s,) for s in range(stages)), "1f1b", False, stages, runs)
    layers = ((),) * len(known.graph.components)
    step = StepGraphs(capture, analyse_batch(capture, 2), known, staged, (SIZE, SIZE), layers, CPU)
    return [step.graphs(key, SIZE) for key in step.units if key[0] == "F"]


def random_value(value: Value, generator: torch.Generator) -> Tensor:
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return torch.randint(4, value.shape, generator=generator, dtype=value.dtype)


def with_state(name: str, graph: fx.Graph) -> fx.GraphModule:
    return bound(nest(analysed(name)[2]), graph, "part")


def results(name: str, graphs: StageGraphs) -> tuple[list[list[Tensor]], int]:
    """What the graphs give on random values: returns, gradients whole and in two parts; and the bytes saved."""
    generator, border = torch.Generator().manual_seed(0), graphs.border
    reads = [random_value(value, generator) for value in border.reads]
    tangents = [random_value(value, generator) for value in border.returns if value.requires_grad]
    with torch.no_grad():
        returns, saved = with_state(name, graphs.forward)(*reads)
        num_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}.values())
        found = [returns]
        if border.has_backward:
            found += with_state(name, graphs.backward)(list(saved), *tangents)
        if border.splits:
            inputs, kept = with_state(name, graphs.backward_input)(list(saved), *tangents)
            found += [inputs, *with_state(name, graphs.backward_weight)(kept)]
    return found, num_bytes


def assert_equal(name: str, boundaries: tuple[int, ...], runs: tuple[Run, ...]) -> list[tuple[int, int]]:
    """Bytes saved by every stage without and with the runs, after asserting that they give the same."""
    pairs = []
    for plain, again in zip(graphs_of(name, boundaries, ()), graphs_of(name, boundaries, runs), strict=True):
        (wanted, more), (found, less) = results(name, plain), results(name, again)
        for ours, theirs in zip(found, wanted, strict=True):
            assert len(ours) == len(theirs)
            assert all(map(torch.equal, ours, theirs))
        pairs.append((more, less))
    return pairs


@given(st.data())
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_runs_give_the_same_bit_for_bit(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    boundaries, runs = data.draw(cuts(len(analysed(name)[1].graph.blocks)))
    assert_equal(name, boundaries, runs)


@pytest.mark.parametrize("name", MODELS)
def test_whole_stages_and_single_blocks_keep_less(name: str) -> None:
    num_blocks = len(analysed(name)[1].graph.blocks)
    whole = assert_equal(name, (0, num_blocks), ((0, num_blocks),))
    single = assert_equal(name, (0, num_blocks), tuple((b, b + 1) for b in range(num_blocks)))
    assert whole[0][1] < whole[0][0]
    assert whole[0][1] <= single[0][1] < single[0][0]


def test_blocks_one_by_one_need_less_at_once_than_a_whole_stage() -> None:
    """Where values of a run are made again right before they are needed, few are there at a time."""
    name = "uvit"

    def peak(runs: tuple[Run, ...]) -> int:
        (graphs,) = graphs_of(name, (0, num_blocks), runs)
        saved = results(name, graphs)[1]
        return saved + max(segment.peak_bytes for segment in call_memory(graphs.backward).segments)

    num_blocks = len(analysed(name)[1].graph.blocks)
    single = peak(tuple((b, b + 1) for b in range(num_blocks)))
    assert single < peak(((0, num_blocks),))
    assert single < peak(())
