"""Predict a step: simulate the rank programs and follow their memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.call_costs import CallCost
from fxpipe.capture import Capture
from fxpipe.cluster import Cluster
from fxpipe.costs import CostModel, NodeCost, node_seconds
from fxpipe.memory import Times, graphs_memory, rank_memory
from fxpipe.simulation import Transfer, noisy_makespans, program_ops, walk
from fxpipe.sizes import concrete
from fxpipe.step import StepPlan
from fxpipe.timeline import Timeline

NUM_NOISY_RUNS, NOISE_SEED = 20, 0


@dataclass(frozen=True)
class Costing:
    """What a prediction needs beside the programs: the graphs they call, the cost of every captured node, a device and
    a network."""

    calls: Mapping[str, CallCost]
    costs: Mapping[str, NodeCost]
    model: CostModel
    cluster: Cluster


def predict(step: StepPlan, capture: Capture, costing: Costing, optimizer_bytes: int) -> Timeline:
    """The timeline of one step, with memory and the spread under noise."""
    model, sizes = costing.model, {call.num_samples for call in costing.calls.values()}
    of_nodes = {size: node_seconds(model, capture.graph, costing.costs, size) for size in sizes}
    blocks = {n: call.seconds(model, costing.costs, of_nodes[call.num_samples]) for n, call in costing.calls.items()}
    seconds = {name: sum(times.values()) for name, times in blocks.items()}
    op_lists = program_ops(step.programs, step.messages, costing.model)
    transfer = _transfer(costing.cluster)
    walked = walk(op_lists, seconds, transfer)
    whole, calls = whole_bytes(capture, step.batch_size), graphs_memory(step.programs)
    memory = tuple(
        rank_memory(program, calls, whole, Times(nodes, walked.arrival_seconds), optimizer_bytes)
        for program, nodes in zip(step.programs, walked.node_seconds, strict=True)
    )
    spread = noisy_makespans(op_lists, blocks, transfer, NUM_NOISY_RUNS, NOISE_SEED)
    return Timeline(walked.events, len(step.programs), memory, spread)


def _transfer(cluster: Cluster) -> Transfer:
    return lambda source, target, num_bytes: cluster.transfer_seconds(source, target, num_bytes)


def whole_bytes(capture: Capture, batch_size: int) -> dict[str | int, int]:
    """Bytes of every whole-batch input, by its name in the programs, and of every random draw, by index."""
    found: dict[str | int, int] = {}
    for node in capture.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] not in ("input", "draw"):
            continue
        value = node.meta["val"]
        size = value.dtype.itemsize
        for extent in concrete(tuple(value.shape), batch_size):
            size *= extent
        found[node.name if node.meta["kind"] == "input" else capture.draws[node.name].index] = size
    return found
