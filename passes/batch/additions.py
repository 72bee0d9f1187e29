"""Entries added where numbers say: of samples, a sum over them, as in the gradient of a lookup.

zeros(10, C).index_add(0, ids [B], grad [B, C])                   [10, C]  a sum over samples
zeros(10, C).index_put([ids [B, T]], grad [B, T, C], True)        [10, C]
"""

from typing import Any

import torch
from torch import fx

from passes.batch import own_rows
from passes.batch.layout import Mixed, Result, RuleCall, State
from passes.batch.lookups import at_numbers, index_put
from passes.batch.rules import along, broadcast, moved, no_batch_numbers
from passes.operations import CASTS, EXPANSIONS, VIEWS, bound_arguments, dimension, operation_name

_ADDED = {"index_add": "source", "scatter_add": "src", "scatter_reduce": "src", "index_put": "values"}
_OF_SAMPLES = {"index_add": at_numbers, "scatter_add": along, "scatter_reduce": along, "index_put": index_put}
_MASKS = (torch.bool, torch.uint8)
_FILLED = ("full", "full_like", "new_full", "fill")
_SAME = VIEWS | EXPANSIONS | CASTS | {"clone", "detach", "alias", "contiguous", "select", "slice"}


def is_zero(value: Any) -> bool:
    """Whether a value is 0 whatever the samples are: it may be added to any sum over them."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and value == 0
    if value.op != "call_function":
        return False
    name, given = operation_name(value.target), bound_arguments(value)
    if name in _FILLED:
        return is_zero(given.get("fill_value", given.get("value")))
    return name in ("zeros", "zeros_like", "new_zeros") or (name in _SAME and is_zero(value.args[0]))


def adds(call: RuleCall) -> bool:
    """Whether a call adds to what was there, rather than taking its place."""
    given = call.arguments
    return (
        call.name in _ADDED
        and (given.get("reduce", "sum"), given.get("include_self", True)) == ("sum", True)
        and (given.get("accumulate", True))
    )


def added(call: RuleCall) -> list[Result]:
    """`index_add`, `scatter_add`, `scatter_reduce` and `index_put`: each sample's into its own, or all into one sum."""
    base, source = next(call.tensors("self")), next(call.tensors(_ADDED[call.name]))
    states = [call.states[base], call.states[source]]
    if call.layout(base) is not None or not adds(call):
        if any(isinstance(one, State) and one.power for one in states):
            raise Mixed("it adds values that are divided by the number of samples")
        if any(state.counts for state in map(call.states.__getitem__, call.operands) if isinstance(state, State)):
            return _to_own_rows(call, base, source)
        return _OF_SAMPLES[call.name](call)
    no_batch_numbers(call)
    if call.batched():
        _require_own(call, base, source)
        states[1] = State(form="partial", power=states[1].power)  # type: ignore[union-attr]
    if len(set(states[int(is_zero(base)) :])) != 1:
        raise Mixed("it adds a sum over samples to a value of another scale", "add it to zeros")
    return states[1:]


def _to_own_rows(call: RuleCall, base: fx.Node, source: fx.Node) -> list[Result]:
    """What is added to rows of a table [B*N, ..], each sample's to its own."""
    if call.name not in ("index_add", "scatter_add"):
        return _OF_SAMPLES[call.name](call)
    (index,), layout = call.tensors("index"), call.layout(base)
    dim = dimension(call.arguments["dim"], base.meta["val"].ndim)
    place = call.layout(index)
    apart = place is not None and call.layout(source) == (place.at(dim) if call.name == "index_add" else place)
    values = all(isinstance(state := call.states[one], State) and state.plain for one in (base, source))
    if layout is None or not (apart and values and own_rows.are_of(call, index, layout, dim)):
        raise Mixed("it adds samples where other samples' numbers say")
    return moved(call, layout)


def _require_own(call: RuleCall, base: fx.Node, source: fx.Node) -> None:
    """Refuse samples whose entries are added where others' numbers say."""
    numbers, layout, state = list(call.tensors("index", "indices")), call.layout(source), call.states[source]
    refusal = Mixed("it adds samples where other samples' numbers say")
    if isinstance(state, State) and state.form != "value":
        raise Mixed("it adds a sum over samples where samples' numbers say")
    if any(call.states[one].form != "value" or one.meta["val"].dtype in _MASKS for one in numbers):  # type: ignore[union-attr]
        raise refusal
    if call.name == "index_put":
        indices = call.arguments["indices"]
        rest = base.meta["val"].ndim - len(indices)
        given = [([*one.meta["val"].shape, *[1] * rest], call.layout(one)) for one in numbers]
        place = broadcast([*given, (source.meta["val"].shape, layout)])
        if None in indices or place.dim >= -rest:
            raise refusal
        return
    (index,), dim = numbers, dimension(call.arguments["dim"], base.meta["val"].ndim)
    if layout is None or layout.dim != dim or call.layout(index) != layout.at(0 if call.name == "index_add" else dim):
        raise refusal


def lookup_gradient(call: RuleCall) -> list[Result]:
    """`embedding_dense_backward`: what is added to the rows that samples have looked up."""
    grad, indices = call.operands
    if call.arguments["scale_grad_by_freq"] or call.layout(grad) is None or call.layout(grad) != call.layout(indices):
        raise Mixed("it counts, or adds samples where other samples' numbers say")
    return [State(form="partial")]
