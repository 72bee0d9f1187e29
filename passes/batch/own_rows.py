"""Rows of samples by number, where a table [B*N, C] has N for each: those of sample s are s*N to s*N + N - 1.

first = arange(B)[:, None] * 5              [B, 1]       0, 5, 10, ..
rows = (first + near).flatten()             [B*K]        near [B, K] from 0 to 4, as topk gives it
x.view(B*5, C)[rows]                        [B*K, C]     each sample's own rows
zeros(B*5, C).index_add(0, rows, edges)     [B*5, C]

So point clouds and graphs are written. A micro-batch counts from its own first sample.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.batch.layout import BatchLayout, Mixed, Result, Rule, RuleCall, State
from passes.batch.rules import broadcast, moved, no_batch_numbers, shapes_of
from passes.operations import CASTS, EXPANSIONS, PERMUTATIONS, PIECES, VIEWS, bound_arguments, dimension, operation_name

_SAME = VIEWS | EXPANSIONS | PERMUTATIONS | PIECES | {
    "clone", "detach", "alias", "contiguous", "slice", "select", "unbind", "repeat", "repeat_interleave", "tile",
    "stack", "cat",
}  # fmt: skip
_PLACES = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min")


def follow(call: RuleCall, rule: Rule) -> list[Result]:
    """What is computed of such numbers: other numbers of the same samples' rows."""
    no_batch_numbers(call, "size", "sizes", "shape", "repeats")
    states = {n: s for n in call.operands if isinstance(s := call.states[n], State) and s.form in ("position", "row")}
    if call.name in ("mul", "multiply") and len(call.operands) == 1:
        return [_first(call, states[call.operands[0]])]
    if call.name == "add" and call.arguments.get("alpha", 1) == 1 and len(states) == 1:
        return [_offset(call, *states.items())]
    rows = {state.rows for state in states.values()}
    if call.name not in _SAME | CASTS or 0 in rows or len(rows) != 1 or len(states) != len(set(call.operands)):
        raise Mixed("it computes with the numbers of samples")
    known = max(states.values(), key=lambda state: state.most)
    return [_all_of(result, known) for result in rule(call)]


def _first(call: RuleCall, state: State) -> State:
    """The number of each sample's first row."""
    number, layout = call.arguments["other"], state.layout
    if layout is None or layout.factor != 1 or state.form != "position" or type(number) is not int or number < 1:
        raise Mixed("it computes with the numbers of samples")
    return State(layout, "row", rows=number)


def _offset(call: RuleCall, counted: tuple[fx.Node, State]) -> Result:
    (node, state), (one, other) = counted, (call.arguments[name] for name in ("self", "other"))
    added = other if one is node else one
    more = most(added)
    if state.form != "row" or more is None or state.most + more >= state.rows:
        raise Mixed("it computes with the numbers of samples, and may reach those of others")
    (result,) = moved(call, broadcast(shapes_of(call, call.operands)))
    return _all_of(result, replace(state, most=state.most + more))


def _all_of(result: Result, state: State) -> Result:
    if isinstance(result, tuple):
        return tuple(_all_of(one, state) for one in result)  # type: ignore[misc]
    if result.layout is None:
        raise Mixed("it computes with the numbers of samples")
    return replace(state, layout=result.layout)


def are_of(call: RuleCall, numbers: fx.Node, layout: BatchLayout | None, dim: int) -> bool:
    """Whether numbers are those of rows of a table [B*N, ..] along `dim`, each sample's of its own."""
    state = call.states[numbers]
    return isinstance(state, State) and state.form == "row" and layout == BatchLayout(dim, 1, state.rows)


def most(value: Any) -> int | None:
    """The largest entry of a value whose entries are integers from 0 on; None of others, or where it is not known."""
    if not isinstance(value, fx.Node):
        return value if type(value) is int and value >= 0 else None
    found, tensor = _most(value) if value.op == "call_function" else None, value.meta["val"]
    if found is None or not isinstance(tensor, torch.Tensor) or tensor.dtype == torch.bool:
        return found
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return found if is_whole and found <= torch.iinfo(tensor.dtype).max else None  # others wrap, to negative ones


def _most(value: fx.Node) -> int | None:
    """Where its type holds it."""
    tensor, name = value.meta["val"], operation_name(value.target)
    if name == "getitem" and operation_name(value.args[0].target) in _PLACES:  # type: ignore[union-attr]
        return _most_place(value.args[0]) if value.args[1] == 1 else None  # type: ignore[arg-type]
    if name in ("argsort", "argmax", "argmin"):
        return _most_place(value)
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bool:
        return 1
    given = bound_arguments(value)
    if name == "arange":
        start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
        return end - 1 if type(end) is int and type(start) is int and start >= 0 and step > 0 else None
    if name in _SAME | CASTS | {"getitem", "index", "gather", "index_select"}:
        if name == "repeat_interleave" and "self" not in given:
            return None
        parts = value.args[0] if isinstance(value.args[0], list | tuple) else [value.args[0]]
        found = [most(part) for part in parts]
        return max(one for one in found if one is not None) if None not in found else None
    first, other = (most(given.get(name)) for name in ("self", "other"))
    if name in ("mul", "add") and given.get("alpha", 1) == 1 and first is not None and other is not None:
        return first * other if name == "mul" else first + other
    number = given.get("other")
    return number - 1 if name == "remainder" and type(number) is int and number > 0 else None


def _most_place(call: fx.Node) -> int | None:
    """Of places along a dimension."""
    source, given = call.args[0].meta["val"], bound_arguments(call)  # type: ignore[union-attr]
    dim = given.get("dim", -1)
    size = source.numel() if dim is None else source.shape[dimension(dim, max(source.ndim, 1))] if source.ndim else 1
    return size - 1 if type(size) is int else None
