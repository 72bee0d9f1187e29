"""The messages of a step: what every patch sends to every other, exchange by exchange.

halo       to the patch below its last rows, to the one above its first; to further ones where patches are small
gather     to everyone what of the value belongs to rows: the rest is there already, or comes from its owner
prediction likewise; what belongs to no row is the first patch's, so that all patches predict the same
ulysses    to everyone its heads of one's rows, or its rows of one's heads
ring       to the next patch the chunk that came from the one before
moments    to everyone mean and variance of its own entries, in float32 or wider
sum        to everyone its part
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import cast

import torch
from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan.rank_program import Message
from passes.rows.layout import shape_of
from passes.sampling import exchanges
from passes.sampling.exchanges import Exchange
from passes.sampling.patches import Patch, first_owns, neighbours

Shapes = dict[int, tuple[int, ...]]
Placed = list[tuple[Message, Message]]
"""Messages between patches, each with that between ranks."""


def exchange_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if "exchange" in node.meta]


def exchanges_of(graphs: Collection[fx.Graph]) -> list[tuple[fx.Node, ...]]:
    """Every exchange, as the nodes of all these patches' graphs.

    Raises:
        CompileError: the patches do not exchange the same in the same order.
    """
    found = list[tuple[fx.Node, ...]]()
    for nodes in zip_longest(*map(exchange_nodes, graphs)):
        names = dict.fromkeys("nothing more" if node is None else node.meta["exchange"].name for node in nodes)
        if len(names) > 1:
            raise CompileError(
                f"patches exchange {' and '.join(names)} at the same place, all must exchange the same; make a plan "
                "with text='all' or other patches"
            )
        found.append(nodes)
    return found


def messages_of(patches: Sequence[Patch], graphs: Collection[fx.Graph]) -> list[Message]:
    """What every rank sends to every other, exchange by exchange: told by the graph of any patch, or of several.

    Raises:
        CompileError: these patches do not exchange the same in the same order.
    """
    messages: list[Message] = []
    for node, *_ in exchanges_of(graphs):
        exchange: Exchange = node.meta["exchange"]
        for source in patches:
            for dst, shape in sent_by(node, source, patches).items():
                dtype = node.meta["val"].dtype
                args = (len(messages), source.index, dst, None, exchange.name, -1, exchange.kind, shape, dtype)
                messages.append(Message(*args))
    return messages


class PlannedMessages:
    """Messages between ranks as they are planned, in the order of every channel."""

    def __init__(self) -> None:
        self.all: list[Message] = []

    def add(self, src: int, dst: int, value: str, turn: int, kind: str, like: torch.Tensor | Message) -> Message:
        self.all.append(Message(len(self.all), src, dst, None, value, turn, kind, tuple(like.shape), like.dtype))
        return self.all[-1]

    def placed(self, messages: Iterable[Message], turn: int, ranks: Sequence[int], count: int = 1) -> Placed:
        """Of messages between patches, `count` on each of these ranks, those between ranks; what all of a rank's
        patches read goes there once."""
        found = []
        for told in messages:
            src, dst = ranks[told.src // count], ranks[told.dst // count]
            if src != dst and (told.kind == "halo" or told.dst % count == told.src % count):
                found.append((told, self.add(src, dst, told.value, turn, told.kind, told)))
        return found


def sent_by(node: fx.Node, source: Patch, patches: Sequence[Patch]) -> Shapes:
    """The shapes of what a patch sends in one exchange, of which `node` is any patch's, by receiver."""
    exchange: Exchange = node.meta["exchange"]
    if exchange.kind == "prediction":
        patches = first_owns(patches)
        source = patches[source.index]
    if exchange.kind == "halo":
        read = {patch.index: halo_of(node, patch, [source]).get(source.index) for patch in patches}
        return {dst: _with(exchange, rows[1]) for dst, rows in read.items() if rows is not None}
    if exchange.kind == "ring":
        count = len(patches)
        chunk, target = patches[(source.index - cast(int, node.args[1])) % count], patches[(source.index + 1) % count]
        return {target.index: (2, *_with(exchange, _rows_told(exchange, chunk, target)))}
    if exchange.kind == "ulysses":
        return {patch.index: _for_heads(node, source, patch) for patch in patches if patch != source}
    others = [patch for patch in patches if patch != source]
    told = dict[bool, tuple[int, ...]]()  # by whether the other has what belongs to no row
    for patch in others:
        if patch.owns not in told and exchange.kind in ("gather", "prediction"):
            told[patch.owns] = _with(exchange, _rows_told(exchange, source, patch))
        elif patch.owns not in told:
            told[patch.owns] = tuple(node.meta["val"].shape)
    return {patch.index: told[patch.owns] for patch in others}


def halo_of(node: fx.Node, patch: Patch, patches: Sequence[Patch]) -> dict[int, tuple[int, int]]:
    """What a patch reads of others in a halo: (from which of its rows on, how many), by their number."""
    exchange: Exchange = node.meta["exchange"]
    above, below = cast(tuple[int, int], node.args[2:4])
    return neighbours(patches, patch, exchange.rows, above, below)


def _rows_told(exchange: Exchange, source: Patch, target: Patch) -> int:
    """Entries of a patch that another one does not have."""
    return source.num_rows(exchange.rows) if target.owns else source.size(exchange.rows)


def _for_heads(node: fx.Node, source: Patch, target: Patch) -> tuple[int, ...]:
    """Of rows that become heads the target's heads, of heads that become rows its rows."""
    exchange: Exchange = node.meta["exchange"]
    dim, bounds = cast(tuple[int, Sequence[int]], node.args[1:3])
    if node.target is exchanges.to_heads:
        shape, index = [*_with(exchange, _rows_told(exchange, source, target))], target.index
    else:
        shape, index = [*_with(exchange, target.size(exchange.rows))], source.index
    shape[dim] = bounds[index + 1] - bounds[index]
    return tuple(shape)


def _with(exchange: Exchange, num_rows: int) -> tuple[int, ...]:
    """The shape of the exchanged value with so many entries in its rows' dimension."""
    shape = list(shape_of(exchange.value))
    shape[exchange.rows.dim] = num_rows
    return tuple(shape)
