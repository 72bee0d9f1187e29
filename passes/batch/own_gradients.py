"""Autograd functions of a model's own: whether their gradients of micro-batches are those of the whole batch.

x [B, C] BatchLayout(0)    grad * y             BatchLayout(0)    each sample's own
w [C]                      (grad * x).sum(0)    a sum over samples, as micro-batches' gradients are added
l.mean() ()                1                    a loss's own, of which a micro-batch has its share
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture.backwards import GRAPHS
from passes.batch.layout import Mixed, Result, RuleCall, State
from passes.batch.sums import Unequal
from passes.operations import CASTS, operation_name

Follow = Callable[[RuleCall], list[Result]]
_REMEDY = (
    "return a gradient that is each sample's own, summed over samples where it is a weight's, or a constant "
    "where it is a loss's"
)


def follow_gradient(call: RuleCall, follow: Follow) -> list[Result]:
    """The states of what the function has returned, whose gradients go through its own backward.

    Raises:
        Mixed: the backward mixes samples, or is not linear where it is given a sum over them.
    """
    outs, inputs, saved, sizes = (call.arguments[name] for name in ("outs", "inputs", "saved", "sizes"))
    states, name = [call.states[node] for node in outs], call.arguments["key"].split()[0]
    if not all(isinstance(state, State) and state.plain for state in states):
        raise Mixed(f"the backward of {name} stands behind the sum or mean over samples")
    tangents = [state if state.layout else State(form="partial") for state in states if isinstance(state, State)]
    graph, found = GRAPHS[call.arguments["key"]], dict[fx.Node, Result]()
    given = iter([*tangents, *(call.states[node] for node in saved), *(State() for _ in sizes)])
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "call_function":
            found[node] = _first(name, RuleCall(node, found), follow)
            _require_as_precise(name, node, found[node], inputs)
    (output,) = graph.find_nodes(op="output")
    powers = [
        _power(name, call.states[node], found[gradient]) for node, gradient in zip(inputs, output.args[0], strict=True)
    ]
    if any(powers):
        raise Unequal(powers)
    return [tuple(states)]  # type: ignore[arg-type]


def _first(name: str, call: RuleCall, follow: Follow) -> Result:
    try:
        return follow(call)[0]
    except Mixed as error:
        raise Mixed(f"in the backward of {name}, {call.node.target}: {error.why}", error.remedy) from error


def _require_as_precise(name: str, node: fx.Node, state: Result, inputs: Sequence[fx.Node]) -> None:
    """Refuse sums over samples that are rounded to less than gradients are: their parts would be, one by one."""
    if operation_name(node.target) not in CASTS or not isinstance(state, State) or state.form != "partial":
        return
    dtype = node.meta["val"].dtype
    if any(torch.finfo(dtype).eps > torch.finfo(one.meta["val"].dtype).eps for one in inputs):
        raise Mixed(
            f"in the backward of {name}, {node.target}: it rounds a sum over samples to {dtype}", "round what is summed"
        )


def _power(name: str, state: Any, gradient: Any) -> int:
    """By which power of its share of the samples a micro-batch's input is to be weighted, for gradients to add up.

    A sum over samples has one gradient for all of them, each sample its own, what is alike in all a sum of gradients,
    or its share of a constant; and where the whole batch's value is (b/B)**power of that at hand, so is its gradient of
    the whole batch's."""
    form: Any = "value" if state.layout or state.form == "partial" else "partial"
    if gradient == State(state.layout, form, -state.power):
        return 0
    power = int(state.power + gradient.power) + int(state.form == "value")
    if state.layout or gradient != State(power=gradient.power) or power < 0:
        raise Mixed(f"the backward of {name} gives no sum over samples, or not each sample's own", _REMEDY)
    return power
