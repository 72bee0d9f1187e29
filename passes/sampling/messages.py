"""The messages of a step: what every patch sends to every other, exchange by exchange.

halo       to the patch above its first `below` rows, to the one below its last `above`
gather     to everyone what of the value belongs to rows: the rest is there already
moments    to everyone mean and variance of its own entries, in float32 or wider
sum        to everyone its part
"""

from collections.abc import Sequence
from typing import cast

from torch import fx

from fxpipe.plan.rank_program import Message
from passes.rows.layout import shape_of
from passes.sampling.exchanges import Exchange
from passes.sampling.patches import Patch

Shapes = dict[int, tuple[int, ...]]


def exchange_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if "exchange" in node.meta]


def messages_of(patches: Sequence[Patch], graphs: Sequence[fx.Graph]) -> list[Message]:
    """What every rank sends to every other, exchange by exchange."""
    messages: list[Message] = []
    for nodes in zip(*map(exchange_nodes, graphs), strict=True):
        exchange: Exchange = nodes[0].meta["exchange"]
        assert {node.meta["exchange"].name for node in nodes} == {exchange.name}
        for source, node in zip(patches, nodes, strict=True):
            for dst, shape in _sent(node, source, len(patches)).items():
                dtype = node.meta["val"].dtype
                args = (len(messages), source.index, dst, None, exchange.name, -1, exchange.kind, shape, dtype)
                messages.append(Message(*args))
    return messages


def _sent(node: fx.Node, source: Patch, num_patches: int) -> Shapes:
    """The shapes of what a patch sends in one exchange, by receiver."""
    exchange: Exchange = node.meta["exchange"]
    if exchange.kind == "halo":
        above, below = cast(tuple[int, int], node.args[2:4])
        rows = {source.index - 1: below, source.index + 1: above}
        return {dst: _with(exchange, n) for dst, n in rows.items() if n and 0 <= dst < num_patches}
    shape = tuple(node.meta["val"].shape)
    if exchange.kind in ("gather", "prediction"):
        assert exchange.state is not None
        shape = _with(exchange, source.num_rows(exchange.state))
    return {dst: shape for dst in range(num_patches) if dst != source.index}


def _with(exchange: Exchange, num_rows: int) -> tuple[int, ...]:
    """The shape of the exchanged value with so many entries in its rows' dimension."""
    assert exchange.state is not None
    shape = list(shape_of(exchange.value))
    shape[exchange.state.dim] = num_rows
    return tuple(shape)
