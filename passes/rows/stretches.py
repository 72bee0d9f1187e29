"""Stretches of the rows' dimension: joined, cut and written over, between parts.

text, image      --cat----->          [B, T + L, C]       whole T | rows W
[B, T + L, C]    --slice T:---->      [B, L, C]           rows W
[B, C, H, W]     --slice 0:H-1-->     [B, C, H - 1, W]    rows 1-1: the last unit is short
"""

import math

from passes.operations import dimension
from passes.rows.how import CutRows, Found, Joined, Same, Split, Written
from passes.rows.layout import NeedRows, NoRule, Part, Place, RowCall, Rows, RowUnits, Slot, shape_of
from passes.rows.rules import aligned


def cat(call: RowCall) -> Found:
    nodes = [node for node in call.operands.values() if shape_of(node) != (0,)]
    if len(nodes) != len(call.operands):
        raise NoRule("one of its operands is empty")
    dim = dimension(call.arguments["dim"], call.value.ndim)
    states = [call.rows(node) for node in nodes]
    if any(state is not None and state.dim != dim for state in states):
        place, wants = aligned(call, call.operands)
        return Found(place.at(place.dim + call.value.ndim), wants=wants)
    parts: list[Part] = []
    for node, state in zip(nodes, states, strict=True):
        parts += [Part("whole", shape_of(node)[dim])] if state is None else state.parts
    return Found(Rows.of(dim, parts), Joined())


def pieces(call: RowCall) -> Found:
    node, state = call.first()
    dim = dimension(call.arguments.get("dim", 0), len(shape_of(node)))
    if dim != state.dim:
        return Found(call.each(state))
    at, states = 0, list[Place]()
    for piece in call.node.meta["val"]:
        states.append(within(state, at, at + piece.shape[dim], call.units))
        at += piece.shape[dim]
    return Found(tuple(states), Split())


def cut(call: RowCall) -> Found:
    """`slice` and `narrow`."""
    node, state = call.first()
    size, a = shape_of(node), call.arguments
    if dimension(a["dim"], len(size)) != state.dim:
        return Found(state)
    if tuple(call.value.shape) == size:
        return Found(state, CutRows(0))
    if not call.value.shape[state.dim]:
        raise NoRule("it takes none of the rows")
    start, step = a.get("start") or 0, a.get("step", 1)
    start = max(0, start + size[state.dim]) if start < 0 else start
    if step != 1:
        return _strided(call, state, start, step)
    stop = start + call.value.shape[state.dim]
    return Found(within(state, start, stop, call.units), CutRows(start))


def _strided(call: RowCall, state: Rows, start: int, step: int) -> Found:
    part, size = state.plain, call.value.shape[state.dim]
    if part is None or start >= step:
        raise NoRule("it takes some of the rows")
    if part.inner % step:
        raise NeedRows(step // math.gcd(part.inner, step), f"slice of every {step}th row")
    inner = part.inner // step
    short = call.units.short(inner, size)
    if not 0 <= short < inner:
        raise NoRule("it takes some of the rows")
    changes = {"start": start, "end": None}
    return Found(Rows(state.dim, (Part("rows", inner, 1, short),)), Same(changes))


def within(state: Rows, start: int, stop: int, units: RowUnits) -> Place:
    """Entries [start, stop) of a dimension: None where none of them belongs to a row."""
    at, parts = 0, list[Part]()
    for part in state.parts:
        size = part.size(units.count)
        low, high = max(start - at, 0), min(stop - at, size)
        at += size
        if low >= high:
            continue
        if (low, high) != (0, size):
            part = _cut_part(part, low, high, size)
        parts.append(part)
    if all(part.kind == "whole" for part in parts):
        return None
    return Rows(state.dim, tuple(parts))


def _cut_part(part: Part, low: int, high: int, size: int) -> Part:
    if part.kind == "whole":
        return Part("whole", high - low)
    short = part.short + size - high
    if low or part.outer != 1 or short >= part.inner:
        raise NoRule("it takes some of the rows")
    return Part("rows", part.inner, 1, short)


def written(call: RowCall) -> Found:
    """`slice_scatter`, `select_scatter`: values written along a dimension that is not the rows', or over whole parts of
    it."""
    base, src = call.arguments["self"], call.arguments["src"]
    dim = call.arguments["dim"] % len(shape_of(base))
    gone = 0 if call.name == "slice_scatter" else 1
    places = set[Rows]()
    for node, less in ((base, 0), (src, gone)):
        state = call.rows(node)
        if state is not None:
            places.add(state.at(state.dim + (less and state.dim >= dim)))
    if (at := call.rows(base)) is not None and at.dim == dim:
        return _overwritten(call, at)
    if len(places) != 1:
        raise NoRule("its operands hold the rows in different places")
    (place,) = places
    if place.dim == dim:
        return _inserted(call, place)
    wants: dict[Slot, Place] = {}
    if call.rows(base) is None:
        wants["self", None] = place
    if call.rows(src) is None:
        wants["src", None] = place.at(place.dim - (gone and place.dim > dim))
    return Found(place, wants=wants)


def _inserted(call: RowCall, rows: Rows) -> Found:
    """`slice_scatter` of rows into what has none, as into zeros that a text is in: whole before and after them."""
    start = _start_of(call, rows.dim)
    base, src = (shape_of(call.arguments[name])[rows.dim] for name in ("self", "src"))
    before, after = ([Part("whole", size)][: bool(size)] for size in (start, base - start - src))
    place = Rows.of(rows.dim, (*before, *rows.parts, *after))
    return Found(place, Written(start), wants={("self", None): place})


def _start_of(call: RowCall, dim: int) -> int:
    """Where a `slice_scatter` writes, entry after entry."""
    if call.name != "slice_scatter" or call.arguments["step"] != 1:
        raise NoRule("it writes among the rows")
    start = call.arguments["start"] or 0
    return max(0, start + shape_of(call.arguments["self"])[dim]) if start < 0 else start


def _overwritten(call: RowCall, state: Rows) -> Found:
    """`slice_scatter` of whole parts."""
    src, start = call.arguments["src"], _start_of(call, state.dim)
    if call.rows(src) is None:
        raise NoRule("it writes among the rows")
    if within(state, start, start + shape_of(src)[state.dim], call.units) != call.rows(src):
        raise NoRule("it writes among the rows")
    return Found(state, Written(start))
