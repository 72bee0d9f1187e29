"""Predict a step: simulate the rank programs and follow their memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpipe.capture import Capture
from fxpipe.capture.sizes import concrete
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.step import StepPlan
from fxpipe.plan.timeline import Timeline
from fxpipe.simulate import timeline
from fxpipe.simulate.host_update import host_update
from fxpipe.simulate.memory import ADAMW_BYTES, graphs_memory, held_bytes, program_bytes
from fxpipe.simulate.op_lists import Op, StepOps, program_ops


@dataclass(frozen=True)
class Costing:
    """What a prediction needs beside the programs: the cost of every captured node, a device and a network."""

    costs: CostTable
    model: CostModel
    cluster: Cluster


@dataclass(frozen=True)
class Planned:
    """The ops of all ranks, and the seconds of the graphs they call."""

    op_lists: Sequence[Sequence[Op]]
    seconds: Mapping[str, float]


def planned(step: StepPlan, capture: Capture, costing: Costing) -> Planned:
    """What every rank does, and for how long."""
    model, sizes = costing.model, {call.num_samples for call in step.calls.values()}
    of_nodes = {size: node_seconds(model, costing.costs, size) for size in sizes}
    seconds = {
        name: sum(call.seconds(costing.costs, of_nodes[call.num_samples]).values()) for name, call in step.calls.items()
    }
    drawn = whole_bytes(capture, step.batch_size)
    draws = {index: model.drawing_seconds(draw.target, drawn[index]) for index, draw in step.draws.items()}
    return Planned(program_ops(step.programs, step.messages, model, draws), seconds)


def step_ops(step: StepPlan, capture: Capture, costing: Costing, optimizer_bytes: int = ADAMW_BYTES) -> StepOps:
    """What every rank does, for how long, and in how many bytes."""
    plan, whole = planned(step, capture, costing), whole_bytes(capture, step.batch_size)
    calls = graphs_memory(step.programs)
    ranks = [
        [op._replace(memory=memory) for op, memory in zip(ops, program_bytes(program, calls, whole), strict=True)]
        for ops, program in zip(plan.op_lists, step.programs, strict=True)
    ]
    if step.offloaded:
        optimizer_bytes, device = 0, costing.cluster.device
        ranks = [[*ops, host_update(device, *_trained(p))] for ops, p in zip(ranks, step.programs, strict=True)]
    return StepOps(ranks, [held_bytes(program, optimizer_bytes) for program in step.programs], plan.seconds)


def _trained(program: RankProgram) -> tuple[int, int]:
    """Elements and bytes of what a rank trains."""
    trained = [program.state[name] for name in program.gradients]
    return sum(tensor.numel() for tensor in trained), sum(tensor.nbytes for tensor in trained)


def predict(step: StepPlan, capture: Capture, costing: Costing, optimizer_bytes: int) -> Timeline:
    """The timeline of one step, with memory."""
    return timeline(step_ops(step, capture, costing, optimizer_bytes), costing.cluster)


def whole_bytes(capture: Capture, batch_size: int) -> dict[str | int, int]:
    """Bytes of every whole-batch input, by its name in the programs, and of every random draw, by index."""
    values = whole_values(capture, batch_size)
    return {key: torch.Size(shape).numel() * dtype.itemsize for key, (shape, dtype) in values.items()}


def whole_values(capture: Capture, batch_size: int) -> dict[str | int, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of what `whole_bytes` counts."""
    found: dict[str | int, tuple[tuple[int, ...], torch.dtype]] = {}
    for node in capture.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] in ("input", "draw"):
            key = node.name if node.meta["kind"] == "input" else capture.draws[node.name].index
            value = node.meta["val"]
            found[key] = concrete(tuple(value.shape), batch_size), value.dtype
    return found
