"""Trace every stage and frozen component at every micro-batch size, and derive the work a schedule must contain."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpipe.block_graph import BlockGraph
from fxpipe.capture import Capture
from fxpipe.schedule import Schedule, Work
from fxpipe.sizes import concrete
from fxpipe.staged import Staged
from passes.batch import BatchPlan
from passes.lowering.messages import Graphs, Layout
from passes.lowering.rank_writer import BatchSlice, Sources
from passes.lowering.stage_graphs import StageGraphs, state_name, trace_stage
from passes.lowering.units import STATE_KINDS, Unit, Value, make_units, whole_batch_unit


@dataclass(frozen=True)
class Traced:
    """Stage graphs by ("F", stage) or ("T", component) and micro-batch size; `state` has parameters' shapes by name."""

    graphs: Graphs
    sources: Sources
    work: Work
    sizes: tuple[int, ...]
    state: Mapping[str, torch.Tensor]
    loss: str

    def layout(self, schedule: Schedule, graph: BlockGraph, staged: Staged) -> Layout:
        """What is lowered: these graphs in the order of `schedule`."""
        return Layout(self.graphs, schedule, self.sizes, _kinds(graph, staged), self.loss)


def trace(
    capture: Capture, batch: BatchPlan, graph: BlockGraph, staged: Staged, sizes: Sequence[int], device: torch.device
) -> Traced:
    """All graphs, producers before readers, so that each reader knows which of its values carry gradients."""
    groups = {("T", i): (f"frozen_{i}", set(c.nodes)) for i, c in enumerate(graph.components)}
    for stage in range(staged.num_stages):
        nodes = {name for block in staged.blocks(stage) for name in graph.blocks[block].nodes}
        if nodes:
            groups["F", stage] = (f"stage_{stage}", nodes)
    units = dict(zip(groups, make_units(capture, groups.values(), graph.local, batch.whole_batch), strict=True))
    graphs: dict[tuple[str, int], dict[int, StageGraphs]] = {key: {} for key in units}
    for size in sorted(set(sizes)):
        values = _given_values(capture, batch, size)
        for key, unit in units.items():
            recompute = key[0] == "F" and key[1] in staged.recompute
            reads = [values[name] for name in unit.reads]
            traced = trace_stage(capture, unit, size, reads, device, recompute)
            graphs[key][size] = traced
            values |= {value.name: value for value in traced.returns}
    return Traced(
        graphs,
        _sources(capture, batch, graph, units, sum(sizes), device),
        _work(graphs, staged.num_stages, len(graph.components), len(sizes)),
        tuple(sizes),
        _state(capture),
        capture.loss.name,
    )


def trace_layers(
    capture: Capture,
    batch: BatchPlan,
    graph: BlockGraph,
    staged: Staged,
    layers: Sequence[Sequence[str]],
    sizes: Collection[int],
    device: torch.device,
) -> tuple[list[dict[int, StageGraphs]], dict[str, BatchSlice | None]]:
    """The graphs of frozen layers by numbers of samples, and where the samples are in what they read and return."""
    groups = [(f"frozen_{i}", set(nodes)) for i, nodes in enumerate(layers)]
    for stage in range(staged.num_stages):
        groups.append((f"stage_{stage}", {n for block in staged.blocks(stage) for n in graph.blocks[block].nodes}))
    units = make_units(capture, [group for group in groups if group[1]], graph.local, batch.whole_batch)[: len(layers)]
    found: list[dict[int, StageGraphs]] = [{} for _ in layers]
    for size in sorted(sizes):
        values = _given_values(capture, batch, size)
        for unit, graphs in zip(units, found, strict=True):
            graphs[size] = trace_stage(capture, unit, size, [values[name] for name in unit.reads], device)
            values |= {value.name: value for value in graphs[size].returns}
    names = {name for unit in units for name in (*unit.reads, *unit.returns)}
    return found, {name: _slice(batch, name) for name in names if name in batch.layouts}


