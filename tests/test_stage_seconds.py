"""One path to seconds: what planners add up of blocks is what the graphs of rank programs take."""

from functools import cache
from typing import Any

import pytest
import torch

import fxpipe
from benchmarks.emulation import Slower
from cost_models.devices import device
from cost_models.profiled import Entry, Profile, Speeds, key_of
from fxpipe.costs.model import CostModel, NodeSeconds, node_seconds
from fxpipe.costs.table import CostTable
from passes.costs.block_costs import block_costs
from tests.call_costs import CallCost
from tests.models import ZOO
from tests.program_ops import back_of, calls_of
from tests.unet import TinyUNet

CASES: dict[str, dict[str, Any]] = {
    "whole backward, uneven micro-batches": {"schedule": "1f1b", "batch_size": 7, "microbatches": 3},
    "split backward": {"schedule": "zero-bubble", "batch_size": 6, "microbatches": 3},
    "recomputed": {"schedule": "1f1b", "batch_size": 6, "microbatches": 2, "recompute": True},
    "recomputed, split backward": {"schedule": "zero-bubble", "batch_size": 6, "microbatches": 3, "recompute": True},
}


@cache
def compiled(model: str, case: str) -> fxpipe.Program:
    step = TinyUNet("no_grad") if model == "tiny" else ZOO[model](torch.float32)
    return fxpipe.compile(step, 2, data_parallel=1, **CASES[case])


class Unequal(CostModel):
    """Every number another one."""

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        places = torch.arange(3.0 * len(table), dtype=torch.float64).sqrt() * num_samples
        return NodeSeconds(*places.reshape(3, -1).numpy())


def profiled(program: fxpipe.Program) -> CostModel:
    parts = (*program.blocks.components, *program.blocks.blocks)
    entries = [Entry(part.name, part.nodes, (1, 4), (0.1, 0.3 + i), (0.2, 0.9 + i)) for i, part in enumerate(parts)]
    key = key_of(program.costed.costs, torch.device("cpu"))
    return Profile(device(), key, tuple(entries), Speeds(1e9))


def models(program: fxpipe.Program) -> list[CostModel]:
    return [device("A100-80GB"), device("H100@bfloat16"), profiled(program), Slower(profiled(program), 3.0), Unequal()]


def planned(call: CallCost, costs: Any, block: int) -> float:
    """What a planner counts for a block of a stage."""
    times = costs.at(call.num_samples)
    of_part = {
        "forward": times.forward_seconds,
        "backward": times.backward_seconds,
        "backward_input": times.input_gradient_seconds,
        "backward_weight": times.weight_gradient_seconds,
    }
    again = call.part in ("backward", "backward_input") and call.again.issuperset(call.blocks[block])
    return of_part[call.part][block] + (times.forward_seconds[block] if again else 0.0)


@pytest.mark.parametrize(
    ("model", "case"),
    [*(("tiny", case) for case in CASES), ("unet2d", "split backward"), ("dit", "recomputed, split backward")],
)
def test_a_stage_takes_what_its_blocks_do(model: str, case: str) -> None:
    program = compiled(model, case)
    graph, table = program.blocks, program.costed.costs
    components = {component.name: number for number, component in enumerate(graph.components)}
    for cost_model in models(program):
        costs = block_costs(program.capture, graph, table, cost_model)
        counted = set()
        for call in calls_of(back_of(program), program.schedule).values():
            seconds = call.seconds(table, node_seconds(cost_model, table, call.num_samples))
            blocks = [block for block in seconds if isinstance(block, int)]
            counted |= {(call.part, block) for block in blocks}
            for name in components.keys() & seconds.keys():
                expected = costs.at(call.num_samples).component_seconds[components[str(name)]]
                assert seconds[name] == pytest.approx(expected, rel=1e-12)
            of_blocks = [planned(call, costs, block) for block in blocks]
            assert [seconds[block] for block in blocks] == pytest.approx(of_blocks, rel=1e-12)
            own = [name for nodes in call.blocks.values() for name in nodes]
            assert sum(seconds.values()) == pytest.approx(sum(call_seconds(call, table, cost_model, own)), rel=1e-12)
        assert {block for part, block in counted if part == "forward"} == set(range(len(graph.blocks)))
        assert {part for part, _ in counted} >= {"forward", "backward" if "split" not in case else "backward_input"}


def call_seconds(call: CallCost, table: CostTable, model: CostModel, nodes: list[str]) -> list[float]:
    """Of every node of a call, one by one."""
    found = node_seconds(model, table, call.num_samples)
    taken, forward = table.by_name(getattr(found, call.part)), table.by_name(found.forward)
    again = call.again if call.part in ("backward", "backward_input") else ()
    return [taken[name] + (name in again) * forward[name] for name in nodes]


def test_the_parts_of_a_backward_take_what_it_does() -> None:
    program = compiled("unet2d", "split backward")
    for cost_model in models(program):
        costs = block_costs(program.capture, program.blocks, program.costed.costs, cost_model)
        times = costs.at(3)
        sums = [i + w for i, w in zip(times.input_gradient_seconds, times.weight_gradient_seconds, strict=True)]
        assert list(times.backward_seconds) == pytest.approx(sums, rel=1e-12)
        assert min(sums) > 0


def test_one_pipeline_without_waits_takes_the_sum() -> None:
    """One rank and no network: the step is the sum of its blocks' seconds, and of sums of gradients."""
    step = TinyUNet("no_grad")
    program = fxpipe.compile(step, 1, batch_size=6, microbatches=3, schedule="gpipe")
    for cost_model in (device("V100-32GB"), Slower(profiled(program), 2.0)):
        costs = block_costs(program.capture, program.blocks, program.costed.costs, cost_model).at(2)
        of_blocks = sum(costs.forward_seconds) + sum(costs.backward_seconds) + sum(costs.component_seconds)
        gradients = sum(p.nbytes for p in step.parameters() if p.requires_grad)
        adding = cost_model.moving_seconds(2 * gradients, gradients)  # of all, at once
        makespan = program.simulate(cost_model).makespan_seconds
        assert makespan == pytest.approx(3 * of_blocks + 2 * adding, rel=1e-9)
