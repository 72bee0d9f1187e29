"""The reduction over samples, and what may follow it: micro-batches' losses must add up to the whole batch's.

    l [B, C]   .mean(1) [B]   .mean() ()      whole = sum over m of (b_m / B) * part_m      partial, power 1
               .sum() ()                      whole = sum over m of part_m                  partial, power 0
               .sum() / l.shape[0]            ... / B = (b_m / B) * .../ b_m                partial, power 1

Before the reduction each sample may be divided by the batch size; after it, only linear operations may follow.
"""

from dataclasses import replace
from typing import Any

from torch import fx

from passes.batch.additions import added, adds, is_zero
from passes.batch.layout import BatchLayout, Mixed, Result, Rule, RuleCall, State, power_of
from passes.batch.rules import along, broadcast, moved, no_batch_numbers, pointwise, shapes_of
from passes.operations import FACTORIES, acted_dims

_NONE, _MEAN = 0, 1
PRODUCTS = ("mul", "multiply", "div", "divide", "true_divide")
_MULTILINEAR = ("mm", "bmm", "matmul", "mv", "dot", "inner", "outer", "einsum")
# Linear in their one operand that counts samples; the rules for layouts apply as ever.
_LINEAR = frozenset(
    "reshape view _unsafe_view flatten unflatten squeeze unsqueeze permute transpose t to _to_copy clone contiguous "
    "alias detach neg negative sum mean select slice unbind expand tril triu flip roll diagonal index index_select "
    "gather pad constant_pad_nd".split()
)
_CHOICES = {"masked_fill": ("self", "value", "mask"), "where": ("self", "other", "condition")}  # products with a mask
_INTO = {
    **dict.fromkeys(("slice_scatter", "select_scatter", "diagonal_scatter"), "src"),
    **{"index_put": "values", "index_copy": "source", "index_fill": "value"},
}
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")  # of the operand's shape, whatever it holds
_NOT_LINEAR = "only sums and products with constants may follow the sum or mean over samples"


class Unequal(Mixed):
    """A sum of terms that need different weights on micro-batches: (b/B)**power for each, in the operands' order."""

    def __init__(self, powers: list[int]) -> None:
        super().__init__(
            "it adds a sum over samples to a term of another scale, which no weight on micro-batches can express",
            "divide the sum by the batch size (or take the mean), so that both terms are means",
        )
        self.powers = powers


def reduce(call: RuleCall) -> list[Result]:
    """`sum` and `mean`: within each sample, or over the batch."""
    no_batch_numbers(call)
    (node,) = call.operands
    layout = call.layout(node)
    if layout is None or layout.dim not in acted_dims(call.arguments, node.meta["val"].ndim):
        return along(call)
    return [State(form="partial", power=int(call.name == "mean"))]


def loss(call: RuleCall) -> list[Result]:
    """An elementwise loss with its own reduction."""
    no_batch_numbers(call)
    if call.arguments["reduction"] == _NONE:
        return pointwise(call)
    broadcast(shapes_of(call, call.operands))
    return [State(form="partial", power=int(call.arguments["reduction"] == _MEAN))]


def class_loss(call: RuleCall) -> list[Result]:
    """`cross_entropy_loss` and `nll_loss`: classes in dimension 1 (0 without a batch)."""
    no_batch_numbers(call)
    scores, target, *weight = call.operands
    layout, ndim = call.layout(scores), scores.meta["val"].ndim
    by_class = target.meta["val"].ndim == ndim
    if layout is None or layout.dim == min(1, ndim - 1) or call.batched(weight):
        raise Mixed("its classes or their weights run over the batch")
    if call.layout(target) != layout.at(layout.dim - int(layout.dim > 0 and not by_class)):
        raise Mixed("its scores and targets hold the batch in different places")
    if call.arguments["reduction"] == _NONE:
        return moved(call, layout)
    if call.arguments["reduction"] == _MEAN and not by_class:
        raise Mixed(
            "its mean divides by the number of targets that are not ignore_index, over the batch",
            'use reduction="none" and divide by a count that depends on no parameter, frozen or not, as that of a mask',
        )
    return [State(form="partial", power=int(call.arguments["reduction"] == _MEAN))]


