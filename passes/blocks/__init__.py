"""Blocks: cut the backbone into runs that are balanced, cheap to cut between, and named after modules.

    conv_in res0 (attn mlp) res1 cat res2 out      ->      | conv_in res0 | attn mlp | res1 | cat res2 out |

The backbone's operations stand in one line; a block is a run of it, and a cut is paid with the bytes of every value
alive there. Among all ways to cut with no run above 1/target of the time, the one with the least to pay is taken, where
a cut one module deeper costs four times as much. So cuts fall between large modules first, inside them when the target
demands it, and of the places between two modules where the fewest bytes cross: after a residual's addition, before a
skip's concatenation.

freeze   what trains, what only feeds that     line    the backbone's operations in one order
adopt    light frozen work moves to its block  skips   what crosses between blocks (paths: names as people read them)
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import sqrt

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.outputs import is_number
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Block, BlockGraph, Component, is_size, tensor_bytes
from passes.blocks.adopt import adopt
from passes.blocks.freeze import Freeze, components, freeze
from passes.blocks.line import BytesOf, line
from passes.blocks.paths import common, label, parts
from passes.blocks.skips import edges

_DEEPER = 4.0  # what a cut costs one module deeper
_SLACK = 0.2  # a block may exceed its share by this much, rather than leave a crumb beside it
_LUMPS = 1e-3  # of as many bytes, what few large values cost more than many small ones
_BUSY = 0.02  # of a block's time: what takes less does not give it its name


def analyse(capture: Capture, node_seconds: Mapping[str, float], target_blocks: int) -> BlockGraph:
    """Freeze, cut, adopt, and find what crosses.

    Args:
        node_seconds: forward and backward seconds by node name; nodes not in it take no time.
        target_blocks: no block takes more than 1/target of the backbone's time, where it can be divided.

    Raises:
        CompileError: nothing trains.
    """
    split = freeze(capture)
    cut = blocks(capture, split, node_seconds, target_blocks)
    frozen, cut = adopt(capture, split.frozen, cut, node_seconds, _limit(split, node_seconds, target_blocks))
    groups = components(capture, frozen)
    return BlockGraph(
        blocks=cut,
        components=groups,
        local=split.local,
        edges=edges(capture, groups, cut, node_seconds),
        block_seconds=tuple(_seconds(b.nodes, node_seconds) for b in cut),
        component_seconds=tuple(_seconds(c.nodes, node_seconds) for c in groups),
        unused=capture.unused,
        first_pass=_first_pass(capture, cut),
        kept=tuple(sink.name for sink in capture.outputs.values() if not is_number(sink)),
    )


def _first_pass(capture: Capture, cut: Sequence[Block]) -> int:
    """The number of leading blocks that run under no_grad altogether, though they read trained weights."""
    no_grad = {n.name for n in capture.graph.nodes if n.meta.get("no_grad")}
    whole = [all(name in no_grad for name in block.nodes) for block in cut]
    return whole.index(False) if False in whole else 0


def _seconds(names: Sequence[str], node_seconds: Mapping[str, float]) -> float:
    return sum(node_seconds.get(name, 0.0) for name in names)


def blocks(
    capture: Capture, split: Freeze, node_seconds: Mapping[str, float], target_blocks: int,
    bytes_of: BytesOf = tensor_bytes,
) -> tuple[Block, ...]:  # fmt: skip
    """The backbone as blocks in execution order, none above 1/target of its time if it can be divided."""
    if target_blocks < 1:
        raise CompileError(f"target_blocks is {target_blocks}: a backbone has at least one block")
    limit = _limit(split, node_seconds, target_blocks)
    nodes, moved = line(capture, split.backbone, node_seconds, limit, bytes_of)
    ends = {capture.result, *capture.numbers}  # the last block makes the loss, and the numbers beside it
    last = next(i for i, node in enumerate(nodes) if node in ends)
    places = [place for place in _places(nodes, moved, bytes_of) if place.index <= last]
    turns = [i for i in range(1, len(nodes)) if _no_grad(nodes[i - 1]) and not _no_grad(nodes[i])]
    must = [place.index for place in places if place.index in turns[-1:]]  # a first pass ends where its block does
    cuts = [0]
    for start, stop in pairwise([0, *must, len(nodes)]):
        inner = [place for place in places if start < place.index < stop]
        indices = [start, *(place.index for place in inner), stop]
        pieces = [_seconds([n.name for n in nodes[i:j]], node_seconds) for i, j in pairwise(indices)]
        cuts += [indices[i] for i in cheapest_cuts([place.cost for place in inner], pieces, limit)][1:]
    runs = [nodes[start:stop] for start, stop in pairwise(cuts)]
    names = _names([[n for n in run if n not in moved] or run for run in runs], node_seconds)
    named = enumerate(zip(names, runs, strict=True))
    return tuple(Block(i, name, tuple(n.name for n in run)) for i, (name, run) in named)


def _no_grad(node: fx.Node) -> bool:
    return bool(node.meta.get("no_grad"))


def layers(
    capture: Capture, component: Component, node_seconds: Mapping[str, float], target_layers: int
) -> tuple[tuple[str, ...], ...]:
    """A frozen component's operations as runs that follow each other, none above 1/target of its time if divisible."""
    names = set(component.nodes)
    nodes = [node for node in capture.graph.nodes if node.name in names]
    limit = _seconds(component.nodes, node_seconds) / target_layers
    places = _places(nodes, {}, tensor_bytes)
    indices = [0, *(place.index for place in places), len(nodes)]
    pieces = [_seconds([n.name for n in nodes[start:stop]], node_seconds) for start, stop in pairwise(indices)]
    cuts = [indices[i] for i in cheapest_cuts([place.cost for place in places], pieces, limit)]
    return tuple(tuple(n.name for n in nodes[start:stop]) for start, stop in pairwise(cuts))


