"""What a patch computes and tells in a step, read off its graph: what a layout's seconds and bytes are estimated from.

k = linear(h, w)                 Item(k, its seconds)
k_whole = gather(k)              Item(k, told: every patch's rows of k to every other)
o = attention(q, k_whole, v)     Item(o, its seconds, reads the gather)

All patches have the same exchanges, so what each tells of them follows from one patch's graph.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from fxpipe.plan import row_ops
from fxpipe.remembered import remembered
from passes.rows import RowPlan
from passes.sampling.attention import Shared
from passes.sampling.exchanges import Exchange
from passes.sampling.lives import Ints, Lives
from passes.sampling.messages import sent_by
from passes.sampling.patch_graph import PatchPiece, patch_graph
from passes.sampling.patches import Patch

SecondsOf = Callable[[fx.Graph], Mapping[fx.Node, float]]
SentBytes = tuple[tuple[int, int, int], ...]
"""Source patch, target patch, bytes."""
Tellers = Sequence[Sequence[Patch]]
"""Of every patch that tells others something what these have, itself in its place."""


@dataclass(frozen=True)
class Told:
    """One exchange: what is `sent`, bytes of this patch's own value or moments, and seconds to make of them what is
    read."""

    kind: str
    sent: SentBytes
    own_bytes: int
    seconds: float

    @cached_property
    def received_bytes(self) -> int:
        """By the patch that gets the most."""
        return received_bytes([self])


def received_bytes(told: Iterable[Told]) -> int:
    """Of some exchanges, by the patch that gets the most of all."""
    into = Counter[int]()
    for one in told:
        for _, dst, size in one.sent:
            into[dst] += size
    return max(into.values(), default=0)


class Item(NamedTuple):
    """An operation of the captured one's `name`, or what it tells; `reads` are the places of what was told before."""

    name: str
    seconds: float
    told: Told | None = None
    reads: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PatchWork:
    """All that one patch does, in order. `lives`: of the nodes of its graph; `sizes`: bytes of every node's value, and
    of what some hold `inside` while they run. `apart`: layers that other graphs do, and what these hold at once."""

    items: tuple[Item, ...]
    lives: Lives
    sizes: Mapping[fx.Node, int]
    inside: Mapping[fx.Node, int]
    apart: Mapping[str, int] = field(default_factory=dict)

    @property
    def owners(self) -> Mapping[fx.Node, str]:
        """The captured operation that every node stands for, or is written for."""
        return self.lives.owners

    def bytes_of(self, name: str) -> int:
        """Of a captured value as this patch has it; 0 where it has it not."""
        return self._bytes.get(name, 0)

    def places(self, names: Iterable[str]) -> list[int]:
        """Of the items of these operations, in order."""
        return sorted(place for name in names for place in self._places.get(name, ()))

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for place, item in enumerate(self.items):
            found.setdefault(item.name, []).append(place)
        return found

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """Of values; what it reads of another patch it has not."""
        return {node.name: size for node, size in self.sizes.items() if node.meta.get("kind") != "read"}

    @remembered
    def held_bytes(self, names: frozenset[str], *between: frozenset[str]) -> tuple[int, int]:
        """Of these operations alone: bytes of the model's tensors that they read, and the most that their results hold
        at once, what is gathered for them included; `between` steps and others' operations as for `Lives`."""
        return self.lives.held_bytes(names, self.sizes, self.apart, self.inside, *between)

    @remembered
    def levels(self, of_before: bool) -> Ints:
        """What results hold at every operation; `of_before`: where what is told is read a step later."""
        return self.lives.levels(self.sizes, self.apart, self.inside, of_before=of_before)


def patch_work(
    plan: RowPlan, patch: Patch, tellers: Tellers, shared: frozenset[str], seconds_of: SecondsOf,
    attended: Shared | None = None, piece: PatchPiece | None = None,
) -> PatchWork:  # fmt: skip
    """The work of a patch; its values of no row are `shared` where it alone owns them."""
    graph = patch_graph(plan, patch, piece, shared, attended)
    return graph_work(plan, graph, tellers, seconds_of(graph))


def graph_work(plan: RowPlan, graph: fx.Graph, tellers: Tellers, seconds: Mapping[fx.Node, float]) -> PatchWork:
    """What the graph of a patch does, whose operations take these seconds."""
    sizes, known = {node: value_bytes(node) for node in graph.nodes}, dict[object, SentBytes]()
    sent = partial(sent_of, tellers=tellers, known=known)
    lives = Lives(owners_of(graph, plan))
    return work_of(lives, sizes, inside_bytes(graph.nodes), seconds, sent, plan.sized.result.name)