def linear(call: RuleCall, rule: Rule) -> list[Result]:
    """An operation on values whose scale or sum refers to the batch (`State.form` partial, or `State.power`)."""
    states = {name: _state_of(call, name) for name in call.arguments}
    if call.name in PRODUCTS and call.arguments.get("rounding_mode") is None:
        return [_product(call, states["self"], states["other"], 1 if call.name.startswith("mul") else -1)]
    if call.name in _MULTILINEAR and any(_tensor_state(call, node).form == "partial" for node in call.operands):
        return [_product_of_all(call, [_tensor_state(call, node) for node in call.operands])]
    if call.name in _CHOICES:
        *chosen, mask = _CHOICES[call.name]
        return [_product(call, _one_of(call, *chosen), states[mask], 1)]
    if adds(call):
        return added(call)
    if call.name in _INTO and not call.batched():
        places = set(call.operands) - {call.arguments["self"], call.arguments[_INTO[call.name]]}
        if all(_tensor_state(call, place).plain for place in places):
            return [_one_of(call, "self", _INTO[call.name])]
    if call.name in ("add", "sub", "subtract", "rsub") and not call.batch_numbers(("self", "other")):
        return [_sum(call, [(call.arguments[name], states[name]) for name in ("self", "other")])]
    if call.name in ("stack", "cat") and not call.batch_numbers():
        return [_sum(call, [(node, _tensor_state(call, node)) for node in call.operands])]
    if call.name in _LIKE or (call.name == "fill" and is_zero(call.arguments["value"])):
        return [State(call.layout(call.operands[0]))]
    if call.name in FACTORIES:
        return rule(call)
    if call.name in ("pad", "constant_pad_nd") and not is_zero(call.arguments.get("value") or 0):
        raise Mixed(f"it pads a value summed over samples, or divided by their number: {_NOT_LINEAR}")
    if call.name in _LINEAR and not (call.name in ("to", "_to_copy") and not _floating(call.node)):
        return [_unary(call, r) for r in _within(call, rule)]
    raise Mixed(f"it is not linear in a value already summed over samples, or divided by their number: {_NOT_LINEAR}")


def _state_of(call: RuleCall, name: str) -> State:
    argument = call.arguments[name]
    if isinstance(argument, fx.Node) and argument in set(call.operands):
        return _tensor_state(call, argument)
    power = power_of(call.number(name)) if name in ("self", "other") else 0
    if power is None:
        raise Mixed(f"its argument {name!r} depends on the batch size in another way than by a factor")
    return State(power=power)


def _tensor_state(call: RuleCall, node: fx.Node) -> State:
    state = call.states[node]
    assert isinstance(state, State)
    return state


def _floating(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _product(call: RuleCall, a: State, b: State, sign: int) -> State:
    forms = {a.form, b.form}
    if "partial" not in forms:
        layout = _place(call)
        return State(layout, "value", a.power + sign * b.power)
    if (a.layout or b.layout) or forms != {"partial", "value"} or (sign < 0 and b.form == "partial"):
        raise Mixed(f"it combines samples with a value summed over the batch: {_NOT_LINEAR}")
    return State(None, "partial", a.power + sign * b.power)


def _product_of_all(call: RuleCall, states: list[State]) -> State:
    """Of an operation that is linear in each of its operands."""
    first, *others = sorted(state.form for state in states)
    if any(state.layout for state in states) or first != "partial" or {*others} - {"value"}:
        raise Mixed(f"it combines samples with a value summed over the batch: {_NOT_LINEAR}")
    return State(None, "partial", sum(state.power for state in states))


def _place(call: RuleCall) -> BatchLayout | None:
    if not call.batched():
        return None
    (result,) = moved(call, broadcast(shapes_of(call, call.operands)))
    assert isinstance(result, State)
    return result.layout


def _sum(call: RuleCall, given: list[tuple[Any, State]]) -> State:
    """Of terms and their states; 0 is of any scale."""
    other = next((state for term, state in given if not is_zero(term)), State())
    terms = [replace(other, layout=state.layout) if is_zero(term) else state for term, state in given]
    if any(t.layout is not None for t in terms):
        if len({(t.form, t.power) for t in terms}) != 1:
            raise Mixed(f"it adds samples to a value summed over the batch, or of another scale: {_NOT_LINEAR}")
        return State(_place(call), terms[0].form, terms[0].power)
    partial = [t if t.form == "partial" else State(None, "partial", t.power + 1) for t in terms]
    if len({t.power for t in partial}) != 1:
        raise Unequal([t.power for t in partial])
    return partial[0] if any(t.form == "partial" for t in terms) else terms[0]


def _one_of(call: RuleCall, *names: str) -> State:
    """The state of what has the entries of one or the other of these, where none is a constant but 0."""
    states = [_state_of(call, name) for name in names if not is_zero(call.arguments[name])]
    if len({(state.form, state.power) for state in states}) != 1:
        raise Mixed(f"it puts a value summed over samples and one of another scale into one: {_NOT_LINEAR}")
    return states[0]


def _within(call: RuleCall, rule: Rule) -> list[Result]:
    """The layouts of the result, were the operand an ordinary value."""
    node, *others = call.operands  # others name a type, a shape, or entries
    if not all(_tensor_state(call, n).plain for n in others) or (call.layout(node) is None and call.batched(others)):
        raise Mixed(f"it combines samples with a value summed over the batch: {_NOT_LINEAR}")
    if call.batch_numbers() and call.layout(node) is None:
        raise Mixed(f"it gives a batch dimension to a value summed over the batch: {_NOT_LINEAR}")
    return [State()] if call.layout(node) is None else rule(call)


def _unary(call: RuleCall, result: Result) -> Result:
    before = _tensor_state(call, call.operands[0])
    if isinstance(result, tuple):
        return tuple(_unary(call, item) for item in result)  # type: ignore[misc]
    assert isinstance(result, State)
    form: Any = "partial" if "partial" in (before.form, result.form) else "value"
    return State(result.layout, form, before.power + result.power)
