"""Products and attention: which operand keeps its rows, which is gathered, what is added up over patches.

rows n          q [rows, d] @ k^T [d, rows]     q keeps its rows, k is gathered
rows k          k^T [d, rows] @ v [rows, d]     both have them where the product sums: each patch's part, added up
rows lead       [rows, T, d] @ [rows, d, T]     each row has a product of its own: as it is
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.operations import einsum_labels, matrix_labels
from passes.rows.how import Attended, Found, Same, Summed
from passes.rows.layout import NoRule, Place, RowCall, Slot, shape_of
from passes.rows.rules import aligned

Term = tuple[Slot, fx.Node, list[Any]]


def contract(call: RowCall, terms: Sequence[Term], out: Sequence[Any]) -> Found:
    """A product that sums over the labels not in `out`."""
    labels = {slot: of[state.dim] for slot, node, of in terms if (state := call.rows(node)) is not None}
    kept = [label for label in dict.fromkeys(labels.values()) if label in out]
    label = kept[0] if kept else next(iter(labels.values()))
    holders = {s.parts for slot, node, _ in terms if labels.get(slot) == label and (s := call.rows(node)) is not None}
    if len(holders) != 1:
        raise NoRule("its operands hold the rows in different places")
    parts = next(iter(holders))
    wants: dict[Slot, Place] = {}
    for slot, node, of in terms:
        dim = of.index(label) if label in of else None
        if dim is not None and labels.get(slot) != label:
            if slot in labels:
                raise NoRule("its operands hold the rows in different places")
            state = next(s for k, n, _ in terms if labels.get(k) == label and (s := call.rows(n)) is not None)
            if shape_of(node)[dim] != 1:
                if shape_of(node)[dim] != state.size(call.units.count):
                    raise NoRule("an operand without rows has another size there")
                wants[slot] = state.at(dim)
        elif slot in labels and labels[slot] != label:
            wants[slot] = None
    if label in out:
        state = next(s for k, n, _ in terms if labels.get(k) == label and (s := call.rows(n)) is not None)
        return Found(state.at(list(out).index(label)), wants=wants)
    if not all(part.kind == "rows" for part in parts):
        raise NoRule("it adds up text and rows")
    return Found(None, Summed(), wants)


def matmul(call: RowCall) -> Found:
    """Matrix products; of `addmm` and its like the first operand is added."""
    *bias, (slot_a, a), (slot_b, b) = call.operands.items()
    first, second, out = matrix_labels(len(shape_of(a)), len(shape_of(b)))
    if not any(call.rows(node) for node in (a, b)):
        raise NoRule("rows only in what is added")
    found = contract(call, [(slot_a, a, first), (slot_b, b, second)], out)
    if not bias:
        return found
    ((slot, added),) = bias
    if found.state is None or isinstance(found.state, tuple):
        raise NoRule("it adds to a sum over rows")
    place, dim = call.rows(added), found.state.dim - len(out) + len(shape_of(added))
    wants = dict(found.wants)
    if place is None and dim >= 0 and shape_of(added)[dim] != 1:
        wants[slot] = found.state.at(dim)
    elif place is not None and place != found.state.at(dim):
        raise NoRule("its operands hold the rows in different places")
    return Found(found.state, wants=wants)


def einsum(call: RowCall) -> Found:
    slots = list(call.operands.items())
    labels, out = einsum_labels(call.arguments["equation"], [len(shape_of(node)) for _, node in slots])
    if any(len(set(of)) != len(of) for of in labels):
        raise NoRule("it takes a diagonal")
    return contract(call, [(slot, node, of) for (slot, node), of in zip(slots, labels, strict=True)], out)


def attention(call: RowCall) -> Found:
    """Queries keep their rows, keys and values are gathered; a mask is cut on its query axis."""
    a, slots = call.arguments, call.operands
    query, key, value, mask = ((name, None) for name in ("query", "key", "value", "attn_mask"))
    lead = [s for s in (query, key, value) if (at := call.rows(slots[s])) and at.dim < len(shape_of(slots[s])) - 2]
    if lead:
        if len({shape_of(slots[s])[:-2] for s in (query, key, value)}) != 1:
            raise NoRule("rows among heads that are shared")
        place, wants = aligned(call, slots)
        return Found(place.at(place.dim + call.value.ndim), wants=wants)
    queries, ndim = call.rows(slots[query]), call.value.ndim
    if (queries is not None and queries.dim != ndim - 2) or any(_in_width(call, s) for s in (key, value)):
        raise NoRule("its rows are no tokens")
    if a.get("is_causal"):
        raise NoRule("causal, over rows")
    wants = {slot: None for slot in (key, value) if call.rows(slots[slot]) is not None}
    if mask in slots:
        wants |= _mask(call, slots[mask], mask)
    return Found(queries, Attended() if wants.keys() & {key, value} else Same(), wants)


def _in_width(call: RowCall, slot: Slot) -> bool:
    node = call.operands[slot]
    state = call.rows(node)
    return state is not None and state.dim == len(shape_of(node)) - 1


def _mask(call: RowCall, node: fx.Node, slot: Slot) -> dict[Slot, Place]:
    """How a mask [..., queries, keys] is wanted."""
    queries, state, dim = call.rows(call.arguments["query"]), call.rows(node), len(shape_of(node)) - 2
    if queries is None or dim < 0 or shape_of(node)[dim] == 1:
        return {} if state is None else {slot: None}
    wanted = queries.at(dim)
    if state not in (None, wanted):
        raise NoRule("its mask has the rows elsewhere")
    return {} if state == wanted else {slot: wanted}
