"""Attention over rows without all keys and values on every rank: heads shared over ranks, or chunks passed around.

gather     k_whole = gather(k); v_whole = gather(v)                    o = attention(q, k_whole, v_whole)

ulysses    q_h = to_heads(q); k_h = to_heads(k); v_h = to_heads(v)     each rank some heads of all rows
           o_h = attention(q_h, k_h, v_h); o = to_rows(o_h)            (Jacobs et al., "DeepSpeed Ulysses", 2023)

ring       pair_1 = passed_on(stack(k, v))                             on its way while the own chunk is attended to
           o_0, s_0 = attend(q, k, v)
           k_1, v_1 = pair_1; pair_2 = passed_on(pair_1)               (Liu et al., "Ring Attention", 2023)
           o_1, s_1 = attend(q, k_1, v_1);  join_chunks(o_0, s_0, o_1, s_1); ...

All are exact. Bytes that come to one of N ranks, of L rows of C channels: gather and ring 2 (N-1)/N L C, ulysses
4 (N-1)/N^2 L C.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.plan import row_ops
from fxpipe.plan.sample_plan import AttentionKind
from passes.operations import bound_arguments
from passes.rows import RowPlan
from passes.rows.how import Attended
from passes.rows.layout import Rows, shape_of
from passes.sampling import exchanges
from passes.sampling.exchanges import Exchange
from passes.sampling.patch_writer import PatchWriter, meta
from passes.sampling.patches import Patch, all_own, even_bounds

aten = torch.ops.aten


@dataclass(frozen=True)
class Shared:
    """How patches share the work of attention: the kind of every layer that does not gather, by its node's name."""

    kinds: Mapping[str, AttentionKind]
    patches: Sequence[Patch]

    @staticmethod
    def of(plan: RowPlan, patches: Sequence[Patch], kinds: Sequence[AttentionKind]) -> "Shared | None":
        """`kinds` in the order of `layers`; None where all gather."""
        named = {node.name: kind for node, kind in zip(layers(plan), kinds, strict=False) if kind != "gather"}
        return Shared(named, patches) if named else None


def layers(plan: RowPlan) -> list[fx.Node]:
    """Attention to keys and values that have rows, in order."""
    return [plan.sized.nodes[name] for name, found in plan.found.items() if isinstance(found.how, Attended)]


def alike(plan: RowPlan, node: fx.Node) -> object:
    """The same of layers that do the same."""
    a = bound_arguments(node)
    return plan.kinds[node.name], len({a["query"], a["key"], a["value"]})


def why_not(plan: RowPlan, node: fx.Node, kind: AttentionKind, patches: Sequence[Patch]) -> str | None:
    """Why a layer cannot be of this kind, None where it can."""
    if kind == "gather":
        return None
    a = bound_arguments(node)
    query, key, value = (a[name] for name in ("query", "key", "value"))
    states = [plan.state(operand) for operand in (query, key, value)]
    shapes = [shape_of(operand) for operand in (query, key, value)]
    if a["dropout_p"] or len(shapes[0]) < 3 or len({(len(shape), shape[:-3]) for shape in shapes}) > 1:
        return "it is no plain attention of heads"
    if not all(isinstance(state, Rows) and state.dim == len(shapes[0]) - 2 for state in states):
        return "not all of queries, keys and values have rows"
    if states[1] != states[2] or shapes[1][-3] != shapes[2][-3] or shapes[0][-3] % shapes[1][-3]:
        return "its keys and values have other rows, or other heads"
    return (_no_heads if kind == "ulysses" else _no_ring)(plan, a, patches)


def _no_heads(plan: RowPlan, a: Mapping[str, Any], patches: Sequence[Patch]) -> str | None:
    if shape_of(a["key"])[-3] < len(patches):
        return f"{len(patches)} patches cannot share {shape_of(a['key'])[-3]} heads"
    if a["attn_mask"] is not None and plan.state(a["attn_mask"]) is not None:
        return "its mask has rows"
    return None


def _no_ring(plan: RowPlan, a: Mapping[str, Any], patches: Sequence[Patch]) -> str | None:
    if a["attn_mask"] is not None:
        return "it has a mask"
    if not plan.rows(a["key"]).all_rows and all_own(patches):
        return "what belongs to no row would be rounded differently by every patch"
    return "its values are wider than its keys" if shape_of(a["key"]) != shape_of(a["value"]) else None


