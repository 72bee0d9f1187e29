"""Line: the backbone's operations in one order, each far-away result computed where it is read.

    zero0 zero1 zero2 .. mid .. up0(zero2) up1(zero1)      ->      .. mid .. zero2 up0 zero1 up1

Trace order, except for an operation whose one reader is more than a block away: it moves there when what it reads is no
more bytes to keep alive than what it makes. So a ControlNet's residuals go to the decoder block they serve, and weights
made ready in advance to their use. Values with several readers (time embedding, text) stay where they are.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import Any

from torch import fx

from fxpipe.capture import Capture
from fxpipe.plan.block_graph import is_size, tensor_bytes

BytesOf = Callable[[Any], tuple[int, bool] | None]
"""Of a value, as `tensor_bytes`: None for what cannot cross."""


def line(
    capture: Capture, backbone: Collection[str], node_seconds: Mapping[str, float], far_seconds: float,
    bytes_of: BytesOf = tensor_bytes,
) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:  # fmt: skip
    """The backbone in a topological order, and to every moved operation the unmoved one that it now precedes.

    `far_seconds` of work between a result and its reader are worth a move.
    """
    wanted = set(backbone)
    nodes = [n for n in capture.graph.nodes if n.name in wanted]
    clock = list(accumulate((node_seconds.get(n.name, 0.0) for n in nodes), initial=0.0))
    place = {n: i for i, n in enumerate(nodes)}
    moved: dict[fx.Node, fx.Node] = {}
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        readers = [u for u in node.users if u in place]
        if len(readers) == 1 and clock[place[readers[0]]] - clock[i + 1] > far_seconds:
            if _worth_moving(node, place[readers[0]], place, bytes_of):
                place[node] = place[readers[0]]
                moved[node] = moved.get(readers[0], readers[0])
    index = {n: i for i, n in enumerate(nodes)}
    return sorted(nodes, key=lambda n: (place[n], index[n])), moved


def _worth_moving(node: fx.Node, goal: int, place: Mapping[fx.Node, int], bytes_of: BytesOf) -> bool:
    """Whether keeping what `node` reads alive until `goal` costs no more bytes than keeping its result alive.

    Values without a batch, made of weights, are free: they can be made later themselves.
    """
    made = bytes_of(node.meta["val"])
    if made is None:
        return False
    kept = 0
    for source in node.all_input_nodes:
        if source not in place or is_size(source.meta["val"]):
            continue
        size = bytes_of(source.meta["val"])
        if size is None:
            return False
        last = max((place[u] for u in source.users if u in place and u is not node), default=-1)
        if size[1] and last < goal:
            kept += size[0]
    return kept <= made[0]
