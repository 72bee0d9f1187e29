"""Adopt: light frozen work at the end of a shared frozen value moves into the one block it serves.

    text ─ to_k (frozen) ─> attn of block 3           text ─> block 3: to_k, attn
         ─ to_k (frozen) ─> attn of block 5    ->          ─> block 5: to_k, attn

In a LoRA model every untouched projection of the text or the time embedding is frozen by dataflow; sent one by one they
are dozens of values in place of one. A frozen prefix, which leads into the first block from the inputs, stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from fxpipe.capture import Capture
from fxpipe.plan.block_graph import Block, is_size, tensor_bytes

_LIGHT = 0.25  # of the largest share of time a block may have


def adopt(
    capture: Capture,
    frozen: Sequence[str],
    blocks: Sequence[Block],
    node_seconds: Mapping[str, float],
    limit: float,
) -> tuple[tuple[str, ...], tuple[Block, ...]]:
    """The operations that stay frozen, and the blocks with those they adopted; `limit` is a block's largest time."""
    trace = [n for n in capture.graph.nodes if n.op == "call_function"]
    owner = {name: b.index for b in blocks for name in b.nodes}
    serves = _serves(trace, set(frozen), owner)
    for region in _regions(trace, serves):
        light = sum(node_seconds.get(n.name, 0.0) for n in region) <= _LIGHT * limit
        feeds = [a for n in region for a in n.all_input_nodes if a in serves and a not in region]
        (block,) = serves[region[0]]
        if light and (feeds or block > 0) and all(tensor_bytes(a.meta["val"]) for a in feeds):
            owner |= {n.name: block for n in region}
    members = {b.index: tuple(n.name for n in trace if owner.get(n.name) == b.index) for b in blocks}
    grown = tuple(b if len(members[b.index]) == len(b.nodes) else replace(b, nodes=members[b.index]) for b in blocks)
    return tuple(n for n in frozen if n not in owner), grown


def _serves(trace: Sequence[fx.Node], frozen: set[str], owner: Mapping[str, int]) -> dict[fx.Node, set[int]]:
    """For every frozen operation, the blocks that read it or what is made of it."""
    serves: dict[fx.Node, set[int]] = {}
    for node in reversed(trace):
        if node.name in frozen:
            users = [u for u in node.users if not is_size(u.meta.get("val"))]
            serves[node] = {owner[u.name] for u in users if u.name in owner}.union(*(serves.get(u, ()) for u in users))
    return serves


def _regions(trace: Sequence[fx.Node], serves: Mapping[fx.Node, set[int]]) -> Iterator[list[fx.Node]]:
    """Connected groups of operations that serve the same single block."""
    alone = [n for n in trace if len(serves.get(n, ())) == 1]
    left = set(alone)
    for seed in alone:
        if seed not in left:
            continue
        left.discard(seed)
        region = [seed]
        for node in region:
            near = [n for n in (*node.all_input_nodes, *node.users) if n in left and serves[n] == serves[seed]]
            left.difference_update(near)
            region += near
        yield region
