"""What operations do with rows: those that leave them where they are, and reductions.

x [B, C, H, W] + pos [1, 1, H, W]      pos has no rows: it is cut to the patch
layer_norm(x [B, rows, C])             along the last dimension alone: as it is
x.mean([2, 3])                         each patch's sum, added up
x.softmax(2)                           along the rows: no rule, the operand is gathered
"""

from collections.abc import Callable, Iterable

from passes.operations import acted_dims
from passes.rows.how import Found, Moments, PatchHow, Same, Summed
from passes.rows.layout import NoRule, Place, RowCall, Rows, Slot, shape_of

Rule = Callable[[RowCall], Found]


def aligned(call: RowCall, slots: Iterable[Slot]) -> tuple[Rows, dict[Slot, Place]]:
    """The rows, counted from the end (negative dim), of operands combined elementwise; how those without are cut."""
    operands = {slot: call.operands[slot] for slot in slots}
    places = {s.at(s.dim - len(shape_of(n))) for n in operands.values() if (s := call.rows(n)) is not None}
    if len(places) != 1:
        raise NoRule("its operands hold the rows in different places")
    (place,) = places
    wants: dict[Slot, Place] = {}
    for slot, node in operands.items():
        dim = place.dim + len(shape_of(node))
        if call.rows(node) is None and dim >= 0 and shape_of(node)[dim] != 1:
            if shape_of(node)[dim] != place.size(call.units.count):
                raise NoRule("an operand without rows has another size there")
            wants[slot] = place.at(dim)
    return place, wants


def pointwise(call: RowCall) -> Found:
    place, wants = aligned(call, call.operands)
    return Found(call.each(place.at(place.dim + call.value.ndim)), wants=wants)


def cast(call: RowCall) -> Found:
    """Another type or device; a second operand only names the type."""
    return Found(call.rows(next(iter(call.operands.values()))))


def trailing(count: Callable[[RowCall], int]) -> Rule:
    """An operation on the last `count` dimensions of its first operand."""

    def rule(call: RowCall) -> Found:
        node, state = call.first()
        if state.dim >= len(shape_of(node)) - count(call):
            raise NoRule("it acts along the rows")
        return Found(call.each(state))

    return rule


def along(call: RowCall) -> Found:
    """An operation along the dimensions it names."""
    node, ndim = next(iter(call.operands.values())), call.value.ndim
    before = len(shape_of(node))
    place, wants = aligned(call, call.operands)
    dim, acted = place.dim + before, acted_dims(call.arguments, before)
    if dim in acted:
        raise NoRule("it acts along the rows")
    if ndim not in (before, before + 1, before - len(acted)):
        raise NoRule("it moves the rows")
    gone = sum(other < dim for other in acted) if ndim < before else 0
    return Found(call.each(place.at(dim - gone)), wants=wants)


def reduction(call: RowCall) -> Found:
    """`sum` and `mean`."""
    node, state = call.first()
    if state.dim not in acted_dims(call.arguments, len(shape_of(node))):
        return along(call)
    if not state.all_rows:
        raise NoRule("it adds up text and rows")
    return Found(None, Summed(mean=call.name == "mean"))


def norm(call: RowCall) -> Found:
    """Norms of vectors; over the rows, powers are added up."""
    node, state = call.first()
    a = call.arguments
    order = a.get("ord", a.get("p"))
    if state.dim not in acted_dims(a, len(shape_of(node))):
        return along(call)
    if not state.all_rows or not isinstance(order, int | float) or not 0 < order < float("inf") or a.get("dtype"):
        raise NoRule("it acts along the rows")
    return Found(None, Summed(power=order))


def group_norm(call: RowCall) -> Found:
    return _normalised(call, Moments(call.arguments["num_groups"]))


def instance_norm(call: RowCall) -> Found:
    own = call.arguments["use_input_stats"]
    return _normalised(call, Moments(call.value.shape[1]) if own else Same())


def batch_norm(call: RowCall) -> Found:
    if call.arguments["training"]:
        raise NoRule("it takes statistics of the batch")
    return _normalised(call, Same())


def _normalised(call: RowCall, how: PatchHow) -> Found:
    _, state = call.first()
    if state.dim == 0:  # rows are samples of it
        return Found(state)
    if state.dim == 1 or not state.all_rows:
        raise NoRule("its channels are rows, or there is text among the rows")
    return Found(state, how)


def factory(call: RowCall) -> Found:
    """Constants of a size; the operand only names the type."""
    return Found(None)


def embedding(call: RowCall) -> Found:
    indices = call.arguments["indices"]
    if list(call.live) != [("indices", None)]:
        raise NoRule("its table has rows")
    return Found(call.rows(indices))


def stack(call: RowCall) -> Found:
    place, wants = aligned(call, call.operands)
    ndim = call.value.ndim
    new, dim = call.arguments["dim"] % ndim, place.dim + ndim - 1
    return Found(place.at(dim + (dim >= new)), wants=wants)
