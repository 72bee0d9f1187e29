"""What views do with rows.

[B, C, H, W]    --view-->    [B, C, H*W]              rows 1     ->  rows W: the entries before and after must match
[B, H*W, C]     --view-->    [B, H, W, C]             rows W     ->  rows 1
[B, C, H, W]    --view-->    [B, C, H/2, 2, W]        rows 1     ->  units of 2 rows are needed; then rows 2 -> rows 1
[B, rows, C]    --repeat->   [B, 2*rows, C]           rows 1     ->  2 x rows 1
"""

import math
from collections.abc import Iterator

import torch

from passes.operations import dimension
from passes.rows.how import Found, Shaped
from passes.rows.layout import NeedRows, NoRule, Part, RowCall, Rows, RowUnits, shape_of

aten = torch.ops.aten


def view(call: RowCall) -> Found:
    """Any change of shape that keeps the entries' order."""
    node = next(iter(call.operands.values()))
    state, old, new = call.rows(node), shape_of(node), tuple(call.value.shape)
    if state is None:
        return Found(None, Shaped(aten.reshape.default))
    if call.arguments.get("dtype") is not None and old != new:
        raise NoRule("it reads the memory as another type")
    return Found(_viewed(state, old, new, call.units), Shaped(aten.reshape.default))


def _viewed(state: Rows, old: tuple[int, ...], new: tuple[int, ...], units: RowUnits) -> Rows:
    before, after = math.prod(old[: state.dim]), math.prod(old[state.dim + 1 :])
    for dim, size in enumerate(new):
        each, rest = divmod(size, old[state.dim])
        if each and not rest and math.prod(new[:dim]) == before and each * math.prod(new[dim + 1 :]) == after:
            return state.at(dim) if each == 1 else Rows(dim, tuple(part.times(each) for part in state.parts))
    part = state.single
    if part is None:
        raise NoRule(f"{list(old)} -> {list(new)} takes text and rows apart")
    found = next(_splits(part, before, after, new, units), None)
    if found is not None:
        return found
    # A unit of more rows may end where a dimension of the new shape does.
    times = [
        math.prod(new[dim + 1 :]) // math.gcd(part.inner * after, math.prod(new[dim + 1 :])) for dim in range(len(new))
    ]
    for factor in sorted({t for t in times if t > 1}):
        larger = RowUnits(units.rows, units.each * factor)
        size = part.size(units.count) // part.outer
        coarse = Part("rows", part.inner * factor, part.outer, larger.short(part.inner * factor, size))
        if larger.count > 1 and 0 <= coarse.short < coarse.inner and any(_splits(coarse, before, after, new, larger)):
            raise NeedRows(factor, f"view {list(old)} -> {list(new)}")
    raise NoRule(f"{list(old)} -> {list(new)} leaves no dimension to the rows")


def _splits(part: Part, before: int, after: int, new: tuple[int, ...], units: RowUnits) -> Iterator[Rows]:
    """Dimensions of the new shape in which every unit is a run of whole entries."""
    lead, tail = before * part.outer, part.inner * after
    for dim, size in enumerate(new):
        first, last = math.prod(new[:dim]), math.prod(new[dim + 1 :])
        if size > 1 and lead % first == 0 and tail % last == 0 and part.short * after % last == 0:
            split = Part("rows", tail // last, lead // first, part.short * after // last)
            if split.size(units.count) == size:
                yield Rows(dim, (split,))


def permuted(call: RowCall) -> Found:
    """Permutations of dimensions, found by doing them to a shape whose strides tell its dimensions apart."""
    node, state = call.first()
    probe = torch.empty([2] * len(shape_of(node)), device="meta")
    arguments = [probe if value is node else value for value in call.arguments.values()]
    order = [probe.stride().index(stride) for stride in call.node.target(*arguments).stride()]  # type: ignore[operator]
    return Found(state.at(order.index(state.dim)))


def expanded(call: RowCall) -> Found:
    node = next(iter(call.operands.values()))
    state = call.rows(node)
    if state is None:
        return Found(None, Shaped(aten.expand.default))
    return Found(state.at(state.dim - len(shape_of(node)) + call.value.ndim), Shaped(aten.expand.default))


def repeated(call: RowCall) -> Found:
    """`repeat` and `tile`: copies of all rows, one after the other."""
    node, state = call.first()
    dim = state.dim - len(shape_of(node)) + call.value.ndim
    times = call.value.shape[dim] // shape_of(node)[state.dim]
    if times == 1:
        return Found(state.at(dim))
    if state.single is None:
        return Found(Rows(dim, state.parts * times))
    part = state.single
    return Found(Rows(dim, (Part("rows", part.inner, part.outer * times, part.short),)))


def interleaved(call: RowCall) -> Found:
    """`repeat_interleave` by a number."""
    node, state = call.first()
    dim, times = call.arguments.get("dim"), call.arguments.get("repeats")
    if dim is None or not isinstance(times, int):
        raise NoRule("it repeats by numbers in a tensor, or all dimensions as one")
    if dimension(dim, len(shape_of(node))) != state.dim:
        return Found(state)
    if call.arguments.get("output_size") is not None:
        raise NoRule("it says how many rows the whole image has then (output_size)")
    return Found(Rows(state.dim, tuple(part.times(times) for part in state.parts)))


def picked(call: RowCall) -> Found:
    """`select` and `unbind` along another dimension."""
    node, state = call.first()
    dim = dimension(call.arguments["dim"], len(shape_of(node)))
    if dim == state.dim:
        raise NoRule("it picks a row")
    return Found(call.each(state.at(state.dim - (dim < state.dim))))
