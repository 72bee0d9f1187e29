"""Skips: what crosses between blocks, and how far each value goes.

    block 0 ── h ──> 1 ... 6 ──> 7         h is main for block 1, skip for block 7
            ── t ──────> 1, 2, 3 .. 7      t is conditioning

Dataflow decides: a value read next door is main, one read further on a skip, one read in many places, or a small vector
beside larger values, conditioning. A value whose readers are all within one small module (a residual around attention,
where the module was divided) stays main on the whole way: it runs along with its module and ties no distant blocks
together.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from torch import fx

from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Block, Component, Edge, EdgeKind, Owner, crossing, is_size, tensor_bytes
from passes.blocks.paths import parts

_SMALL_MODULE = 1 / 3  # of the backbone's time
_PLACE = 2  # readers up to this many blocks apart are one place
_MANY_PLACES = 3
_MANY_READERS = 3
_SMALL_VECTOR = 1 / 4  # of the largest value that its first reader reads


def edges(
    capture: Capture, groups: Sequence[Component], blocks: Sequence[Block], node_seconds: Mapping[str, float]
) -> tuple[Edge, ...]:
    """Every tensor that crosses between components and blocks, in trace order.

    Raises:
        CompileError: a frozen value that is no multiple of the batch crosses.
    """
    owners: dict[str, Owner] = {name: g.name for g in groups for name in g.nodes}
    owners |= {name: b.index for b in blocks for name in b.nodes}
    nodes = {n.name: n for n in capture.graph.nodes if n.op == "call_function"}
    readers = crossing(nodes.values(), owners)
    sizes = {name: _size(nodes[name]) for name in readers}
    small = _small_modules(nodes, blocks, node_seconds)
    largest: dict[Owner, int] = {}
    for name, consumers in readers.items():
        for consumer in consumers:
            largest[consumer] = max(largest.get(consumer, 0), sizes[name][0])
    found = []
    for name, consumers in readers.items():
        value = _Crossing(nodes[name], owners, small)
        first = min((c for c in consumers if isinstance(c, int)), default=consumers[0])
        vector = _is_vector(nodes[name]) and sizes[name][0] <= _SMALL_VECTOR * largest[first]
        everywhere: EdgeKind | None = "conditioning" if vector or value.is_widely_read() else None
        kinds = tuple(everywhere or value.kind_for(consumer) for consumer in consumers)
        num_bytes, batched = sizes[name]
        needs_gradient = bool(nodes[name].meta["requires_grad"])
        found.append(Edge(name, owners[name], consumers, kinds, num_bytes, batched, needs_gradient))
    return tuple(found)


def _size(node: fx.Node) -> tuple[int, bool]:
    size = tensor_bytes(node.meta["val"])
    if size is None:
        path = node.meta["path"] or "(the model itself)"
        raise CompileError(
            f"module {path}: {node.name} would have to be sent with each micro-batch, but its size is no multiple of "
            "the batch's; compute it where it is used"
        )
    return size


def _small_modules(
    nodes: Mapping[str, fx.Node], blocks: Sequence[Block], node_seconds: Mapping[str, float]
) -> dict[tuple[str, ...], int]:
    """Modules that take no large part of the time, with the block each begins in."""
    seconds: dict[tuple[str, ...], float] = {}
    begins: dict[tuple[str, ...], int] = {}
    total = 0.0
    for block in blocks:
        for name in block.nodes:
            cost = node_seconds.get(name, 0.0)
            total += cost
            for module in _modules(nodes[name]):
                seconds[module] = seconds.get(module, 0.0) + cost
                begins.setdefault(module, block.index)
    return {module: begins[module] for module, cost in seconds.items() if cost <= _SMALL_MODULE * total}


def _modules(node: fx.Node) -> Iterator[tuple[str, ...]]:
    """The modules a node is in, the innermost last; not the model itself."""
    steps = parts(node.meta["path"])
    return (steps[:i] for i in range(1, len(steps) + 1))


class _Crossing:
    """One crossing value: its place, and its readers in the blocks."""

    def __init__(self, node: fx.Node, owners: Mapping[str, Owner], small: Mapping[tuple[str, ...], int]) -> None:
        self.node, self.producer, self.small = node, owners[node.name], small
        self.position = self.producer if isinstance(self.producer, int) else -1
        readers = [u for u in node.users if not is_size(u.meta.get("val"))]
        self.readers = [(c, u) for u in readers if isinstance(c := owners.get(u.name), int) and c != self.producer]
        self.readers.sort(key=lambda reader: reader[0])

    def kind_for(self, consumer: Owner) -> EdgeKind:
        if isinstance(consumer, str) or consumer == self.position + 1 or self._stays_inside(consumer):
            return "main"
        return "skip"

    def is_widely_read(self) -> bool:
        """In three distant places, or by three operations away from the first (two, for a component's value)."""
        places: list[int] = []
        for consumer, _ in self.readers:
            if not places or consumer > places[-1] + _PLACE:
                places.append(consumer)
        distant = [u for c, u in self.readers if c > places[0] + _PLACE and not self._stays_inside(c)]
        return len(places) >= _MANY_PLACES or len(distant) >= _MANY_READERS - isinstance(self.producer, str)

    def _stays_inside(self, consumer: int) -> bool:
        """Whether one small module has all readers up to this one, and begins with the value or next door."""
        users = [u for c, u in self.readers if c <= consumer]
        around = set(_modules(users[0])).intersection(*(_modules(u) for u in users[1:]))
        return isinstance(self.producer, int) and any(self.small.get(m, inf) <= self.position + 1 for m in around)


def _is_vector(node: fx.Node) -> bool:
    """Whether a sample's part of the value has one dimension, as an embedding of time or class has."""
    shape = node.meta["val"].shape
    return len([size for size in shape[1:] if size != 1]) <= 1