def work_of(
    lives: Lives, sizes: Mapping[fx.Node, int], inside: Mapping[fx.Node, int], seconds: Mapping[fx.Node, float],
    sent: Callable[[fx.Node], SentBytes], result: str,
) -> PatchWork:  # fmt: skip
    """What a graph's operations do that take these seconds and bytes, where in every exchange so much is `sent`; those
    that take no time and read nothing of others are left out. `result` is made last."""
    owners, readers, places = lives.owners, lives.readers, dict[fx.Node, int]()
    unread: set[int] = set()
    items: list[Item] = []
    for node, name in owners.items():
        if "exchange" in node.meta:
            places[node] = len(items)
            unread.add(len(items))
            kind, (value,) = node.meta["exchange"].kind, node.all_input_nodes
            own = sizes[node if kind == "moments" else value]  # each patch tells as many moments as there are of all
            told = Told(kind, sent(node), own, seconds.get(node, 0.0))
            items.append(Item(name, 0.0, told))
            continue
        taken, reads = seconds.get(node, 0.0), tuple[int, ...]()
        if node in readers:
            reads = tuple(places[n] for n in node.all_input_nodes if n in places and places[n] in unread)
            unread.difference_update(reads)
        if taken or reads:
            items.append(Item(name, taken, None, reads))
    items.append(Item(result, 0.0, None, tuple(sorted(unread))))
    return PatchWork(tuple(items), lives, sizes, inside)


def owners_of(graph: fx.Graph, plan: RowPlan) -> dict[fx.Node, str]:
    """The captured operation that every node stands for, or is written for: before that, or last of all."""
    found: dict[fx.Node, str] = {}
    waiting: list[fx.Node] = []
    for node in (node for node in graph.nodes if node.op == "call_function"):
        waiting.append(node)
        if node.name in plan.sized.nodes:
            found |= dict.fromkeys(waiting, node.name)
            waiting = []
    return found | dict.fromkeys(waiting, plan.sized.result.name)


def with_layers(work: PatchWork, layers: Mapping[str, PatchWork]) -> PatchWork:
    """The same work, in which other graphs do these layers."""
    items: list[Item] = []
    places: list[int] = []  # of every item of before
    begun = set[str]()
    for item in work.items:
        if item.name not in layers:
            reads = tuple(places[read] for read in item.reads if items[places[read]].told)
            items.append(item._replace(reads=reads))
        elif item.name not in begun:
            first = len(items)
            for one in layers[item.name].items:
                items.append(one._replace(name=item.name, reads=tuple(first + read for read in one.reads)))
            begun.add(item.name)
        places.append(len(items) - 1)
    apart = {name: one.held_bytes(frozenset(one.owners.values()))[1] for name, one in layers.items()}
    return PatchWork(tuple(items), work.lives, work.sizes, work.inside, apart)


def value_bytes(node: fx.Node) -> int:
    """Of a node's value, or of all where it has several."""
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else [value]
    return sum(item.nbytes for item in items if isinstance(item, torch.Tensor))


def inside_bytes(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """What operations hold while they run, beside operands and result: attention that no kernel computes at once has
    its scores, and their softmax."""
    found = {}
    for node in nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            query, key, value = (operand.meta["val"] for operand in node.args[:3])  # type: ignore[union-attr]
            if not row_ops.is_fused(query, key, value, bool(node.kwargs.get("enable_gqa"))):
                out = node.meta["val"]
                found[node] = 2 * prod(out.shape[:-1]) * key.shape[-2] * out.itemsize
    return found


def sent_of(node: fx.Node, tellers: Tellers, known: dict[object, SentBytes]) -> SentBytes:
    """What patches tell each other in an exchange."""
    exchange: Exchange = node.meta["exchange"]
    size = node.meta["val"].dtype.itemsize
    shapes = tuple(exchange.value.meta["val"].shape), tuple(node.meta["val"].shape)
    key = exchange.kind, exchange.state, *shapes, node.target, node.args[1:], size
    if key not in known:
        known[key] = tuple(
            (index, dst, prod(shape) * size)
            for index, patches in enumerate(tellers)
            for dst, shape in sent_by(node, patches[index], patches).items()
            if prod(shape)
        )
    return known[key]