def _limit(split: Freeze, node_seconds: Mapping[str, float], target_blocks: int) -> float:
    return _seconds(split.backbone, node_seconds) / target_blocks


@dataclass(frozen=True)
class _Place:
    """A place to cut, before node `index`, and what that costs."""

    index: int
    cost: float


def _places(nodes: Sequence[fx.Node], moved: Mapping[fx.Node, fx.Node], bytes_of: BytesOf) -> list[_Place]:
    """Where the line may be cut: nowhere that a tuple, or a tensor which is no multiple of the batch, is alive."""
    position = {n: i for i, n in enumerate(nodes) if not is_size(n.meta["val"])}
    born: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    dead: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    barred = [0] * (len(nodes) + 2)
    sizes: dict[int, tuple[int, bool] | None] = {}  # by the value's id: of many nodes it is one and the same
    for i, node in enumerate(nodes):
        value = node.meta["val"]
        last = max((position[u] for u in node.users if u in position), default=i)
        if last == i:
            continue
        if id(value) not in sizes:
            sizes[id(value)] = bytes_of(value)
        size = sizes[id(value)]
        if size is None:
            barred[i + 1] += 1
            barred[last + 1] -= 1
        else:
            born[i + 1].append(size[0])
            dead[min(last + 1, len(nodes))].append(size[0])
    return _costs(nodes, moved, born, dead, barred)


