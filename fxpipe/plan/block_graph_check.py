"""Checks a block graph against its capture from scratch; shares no code with the passes that make one."""

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.sizes import concrete
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Block, BlockGraph, Component, Edge, Fault, Owner, is_size, ranges


def require(graph: BlockGraph, capture: Capture) -> None:
    """Raise CompileError with the faults shown in the printed block graph; the user's model is not to blame."""
    if faults := check(graph, capture):
        told = f"the block graph is wrong, by an error in fxpipe; please report it:\n{graph.text(faults)}"
        raise CompileError("\n".join([told, capture.inputs.grouped]).rstrip())


def check(graph: BlockGraph, capture: Capture) -> tuple[Fault, ...]:
    """What is wrong: every operation computed once, in an order that dataflow allows, every crossing tensor an edge."""
    calls = {n.name: n for n in capture.graph.nodes if n.op == "call_function"}
    faults = list(_ownership(graph, calls))
    if faults:
        return tuple(faults)
    faults += _order(graph, calls)
    faults += _frozen(graph, calls)
    faults += _edges(graph, calls)
    loss = graph.owners.get(capture.result.name)
    if loss != len(graph.blocks) - 1:
        faults.append(Fault(loss, f"the loss {capture.result.name} must be made by the last block"))
    return tuple(faults)


def _ownership(graph: BlockGraph, calls: Mapping[str, fx.Node]) -> Iterator[Fault]:
    groups: list[tuple[Owner | None, tuple[str, ...]]] = [(b.index, b.nodes) for b in graph.blocks]
    groups += [(c.name, c.nodes) for c in graph.components]
    groups.append((None, tuple(sorted(graph.local))))
    found: dict[str, Owner | None] = {}
    for place, names in groups:
        for name in names:
            if name not in calls:
                yield Fault(place, f"{name} is no operation of the capture")
            if name in found:
                yield Fault(place, f"{name} is also in {_called(found[name])}")
            found[name] = place
    for name in calls.keys() - found.keys():
        yield Fault(None, f"{name} is in no block, in no component and not local")
    for position, block in enumerate(graph.blocks):
        if block.index != position or not block.nodes:
            yield Fault(block.index, f"block {position} has index {block.index} and {len(block.nodes)} operations")


def _called(owner: Owner | None) -> str:
    if owner is None:
        return "the local operations"
    return f"block {owner}" if isinstance(owner, int) else f"component {owner}"


def _order(graph: BlockGraph, calls: Mapping[str, fx.Node]) -> Iterator[Fault]:
    """Readers come after what they read: in their block, in a later one; components only after those they name."""
    seen: set[str] = set()
    depends: dict[str, tuple[str, ...]] = {}
    for component in graph.components:
        unknown = [d for d in component.depends if d not in depends]
        if unknown:
            yield Fault(component.name, f"depends on {unknown[0]}, which is no earlier component")
        depends[component.name] = component.depends
    groups: tuple[Component | Block, ...] = (*graph.components, *graph.blocks)
    for group in groups:
        place = graph.owners[group.nodes[0]]
        for name in group.nodes:
            for source in _operands(calls[name]):
                if source.name in graph.local:
                    continue
                if source.name not in seen:
                    yield Fault(
                        place, f"{name} reads {source.name}, made later by {_called(graph.owners[source.name])}"
                    )
                maker = graph.owners[source.name]
                if isinstance(place, str) and maker not in (place, *depends[place]):
                    yield Fault(place, f"{name} reads {source.name} of {_called(maker)}, which it does not depend on")
            seen.add(name)


def _frozen(graph: BlockGraph, calls: Mapping[str, fx.Node]) -> Iterator[Fault]:
    for name in sorted(graph.local):
        for source in _operands(calls[name]):
            if not is_size(calls[name].meta["val"]) and source.name not in graph.local:
                yield Fault(graph.owners[source.name], f"the local operation {name} reads {source.name}")
    for component in graph.components:
        for name in component.nodes:
            if calls[name].meta["requires_grad"]:
                yield Fault(component.name, f"{name} requires grad, so it is not frozen")


def _operands(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if a.op == "call_function" and not is_size(a.meta["val"])]


def _edges(graph: BlockGraph, calls: Mapping[str, fx.Node]) -> Iterator[Fault]:
    readers: dict[str, set[Owner]] = {}
    for name, owner in graph.owners.items():
        for source in _operands(calls[name]):
            maker = graph.owners.get(source.name)
            if maker is not None and maker != owner:
                readers.setdefault(source.name, set()).add(owner)
    edges = {edge.name: edge for edge in graph.edges}
    if len(edges) < len(graph.edges):
        yield Fault(None, "two edges have one name")
    for name in readers.keys() - edges.keys():
        yield Fault(graph.owners[name], f"{name} crosses, but is no edge")
    for edge in graph.edges:
        if edge.name not in readers:
            yield Fault(edge.producer, f"edge {edge.name} does not cross")
            continue
        if edge.producer != graph.owners[edge.name]:
            yield Fault(edge.producer, f"edge {edge.name} is made by {_called(graph.owners[edge.name])}")
        if set(edge.consumers) != readers[edge.name] or len(set(edge.consumers)) != len(edge.kinds):
            wanted = ranges(sorted(readers[edge.name], key=str))
            yield Fault(edge.producer, f"edge {edge.name} goes to {ranges(edge.consumers)}, its readers are {wanted}")
        yield from _value(edge, calls[edge.name])


def _value(edge: Edge, node: fx.Node) -> Iterator[Fault]:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        yield Fault(edge.producer, f"edge {edge.name} is a {type(value).__name__}, not a tensor")
        return
    if edge.requires_grad != node.meta["requires_grad"]:
        yield Fault(edge.producer, f"edge {edge.name} has requires_grad={edge.requires_grad}, unlike its operation")
    for batch_size in (1, 2, 5):
        real = value.dtype.itemsize
        for size in concrete(value.shape, batch_size):
            real *= size
        if (stated := edge.num_bytes(batch_size)) != real:
            yield Fault(
                edge.producer, f"edge {edge.name}: {stated} bytes at {batch_size} samples, where {real} are right"
            )
            return
