"""Stable Diffusion 2.1's frozen part in the bubbles of its pipeline: every filler against no filling and the bound.

    python benchmarks/filling.py
    python benchmarks/filling.py --batch-size 128 --device H100@bfloat16

VAE encoder and text encoder at 512x512, cut where one value is alive; times from the device model's roofline, the
U-Net's stages balanced, 1F1B, transfers and the stages' all-reduces over 8 devices on NVSwitch. "As published" keeps to
DiffusionPipe's limits (Tian et al., MLSys 2024): bubbles from 10 ms, local batches 4 to 96 in ten steps; the others use
bubbles from 2 ms and any local batch up to 96. A time of the planner is the shortest of three.
`fxpipe fillers` prints the same of any model.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from compile_sd21 import StableDiffusion21Step
from rich.table import Table
from torch import fx

from cost_models.devices import device
from cost_models.flops import cost_table
from fxpipe.capture import Capture, capture
from fxpipe.capture.inputs import describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.cli.planning import print_wide
from fxpipe.cluster import Cluster
from fxpipe.costs.model import node_seconds
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.block_graph import BlockGraph, Component, is_size, tensor_bytes
from fxpipe.plan.execution import ActionTimes, simulate
from passes.blocks import analyse
from passes.comparison.fillers import WAYS
from passes.costs.layer import FrozenComponent, Points, layer_points
from passes.fill.bound import lower_bound_seconds
from passes.fill.problem import FillProblem, Interval
from passes.placement.lines import linear
from passes.schedules.named import make_schedule

NUM_DEVICES, NUM_BLOCKS, REPEATS = 8, 46, 3
CLUSTER = Cluster.parse("8xA100-80GB")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PIPELINES = ((2, 4, 4, 1), (4, 2, 8, 1), (8, 1, 16, 1), (2, 4, 4, 2), (4, 2, 8, 2), (8, 1, 16, 2), (8, 1, 8, 2))


@dataclass(frozen=True)
class Measured:
    """The captured step: blocks, frozen components, seconds of every node by number of samples."""

    captured: Capture
    graph: BlockGraph
    forward: Mapping[int, Mapping[str, float]]
    backward: Mapping[int, Mapping[str, float]]

    def components(self, times: int) -> tuple[FrozenComponent, ...]:
        """Every frozen component with its layers, each layer so many times."""
        index = {component.name: i for i, component in enumerate(self.graph.components)}
        return tuple(
            FrozenComponent(c.name, times * self._layers(c), tuple(index[d] for d in c.depends))
            for c in self.graph.components
        )

    def _layers(self, component: Component) -> tuple[Points, ...]:
        runs = cut(self.captured, component)
        tables = [{n: sum(self.forward[n].get(node.name, 0.0) for node in run) for n in SIZES} for run in runs]
        return tuple(layer_points(table) for table in tables if table[SIZES[-1]] > 0)


def measured(device_name: str) -> Measured:
    with torch.device("meta"):
        step = StableDiffusion21Step()
    captured = capture(ModelCall(step, *describe(step, (), step.example_inputs(16), None)))
    costs = cost_table(captured.graph)
    seconds = {n: node_seconds(device(device_name), costs, n) for n in SIZES}
    graph = analyse(captured, costs.by_name(seconds[16].both), NUM_BLOCKS)
    forward, backward = (
        {n: costs.by_name(getattr(of, part)) for n, of in seconds.items()} for part in ("forward", "backward")
    )
    return Measured(captured, graph, forward, backward)


def cut(captured: Capture, component: Component) -> list[list[fx.Node]]:
    """A component's operations in runs between which one value with a batch is alive."""
    names = set(component.nodes)
    nodes = [node for node in captured.graph.nodes if node.name in names]
    position = {node: i for i, node in enumerate(nodes)}
    alive = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        size = None if is_size(node.meta["val"]) else tensor_bytes(node.meta["val"])
        if size is not None and size[1]:
            for place in range(i + 1, max((position[u] for u in node.users if u in position), default=i) + 1):
                alive[place] += 1
    starts = [0, *(i for i in range(1, len(nodes)) if alive[i] == 1), len(nodes)]
    return [nodes[start:stop] for start, stop in pairwise(starts)]


