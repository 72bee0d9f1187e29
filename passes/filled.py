"""Cross-iteration pipelining: the frozen work of the next batch in the idle time of this one.

    one step           T T T T 0F0 0F1 ... 0B1          frozen work, then the pipeline
                 ->    prologue   T T T T               of the first batch
                       steady     0F0 T 0F1 .. T 0B1    train on this batch, frozen work of the next
                       epilogue   0F0 0F1 ... 0B1       train on the last

Method: DiffusionPipe (Tian et al., MLSys 2024), section 5, with fillers of `passes.fill`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from fxpipe.block_graph import BlockGraph
from fxpipe.capture import Capture
from fxpipe.costs.call_costs import CallCost
from fxpipe.schedule import Schedule, Work
from fxpipe.simulator import ActionTimes, simulate
from fxpipe.staged import Staged
from passes.batch import BatchPlan
from passes.estimate import Lags, action_seconds, reduction_ends, without_components
from passes.fill import Fill, fill, idle_of_schedule, parts
from passes.fill import Piece as FillPiece
from passes.frozen_layers import Ahead, FrozenLayers
from passes.lowering import Form, Lowered, lower, require_lowered
from passes.lowering.frozen import FrozenWork, Piece, one_sample
from passes.lowering.trace import Traced, trace_layers
from passes.order import Resources

FORMS: tuple[Form, ...] = ("prologue", "steady", "epilogue")


@dataclass(frozen=True)
class Frozen:
    """The frozen part of a step: layers of every component, and what a rank has for the operands of one of them, at any
    moment and after the rest of the step."""

    capture: Capture
    batch: BatchPlan
    graph: BlockGraph
    layers: FrozenLayers
    room_bytes: tuple[int, int] | None = None

    @property
    def flat(self) -> list[tuple[str, ...]]:
        return [nodes for layers in self.layers.nodes for nodes in layers]

    @property
    def first(self) -> list[int]:
        """The number of every component's first layer."""
        return [0, *accumulate(self.layers.num_layers)][: len(self.layers.names)]


@dataclass(frozen=True)
class Filled:
    """The three forms of a step, the plan of its frozen work, and the calls of frozen layers to be priced."""

    prologue: Lowered
    steady: Lowered
    epilogue: Lowered
    schedule: Schedule
    fill: Fill
    calls: Mapping[str, CallCost]


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
    ahead = Ahead(frozen.layers, batch_size, frozen.room_bytes, not frozen.batch.divisible, staged.frozen_ranks)
    problem, found = ahead.filled(length, idle, partial(fill, how=how), free=how in ("per-device", "none"))
    pieces = tuple(
        tuple(
            _piece(frozen, piece, samples, [timeline.start_seconds[a] for a in actions])
            for piece in of_rank
            for samples in parts(problem, piece)
        )
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


def _timeline(graph: BlockGraph, staged: Staged, schedule: Schedule, work: Work, resources: Resources) -> ActionTimes:
    times = resources.times
    tables = action_seconds(staged, times)
    lag = Lags(graph, staged, times.num_samples, resources.cluster)
    return simulate(schedule, work, lambda a: 0.0 if a.kind == "R" else tables[a.kind][a.stage], lag)


def _piece(frozen: Frozen, piece: FillPiece, samples: range, starts: Sequence[float]) -> Piece:
    component, first, last = piece.component, piece.first_layer, piece.last_layer
    offset = frozen.first[component]
    position = sum(s < piece.start_seconds for s in starts)
    label = f"{component}.{first}:{last}T{samples.start}:{samples.stop}"
    return Piece(range(offset + first, offset + last), samples.start, samples.stop, position, label)
