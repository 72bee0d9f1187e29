"""Cross-iteration pipelining: the frozen work of the next batch in the idle time of this one.

    one step           T T T T 0F0 0F1 ... 0B1          frozen work, then the pipeline
                 ->    prologue   T T T T               of the first batch
                       steady     0F0 T 0F1 .. T 0B1    train on this batch, frozen work of the next
                       epilogue   0F0 0F1 ... 0B1       train on the last

Method: DiffusionPipe (Tian et al., MLSys 2024), section 5, with fillers of `passes.fill`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from fxpipe.block_graph import BlockGraph
from fxpipe.call_costs import CallCost
from fxpipe.capture import Capture
from fxpipe.costs import CostModel, NodeCost, node_seconds
from fxpipe.schedule import Schedule, Work
from fxpipe.simulator import Timeline, simulate
from fxpipe.staged import Staged
from passes.batch import BatchPlan
from passes.blocks import layers as cut_layers
from passes.estimate import Lags, action_seconds, reduction_ends, without_components
from passes.fill import Fill, FillProblem, FrozenComponent, Layer, fill, idle_of_schedule
from passes.fill import Piece as FillPiece
from passes.lowering import Form, Lowered, lower, require_lowered
from passes.lowering.frozen import FrozenWork, Piece, one_sample
from passes.lowering.trace import Traced, trace_layers
from passes.order import Resources

FORMS: tuple[Form, ...] = ("prologue", "steady", "epilogue")
_LAYERS = 16  # per component: bubbles are filled by whole layers


@dataclass(frozen=True)
class Frozen:
    """The frozen part of a step: layers of every component, by node names, and the costs to time them with."""

    capture: Capture
    batch: BatchPlan
    graph: BlockGraph
    layers: tuple[tuple[tuple[str, ...], ...], ...]
    costs: Mapping[str, NodeCost]
    model: CostModel

    @property
    def flat(self) -> list[tuple[str, ...]]:
        return [nodes for layers in self.layers for nodes in layers]

    @property
    def first(self) -> list[int]:
        """The number of every component's first layer."""
        return [0, *accumulate(map(len, self.layers))][: len(self.layers)]


@dataclass(frozen=True)
class Filled:
    """The three forms of a step, the plan of its frozen work, and the calls of frozen layers to be priced."""

    prologue: Lowered
    steady: Lowered
    epilogue: Lowered
    schedule: Schedule
    fill: Fill
    calls: Mapping[str, CallCost]


def frozen_part(
    capture: Capture, batch: BatchPlan, graph: BlockGraph, costs: Mapping[str, NodeCost], model: CostModel
) -> Frozen:
    """The components cut into layers of about equal time."""
    seconds = node_seconds(model, capture.graph, costs, 1).forward
    layers = tuple(cut_layers(capture, component, seconds, _LAYERS) for component in graph.components)
    return Frozen(capture, batch, graph, layers, costs, model)


def components(frozen: Frozen, batch_size: int) -> tuple[FrozenComponent, ...]:
    """The frozen work for fillers: seconds of every layer at one sample, two, four, ... the whole batch."""
    sizes = sorted({min(2**k, batch_size) for k in range(batch_size.bit_length() + 1)})
    seconds = {n: node_seconds(frozen.model, frozen.capture.graph, frozen.costs, n).forward for n in sizes}
    numbers = {component.name: i for i, component in enumerate(frozen.graph.components)}
    return tuple(
        FrozenComponent(
            component.name,
            tuple(
                Layer.measured(f"{component.name}.{i}", {n: sum(seconds[n][name] for name in nodes) for n in sizes})
                for i, nodes in enumerate(layers)
            ),
            tuple(sorted(numbers[name] for name in component.depends)),
            whole=not frozen.batch.divisible,
        )
        for component, layers in zip(frozen.graph.components, frozen.layers, strict=True)
    )


def fill_step(
    frozen: Frozen,
    staged: Staged,
    traced: Traced,
    schedule: Schedule,
    resources: Resources,
    gradient_bytes: Sequence[int],
    weights: Sequence[float],
    device: torch.device,
    how: str,
    optional: Collection[int] = (),
) -> Filled:
    """The three forms of a step.

    Args:
        schedule: of the training; frozen work in it is left out.
        gradient_bytes: per block, reduced over replicas while frozen work goes on.
        weights: of the micro-batches' losses.
        optional: stages of a first pass, which some steps leave out.
    """
    graph = frozen.graph
    work = without_components(traced.work)
    schedule = replace(schedule, ranks=tuple(tuple(a for a in actions if a.kind != "T") for actions in schedule.ranks))
    timeline = _timeline(graph, staged, schedule, work, resources)
    ends = reduction_ends(staged, schedule, timeline, resources.cluster, gradient_bytes)
    length = max([timeline.makespan_seconds, *ends])
    batch_size = sum(traced.sizes)
    idle = idle_of_schedule(schedule, timeline, length)
    problem = FillProblem(length, idle, components(frozen, batch_size), batch_size)
    found = fill(problem, how)
    pieces = tuple(
        tuple(_piece(frozen, piece, [timeline.start_seconds[a] for a in actions]) for piece in of_rank)
        for actions, of_rank in zip(schedule.ranks, found.ranks, strict=True)
    )
    layout = traced.layout(schedule, graph, staged)
    layout = replace(layout, graphs={key: graphs for key, graphs in layout.graphs.items() if key[0] == "F"})
    sizes = {piece.num_samples for of_rank in pieces for piece in of_rank}
    layers, slices = trace_layers(frozen.capture, frozen.batch, graph, staged, frozen.flat, sizes, device)
    values = {
        value.name: one_sample(value, n, slices[value.name])
        for graphs in layers
        for n, layer in graphs.items()
        for value in layer.returns
    }
    job = FrozenWork(layers, pieces, layout, values, slices)
    sources = replace(traced.sources, slices={**slices, **traced.sources.slices})
    forms = {form: lower(layout, sources, weights, traced.state, device, job, form, optional) for form in FORMS}
    for lowered in forms.values():
        require_lowered(lowered)
    owner = {name: component.name for component in graph.components for name in component.nodes}
    calls = {
        f"{layer.unit.name}_b{n}": CallCost("forward", n, {owner.get(layer.unit.nodes[-1]): layer.unit.nodes})
        for graphs in layers
        for n, layer in graphs.items()
    }
    return Filled(**forms, schedule=schedule, fill=found, calls=calls)


def _timeline(graph: BlockGraph, staged: Staged, schedule: Schedule, work: Work, resources: Resources) -> Timeline:
    times = resources.times
    tables = action_seconds(staged, times)
    lag = Lags(graph, staged, times.num_samples, resources.cluster)
    return simulate(schedule, work, lambda a: 0.0 if a.kind == "R" else tables[a.kind][a.stage], lag)


def _piece(frozen: Frozen, piece: FillPiece, starts: Sequence[float]) -> Piece:
    component, first, last = piece.component, piece.first_layer, piece.last_layer
    start, stop = piece.first_sample, piece.last_sample
    offset = frozen.first[component]
    position = sum(s < piece.start_seconds for s in starts)
    return Piece(
        range(offset + first, offset + last), start, stop, position, f"{component}.{first}:{last}T{start}:{stop}"
    )