def problem(step: Measured, batch_size: int, stages: int, replicas: int, microbatches: int, times: int) -> FillProblem:
    """Idle time of a pipeline of balanced stages, each on `replicas` ranks that share a micro-batch."""
    size = batch_size // (microbatches * replicas)
    forward, backward = (
        [sum(seconds[size][name] for name in block.nodes) for block in step.graph.blocks]
        for seconds in (step.forward, step.backward)
    )
    cuts = linear([f + b for f, b in zip(forward, backward, strict=True)], stages)
    spans = [slice(*span) for span in pairwise(cuts)]
    seconds = {"F": [sum(forward[span]) for span in spans], "B": [sum(backward[span]) for span in spans]}
    stage_of = [stage for stage, span in enumerate(spans) for _ in range(span.stop - span.start)]
    sent = stage_bytes(step.graph, stage_of)
    work = Work(
        stages,
        microbatches,
        backward=frozenset(range(stages)),
        input_grad=frozenset(b for _, b in sent),
        weight_grad=frozenset(range(stages)),
        edges=frozenset(sent),
        grad_edges=frozenset((b, a) for a, b in sent),
    )
    schedule = make_schedule("1f1b", work, range(stages), seconds["F"], seconds["B"])

    def lag(source: int, target: int, kind: str) -> float:
        num_bytes = sent[min(source, target), max(source, target)] * size
        return CLUSTER.transfer_seconds(source * replicas, target * replicas, num_bytes)

    def duration(action: Action) -> float:
        return seconds[action.kind][action.stage]

    timeline = simulate(schedule, work, duration, lag)
    ends = [max(timeline.end_seconds[action] for action in actions) for actions in schedule.ranks]
    for stage, weights in enumerate(stage_weights(step, stage_of)):
        ends[stage] += CLUSTER.all_reduce_seconds(range(stage * replicas, (stage + 1) * replicas), weights)
    idle = (tuple(idle_spans(schedule.ranks[stage], timeline, max(ends))) for stage in range(stages))
    shared = tuple(intervals for intervals in idle for _ in range(replicas))
    return FillProblem(max(ends), shared, step.components(times), batch_size)


def idle_spans(actions: Sequence[Action], timeline: ActionTimes, end: float) -> Iterator[Interval]:
    """What a rank's actions leave of 0 to `end`."""
    now = 0.0
    for action in actions:
        if timeline.start_seconds[action] > now:
            yield now, timeline.start_seconds[action]
        now = timeline.end_seconds[action]
    if now < end:
        yield now, end


def stage_bytes(graph: BlockGraph, stage_of: Sequence[int]) -> dict[tuple[int, int], int]:
    """Bytes per sample from stage to stage."""
    sent: dict[tuple[int, int], int] = {}
    for edge in (edge for edge in graph.edges if isinstance(edge.producer, int)):
        source = stage_of[int(edge.producer)]
        for target in {stage_of[c] for c in edge.consumers if isinstance(c, int)} - {source}:
            sent[source, target] = sent.get((source, target), 0) + edge.bytes_per_sample
    return sent


def stage_weights(step: Measured, stage_of: Sequence[int]) -> list[int]:
    """Bytes of trained weights per stage."""
    stage = {name: stage_of[block.index] for block in step.graph.blocks for name in block.nodes}
    found = [0] * (max(stage_of) + 1)
    for node in step.captured.graph.find_nodes(op="placeholder"):
        readers = {stage[user.name] for user in node.users if user.name in stage}
        if node.meta["kind"] == "parameter" and node.meta["requires_grad"] and readers:
            found[min(readers)] += node.meta["val"].nbytes
    return found


def table(title: str, given: FillProblem) -> Table:
    bound = lower_bound_seconds(given)
    found = Table(title=f"{title}: pipeline {1e3 * given.pipeline_seconds:.1f} ms, bound {1e3 * bound:.1f} ms")
    found.title_justify = "left"
    for column in ("filler", "iteration, ms", "over bound", "tail, ms", "idle", "samples move", "planned in, ms"):
        found.add_column(column, justify="left" if column == "filler" else "right")
    for name, filler in WAYS.items():
        times = []
        for _ in range(REPEATS):
            fresh, started = replace(given), time.perf_counter()
            plan = filler(fresh)
            times.append(time.perf_counter() - started)
        iteration = plan.iteration_seconds
        numbers = (f"{1e3 * iteration:.1f}", f"{iteration / bound - 1:.2%}", f"{1e3 * plan.tail_seconds:.1f}")
        moves = "no" if plan.stays else "yes"
        found.add_row(name, *numbers, f"{plan.bubble_ratio:.2%}", moves, f"{1e3 * min(times):.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="A100-80GB@bfloat16")
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    step = measured(options.device)
    for stages, replicas, microbatches, times in PIPELINES:
        title = f"{stages} stages x {replicas}, {microbatches} micro-batches" + (", frozen part twice" * (times == 2))
        print_wide(table(title, problem(step, options.batch_size, stages, replicas, microbatches, times)))


if __name__ == "__main__":
    main()