def _given_values(capture: Capture, batch: BatchPlan, size: int) -> dict[str, Value]:
    """What no unit makes, as one micro-batch of `size` samples sees it."""
    given = [n for n in capture.graph.nodes if n.op == "placeholder" and n.meta["kind"] not in STATE_KINDS]
    given += [capture.nodes[name] for name in batch.whole_batch]
    fakes = {n.name: n.meta["val"] for n in given}
    return {name: Value(name, concrete(tuple(fake.shape), size), fake.dtype, False) for name, fake in fakes.items()}


def _sources(
    capture: Capture,
    batch: BatchPlan,
    graph: BlockGraph,
    units: Mapping[tuple[str, int], Unit],
    batch_size: int,
    device: torch.device,
) -> Sources:
    placeholders = capture.graph.find_nodes(op="placeholder")
    reads = {name for unit in units.values() for name in unit.reads}
    prologue = None
    if wanted := [name for name in batch.whole_batch if name in reads]:
        unit = whole_batch_unit(capture, wanted, graph.local)
        values = _given_values(capture, batch, batch_size)
        prologue = trace_stage(capture, unit, batch_size, [values[name] for name in unit.reads], device)
    return Sources(
        tuple(n.name for n in placeholders if n.meta["kind"] == "input"),
        {n.name: capture.draws[n.name].index for n in placeholders if n.meta["kind"] == "draw"},
        prologue,
        {name: _slice(batch, name) for name in reads if name in batch.layouts},
    )


def _slice(batch: BatchPlan, name: str) -> BatchSlice | None:
    layout = batch.layouts[name]
    assert not isinstance(layout, tuple), f"{name} is a single value"
    return None if layout is None else BatchSlice(layout.dim, layout.outer, layout.inner)


def _state(capture: Capture) -> dict[str, torch.Tensor]:
    state = {}
    for node in capture.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] in STATE_KINDS:
            value = node.meta["val"]
            state[state_name(capture, node.name)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return state


def _work(graphs: Graphs, num_stages: int, num_components: int, num_microbatches: int) -> Work:
    one = {key: next(iter(sizes.values())) for key, sizes in graphs.items()}
    producer = {value: key for key, traced in one.items() for value in traced.unit.returns}
    reads = {(producer[v], key) for key, traced in one.items() for v in traced.unit.reads if v in producer}
    stages = {index: traced for (kind, index), traced in one.items() if kind == "F"}
    gradients = {(s, producer[v][1]) for s, traced in stages.items() for v in traced.input_grads}

    def pairs(source: str, target: str) -> frozenset[tuple[int, int]]:
        return frozenset((a, b) for (first, a), (second, b) in reads if (first, second) == (source, target))

    return Work(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_components=num_components,
        empty=frozenset(range(num_stages)) - frozenset(stages),
        backward=frozenset(s for s, traced in stages.items() if traced.backward is not None),
        input_grad=frozenset(s for s, _ in gradients),
        weight_grad=frozenset(s for s, traced in stages.items() if traced.weight_grads),
        edges=pairs("F", "F"),
        grad_edges=frozenset(gradients),
        frozen_edges=pairs("T", "F"),
        component_edges=pairs("T", "T"),
    )


def _kinds(graph: BlockGraph, staged: Staged) -> dict[tuple[str, tuple[str, int]], str]:
    """The kind of every value as each unit reads it: where its blocks differ, main before skip before conditioning.

    What a frozen component makes is conditioning wherever it goes: no backbone stage owns its other end.
    """
    index = {component.name: i for i, component in enumerate(graph.components)}
    kinds: dict[tuple[str, tuple[str, int]], str] = {}
    for wanted in ("conditioning", "skip", "main"):
        for edge in graph.edges:
            for consumer, kind in zip(edge.consumers, edge.kinds, strict=True):
                if kind == wanted:
                    inside = isinstance(consumer, int)
                    unit = ("F", staged.stage_of_block[consumer]) if inside else ("T", index[consumer])  # type: ignore[index]
                    kinds[edge.name, unit] = kind if isinstance(edge.producer, int) else "conditioning"
    return kinds
