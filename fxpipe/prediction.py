"""Predict a step: simulate the rank programs and follow their memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch

from fxpipe.capture import Capture
from fxpipe.cluster import Cluster
from fxpipe.costs import CostModel, NodeCost, node_seconds
from fxpipe.costs.call_costs import Block, CallCost, drawing_seconds
from fxpipe.memory import ADAMW_BYTES, Times, graphs_memory, rank_memory
from fxpipe.simulation import Walked, noisy_makespans, walk
from fxpipe.simulation.op_lists import Op, program_ops
from fxpipe.sizes import concrete
from fxpipe.step import StepPlan
from fxpipe.timeline import RankMemory, Timeline

NUM_NOISY_RUNS, NOISE_SEED = 20, 0


@dataclass(frozen=True)
class Costing:
    """What a prediction needs beside the programs: the graphs they call, the cost of every captured node, a device and
    a network."""

    calls: Mapping[str, CallCost]
    costs: Mapping[str, NodeCost]
    model: CostModel
    cluster: Cluster


@dataclass(frozen=True)
class Planned:
    """The ops of all ranks, and the seconds of the graphs they call by block: {graph: {block: seconds}}."""

    op_lists: Sequence[Sequence[Op]]
    blocks: Mapping[str, Mapping[Block, float]]

    @property
    def seconds(self) -> dict[str, float]:
        return {name: sum(times.values()) for name, times in self.blocks.items()}


def planned(step: StepPlan, capture: Capture, costing: Costing) -> Planned:
    """What every rank does, and for how long."""
    model, sizes = costing.model, {call.num_samples for call in costing.calls.values()}
    of_nodes = {size: node_seconds(model, capture.graph, costing.costs, size) for size in sizes}
    blocks = {n: call.seconds(model, costing.costs, of_nodes[call.num_samples]) for n, call in costing.calls.items()}
    drawn = whole_bytes(capture, step.batch_size)
    draws = {index: drawing_seconds(model, draw.target, drawn[index]) for index, draw in step.draws.items()}
    return Planned(program_ops(step.programs, step.messages, model, draws), blocks)


def predict(step: StepPlan, capture: Capture, costing: Costing, optimizer_bytes: int) -> Timeline:
    """The timeline of one step, with memory and the spread under noise."""
    plan = planned(step, capture, costing)
    walked = walk(plan.op_lists, plan.seconds, costing.cluster)
    memory = _memory(step, capture, costing.cluster, walked, optimizer_bytes)
    spread = noisy_makespans(plan.op_lists, plan.blocks, costing.cluster, NUM_NOISY_RUNS, NOISE_SEED)
    return walked.timeline(memory, spread)


def peak_bytes(step: StepPlan, capture: Capture, costing: Costing, optimizer_bytes: int = ADAMW_BYTES) -> list[int]:
    """The most memory that each rank needs at once."""
    plan = planned(step, capture, costing)
    walked = walk(plan.op_lists, plan.seconds, costing.cluster)
    return [memory.peak_bytes for memory in _memory(step, capture, costing.cluster, walked, optimizer_bytes)]


def _memory(
    step: StepPlan, capture: Capture, cluster: Cluster, walked: Walked, optimizer_bytes: int
) -> tuple[RankMemory, ...]:
    whole, calls = whole_bytes(capture, step.batch_size), graphs_memory(step.programs)
    arrivals = dict.fromkeys(walked.arrival_seconds, inf) if cluster.keeps_sent else walked.arrival_seconds
    return tuple(
        rank_memory(program, calls, whole, Times(nodes, arrivals), optimizer_bytes)
        for program, nodes in zip(step.programs, walked.node_seconds, strict=True)
    )


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