def with_most_heads(node: fx.Node, num_patches: int) -> int:
    """The patch that all others wait for where they share the heads of this layer."""
    bounds = even_bounds(shape_of(bound_arguments(node)["key"])[-3], num_patches)
    return max(range(num_patches), key=lambda patch: bounds[patch + 1] - bounds[patch])


def by_heads(writer: PatchWriter, node: fx.Node, shared: Shared) -> None:
    """Each patch attends with its heads to all rows."""
    a, dim = bound_arguments(node), len(shape_of(node)) - 3
    keys = shape_of(a["key"])[-3]
    times = shape_of(node)[dim] // keys
    of_keys = even_bounds(keys, len(shared.patches))
    of_queries = tuple(times * bound for bound in of_keys)
    for name, bounds in (("query", of_queries), ("key", of_keys), ("value", of_keys)):
        a[name] = _heads(writer, a[name], dim, bounds)
    start, stop = of_queries[writer.patch.index : writer.patch.index + 2]
    if a["attn_mask"] is not None:
        mask, a["attn_mask"] = a["attn_mask"], writer.wanted(a["attn_mask"], None)
        place = len(shape_of(mask)) - 3
        if place >= 0 and shape_of(mask)[place] > 1:
            shape = [*shape_of(mask)[:place], stop - start, *shape_of(mask)[place + 1 :]]
            args = a["attn_mask"], place, start, stop - start
            a["attn_mask"] = writer.add(mask, aten.narrow.default, args, f"of_{node.name}", shape)
    shape = [*shape_of(node)[:dim], stop - start, *shape_of(node)[dim + 1 :]]
    made = writer.add(node, node.target, a, "heads", shape)
    rows = writer.emit(node, exchanges.to_rows, (made, dim, of_queries))
    rows.meta["exchange"] = Exchange(f"{node.name}_heads", "ulysses", node, writer.plan.rows(node))


def _heads(writer: PatchWriter, value: fx.Node, dim: int, bounds: tuple[int, ...]) -> fx.Node:
    """All rows of this patch's heads, once for all layers that read them."""
    if value not in writer.heads:
        shape, index = list(shape_of(value)), writer.patch.index
        shape[dim] = bounds[index + 1] - bounds[index]
        made = writer.add(value, exchanges.to_heads, (writer.here[value], dim, bounds), "heads", shape)
        made.meta["exchange"] = Exchange(value.name, "ulysses", value, writer.plan.rows(value))
        writer.heads[value] = made
    return writer.heads[value]


def in_ring(writer: PatchWriter, node: fx.Node, shared: Shared) -> None:
    """Each patch attends with its queries to one chunk of the keys after the other, its own first."""
    a, patches, mine = bound_arguments(node), shared.patches, writer.patch.index
    state, dtype = writer.plan.rows(a["key"]), node.meta["val"].dtype
    query, key, value = (writer.here[a[name]] for name in ("query", "key", "value"))
    wide = torch.promote_types(dtype, torch.float32)
    out, sums = (meta(query.meta["val"].shape, dtype), meta(query.meta["val"].shape[:-1], wide))
    pair = writer.add(node, aten.stack.default, ([key, value],), "pair", (2, *key.meta["val"].shape))
    so_far: list[fx.Node] = []
    for hop in range(len(patches)):
        of = patches[(mine - hop) % len(patches)].index
        if hop:
            shape = pair.meta["val"].shape[1:]
            key = writer.add(node, aten.select.int, (pair, 0, 0), f"key_of_{of}", shape)
            value = writer.add(node, aten.select.int, (pair, 0, 1), f"value_of_{of}", shape)
        if hop + 1 < len(patches):
            before = patches[(mine - hop - 1) % len(patches)]
            shape = (2, *before.shape(a["key"], state))
            pair = writer.add(node, exchanges.passed_on, (pair, hop), f"pair_of_{before.index}", shape)
            pair.meta["exchange"] = Exchange(f"{node.name}_{hop}", "ring", a["key"], state)
        found = writer.several(node, row_ops.attend, (query, key, value, a["scale"]), f"to_{of}", [out, sums])
        if hop:
            both = [meta(out.shape, wide), sums]
            found = writer.several(node, row_ops.join_chunks, (*so_far, *found), f"with_{of}", both)
        so_far = found
    writer.emit(node, aten.to.dtype, (so_far[0], dtype))


WAYS: Mapping[str, Callable[[PatchWriter, fx.Node, Shared], None]] = {"ulysses": by_heads, "ring": in_ring}