def _costs(
    nodes: Sequence[fx.Node],
    moved: Mapping[fx.Node, fx.Node],
    born: Sequence[Sequence[int]],
    dead: Sequence[Sequence[int]],
    barred: Sequence[int],
) -> list[_Place]:
    """Bytes alive, by depth; of equal sums the one in more and smaller values (before a concatenation) is cheaper.

    What was moved to its reader counts as part of the reader's module, and keeps to it.
    """
    paths = [parts(moved.get(n, n).meta["path"]) for n in nodes]
    places = []
    total, squares, bars = 0, 0, 0
    for i in range(1, len(nodes)):
        total += sum(born[i]) - sum(dead[i])
        squares += sum(b * b for b in born[i]) - sum(b * b for b in dead[i])
        bars += barred[i]
        if not bars:
            depth = common(paths[i - 1], paths[i]) + (nodes[i - 1] in moved)
            places.append(_Place(i, (1 + total + _LUMPS * sqrt(squares)) * _DEEPER**depth))
    return places


def cheapest_cuts(costs: Sequence[float], seconds: Sequence[float], limit: float) -> list[int]:
    """The cuts with the least cost in all, such that no run exceeds the limit by more than a fifth of it.

    A piece that alone exceeds the limit may share a run with as much more. Shortest path over the cuts: the starts that
    a run may have, which move on with its end, are kept in a line as long as none after them costs less.

    Args:
        costs: of a cut before every piece but the first.
        seconds: of every piece; pieces are not divided.

    Returns: the first piece of every run, then the number of pieces.
    """
    busy = [place for place, taken in enumerate(seconds) if taken]
    if not busy:
        return [0, len(seconds)]
    # of cuts with no time between them one is enough
    cuts = [min(range(end, start, -1), key=lambda cut: costs[cut - 1]) for start, end in pairwise(busy)]
    firsts = [0, *cuts, len(seconds)]
    taken = [seconds[place] for place in busy]
    ends, paid = [0.0, *accumulate(taken)], [0.0]  # paid: up to every cut, with it
    came, cheapest, largest, first = [0], deque[int](), deque[int](), 0
    for last in range(len(taken)):
        while cheapest and paid[cheapest[-1]] >= paid[last]:
            cheapest.pop()
        while largest and taken[largest[-1]] <= taken[last]:
            largest.pop()
        cheapest.append(last)
        largest.append(last)
        while first < last and ends[last + 1] - ends[first] > max(limit, taken[largest[0]]) + _SLACK * limit:
            first += 1
            for starts in (cheapest, largest):
                if starts[0] < first:
                    starts.popleft()
        came.append(cheapest[0])
        paid.append(paid[cheapest[0]] + (costs[firsts[last + 1] - 1] if last + 1 < len(taken) else 0.0))
    chosen = [len(taken)]
    while chosen[-1]:
        chosen.append(came[chosen[-1]])
    return [firsts[place] for place in chosen[::-1]]


def _names(runs: Sequence[Sequence[fx.Node]], node_seconds: Mapping[str, float]) -> list[str]:
    """Modules from each run's first to its last that takes time; runs inside one module also say which operations."""
    main = [_main_nodes(run, node_seconds) for run in runs]
    names = []
    for i, nodes in enumerate(main):
        outside = [n.meta["path"] for j in (i - 1, i + 1) if 0 <= j < len(main) for n in main[j]]
        names.append(label(nodes[0].meta["path"], nodes[-1].meta["path"], outside) or "forward")
    pairs = zip(names, main, strict=True)
    return [f"{name} [{_span(nodes)}]" if names.count(name) > 1 else name for name, nodes in pairs]


def _span(nodes: Sequence[fx.Node]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} .. {nodes[-1].name}"


def _main_nodes(run: Sequence[fx.Node], node_seconds: Mapping[str, float]) -> list[fx.Node]:
    """Without what takes no time worth speaking of, and without glue between modules where there is more."""
    total = _seconds([n.name for n in run], node_seconds)
    calls = [n for n in run if isinstance(n.target, torch._ops.OpOverload)] or list(run)
    busy = [n for n in calls if node_seconds.get(n.name, 0.0) > _BUSY * total] or calls
    paths = {parts(n.meta["path"]) for n in busy}
    outer = {path[:depth] for path in paths for depth in range(len(path))}
    return [n for n in busy if parts(n.meta["path"]) not in outer]
