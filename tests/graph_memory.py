"""How much memory one call of a stage graph takes as it runs: FX frees each value after its last use.

    y = conv(x, w)        +y                     segment: peak 3 (y, z, t), then saved value 0 is let go
    z = silu(y); y = None +z -y
    t = z.t()             (z's memory)
    return [z]                                   outputs: z's memory

Memory is counted by storage, so views cost nothing. Inputs belong to the caller, but saved values come in a list that
the graph empties: each is let go after its last use. What a kernel allocates for itself is not seen.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.plan import ops

NEW, ARGUMENT, SAVED, STATE = "new", "argument", "saved", "state"


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory by its owner: made by the graph (`index` counts, `num_bytes` its size), an argument's, a saved value's or
    the model's state's."""

    owner: str
    index: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the call: the most bytes the graph's own values hold in it, and the saved value that is let go at
    its end (None: none)."""

    peak_bytes: int
    releases: int | None


@dataclass(frozen=True)
class CallMemory:
    """One call: its segments, and the storages of what it returns, list by list."""

    segments: tuple[Segment, ...]
    outputs: tuple[tuple[Storage, ...], ...]


def call_memory(graph: fx.Graph) -> CallMemory:
    """Follow the graph from node to node."""
    shown = _storages(graph)
    last_use = {node: node for node in graph.nodes}
    for node in graph.nodes:
        last_use |= dict.fromkeys(node.all_input_nodes, node)
    dies: dict[Storage, fx.Node] = {}
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node, storages in shown.items():
        for storage in storages:
            dies[storage] = max(last_use[node], dies.get(storage, node), key=order.__getitem__)
    ends: dict[fx.Node, list[Storage]] = {}
    for storage, node in dies.items():
        ends.setdefault(node, []).append(storage)
    (output,) = graph.find_nodes(op="output")
    results = tuple(tuple(shown[item][0] for item in part) for part in output.args[0])
    return CallMemory(tuple(_segments(graph, shown, ends)), results)


def _segments(
    graph: fx.Graph, shown: dict[fx.Node, list[Storage]], ends: dict[fx.Node, list[Storage]]
) -> Iterator[Segment]:
    level = peak = 0
    made: set[Storage] = set()
    for node in graph.nodes:
        if node.op == "output":
            break
        for storage in shown[node]:
            if storage.owner == NEW and storage not in made:
                made.add(storage)
                level += storage.num_bytes
        peak = max(peak, level)
        level -= sum(storage.num_bytes for storage in ends.get(node, ()) if storage.owner == NEW)
        for storage in ends.get(node, ()):
            if storage.owner == SAVED:
                yield Segment(peak, storage.index)
                peak = level
    yield Segment(peak, None)


def _storages(graph: fx.Graph) -> dict[fx.Node, list[Storage]]:
    """The storages that every node's value shows."""
    known: dict[int, Storage] = {}
    shown: dict[fx.Node, list[Storage]] = {}
    counts = {NEW: 0, ARGUMENT: 0}
    for node in graph.nodes:
        if node.op == "output" or node.target is ops.release:
            shown[node] = []
            continue
        given = _given(node, counts)
        found = []
        for tensor in _tensors(node):
            identity = tensor.untyped_storage()._cdata
            if given is not None:
                known.setdefault(identity, given)
                found.append(given)
                continue
            storage = known.get(identity) if private.may_alias(node.target) else None
            if storage is None:
                # A copied node may carry the metadata of its original: only a view may share what is known.
                storage = known[identity] = Storage(NEW, counts[NEW], tensor.untyped_storage().nbytes())
                counts[NEW] += 1
            found.append(storage)
        if node.op == "placeholder":
            counts[ARGUMENT] += 1
        shown[node] = found
    return shown


def _given(node: fx.Node, counts: dict[str, int]) -> Storage | None:
    """The storage of what comes from outside."""
    if node.op == "placeholder":
        return Storage(ARGUMENT, counts[ARGUMENT])
    if node.op == "get_attr":
        return Storage(STATE, 0)
    if node.target is operator.getitem and _is_weights(node.args[0]):
        return Storage(STATE, 0)
    if node.target is operator.getitem and is_saved_list(node.args[0]):
        assert isinstance(node.args[1], int)
        return Storage(SAVED, node.args[1])
    return None


def is_saved_list(node: Any) -> bool:
    """Whether a node is the list of saved values that a backward graph takes first."""
    return node.op == "placeholder" and any(user.target is ops.release for user in node.users)


def _is_weights(node: Any) -> bool:
    """Whether a node is the list of weights that were gathered for the call."""
    return bool(node.op == "placeholder" and node.target == "gathered_weights")


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else [value]
    if node.target is torch.ops.aten.convolution_backward.default:
        items = [item for item, wanted in zip(items, node.args[-1], strict=True) if wanted]  # type: ignore[arg-type]
    return [item for item in items if isinstance(item, torch.Tensor)]
