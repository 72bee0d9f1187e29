"""Follow the batch through the captured graph: what may run on micro-batches, and how their losses add up.

    x [B, C]             BatchLayout(0)   l = ((unet(x) - y) ** 2)   [B, C]  BatchLayout(0)
    w [B]                BatchLayout(0)   n = (w * l.mean(1)).sum()          a sum over samples
    w.sum()              whole batch      n / w.sum()                        loss_scale "sum"

Every operation between the inputs and the loss's reduction must act on each sample alone. One that mixes samples is
run on the whole batch where it depends on no parameter, and refused with its place where it does. Nothing is assumed
of an operation without a rule.

layout    where samples lie in a value          follow, table    the rule of every operation, in order
rules     most operations (views, products, lookups, composite)   sums   the loss's reduction, and what follows it
additions     entries added where numbers say
rewrite   what lets micro-batches add up              own_gradients   autograd functions of a model's own
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.capture.outputs import drop
from fxpipe.capture.reach import reached
from fxpipe.errors import CompileError
from passes.batch import rewrite
from passes.batch.follow import Follow, depends_on_parameters, on_tensors
from passes.batch.layout import BatchLayout, Mixed, Result, State
from passes.batch.sums import Unequal

_MOST_WEIGHTS = 2  # (b/B)**2: a mean over the batch, divided by its size


@dataclass(frozen=True)
class BatchPlan:
    """How a captured step runs on micro-batches.

    layouts      for each node that micro-batches evaluate, where its samples lie; None is the same for every sample.
                 A tuple for nodes with several results. Nodes that only `whole_batch` needs are absent.
    loss_scale   with b_m of B samples in micro-batch m, the whole batch's loss is the sum of its losses ("sum"), or of
                 its losses times b_m/B ("mean")
    whole_batch  nodes to evaluate, with their ancestors, on the whole batch: no parameter is among these. Sizes among
                 the ancestors are functions of the batch (`fxpipe.capture.sizes`), not of the tensors they were read
                 from. Micro-batches take the samples of the result that `layouts` names, or all of it.
    divisible    False when there is one micro-batch, as where the batch could be captured at one size only
    outputs      for each value that forward returns beside the loss, how micro-batches' values make the whole batch's
    left_out     why others cannot be put together
    """

    layouts: Mapping[str, "BatchLayout | tuple[BatchLayout | None, ...] | None"]
    loss_scale: Literal["mean", "sum"]
    whole_batch: tuple[str, ...]
    divisible: bool = True
    outputs: Mapping[str, State] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def analyse(capture: Capture, num_microbatches: int) -> BatchPlan:
    """Prove that micro-batches of `capture` add up to its whole batch; one micro-batch needs no proof.

    Rewrites its graph where that makes them add up (passes/rewrite.py); the whole batch's loss is the same.

    Raises:
        CompileError: an operation that depends on a parameter mixes samples, or has no rule here; names its module.
    """
    if not capture.batch or num_microbatches == 1:
        nodes = [n for n in capture.graph.nodes if n.op in ("placeholder", "call_function")]
        outputs = dict.fromkeys(capture.outputs, State())
        return BatchPlan({n.name: _nothing(n) for n in nodes}, "mean", (), divisible=False, outputs=outputs)
    rewrite.prepare(capture.graph, depends_on_parameters(capture.graph.nodes))
    follow, left_out = _followed(capture)
    state = follow.states[capture.result]
    assert isinstance(state, State)
    scale = _loss_scale(capture.result, state)
    states = ((name, follow.states[sink]) for name, sink in capture.outputs.items())
    outputs = {name: state for name, state in states if isinstance(state, State)}
    needed, whole = _needed([capture.result, *capture.outputs.values()], follow)
    nodes = [n for n in capture.graph.nodes if n in follow.states]
    if whole and not any(_has_samples(follow.states[node]) for node in needed):
        first = next(node for node in nodes if node in whole)
        told = _told(first, "it takes some samples of the batch, or all into one")
        raise CompileError(
            f"{told}, and so does whatever the loss is made of: every micro-batch would compute all of it. To change: "
            "compute the samples at once, not one by one; or pass microbatches=1"
        )
    layouts = {n.name: _layouts(follow.states[n]) for n in nodes if n in needed}
    whole_batch = tuple(n.name for n in nodes if n in whole)
    return BatchPlan(layouts, scale, whole_batch, True, outputs, left_out)


def _followed(capture: Capture) -> tuple[Follow, dict[str, str]]:
    """The states of all nodes; terms of the loss that need different weights get them in the graph. Outputs that mix
    samples are taken out of it: returned with the reason."""
    left_out: dict[str, str] = {}
    batched = {leaf.name for leaf in capture.inputs.leaves if leaf.batched}
    placeholders = capture.graph.find_nodes(op="placeholder")
    source = next(n for n in placeholders if n.meta["kind"] == "input" and n.meta["input"] in batched)
    while True:
        follow = Follow(capture)
        try:
            follow.run()
        except Mixed as error:
            node = follow.failed
            if isinstance(error, Unequal) and min(error.powers) >= 0 and max(error.powers) <= _MOST_WEIGHTS:
                rewrite.scale_terms(capture.graph, node, error.powers, source)
                continue
            given_up = _behind(capture, node)
            if not given_up or not capture.seen.keys().isdisjoint(given_up):
                raise _refusal(node, error) from None
            left_out |= dict.fromkeys(given_up, str(_refusal(node, error)))
            drop(capture.graph, given_up)
            capture.rewritten()
        else:
            given_up = [name for name, sink in capture.outputs.items() if not _adds_up(sink, follow)]
            for name in given_up:
                if name in capture.seen:
                    why = f"what is written into {capture.seen[name]} is there for the whole batch only"
                    raise _refusal(capture.outputs[name], Mixed(why, "write a mean or a sum over samples"))
            left_out |= dict.fromkeys(given_up, "it is there for the whole batch only")
            drop(capture.graph, given_up)
            capture.rewritten()
            return follow, left_out


def _behind(capture: Capture, node: fx.Node) -> list[str]:
    """The outputs that are given up because of a node: those made of it, all where the loss is made of it, too."""
    made = set(reached([node], lambda one: one.users))
    return [name for name, sink in capture.outputs.items() if sink in made or capture.result in made]


def _adds_up(sink: fx.Node, follow: Follow) -> bool:
    """Whether an output is made of micro-batches' values."""
    state = follow.states[sink]
    return isinstance(state, State) and state.form in ("value", "partial") and sink not in follow.whole


def _nothing(node: fx.Node) -> Any:
    value = node.meta["val"]
    return tuple(None for _ in value) if isinstance(value, list | tuple) else None


def _layouts(result: Result) -> Any:
    return tuple(s.layout for s in result) if isinstance(result, tuple) else result.layout


def _has_samples(result: Result) -> bool:
    return any(one.layout is not None for one in (result if isinstance(result, tuple) else [result]))


def _loss_scale(node: fx.Node, state: State) -> Literal["mean", "sum"]:
    power = state.power + int(state.form == "value")  # what no sample changes is the mean of its copies
    if state.layout is None and power in (0, 1):
        return "mean" if power else "sum"
    raise _refusal(node, Mixed("the loss is neither a mean nor a sum over samples", "reduce it by mean() or sum()"))


def _refusal(node: fx.Node, error: Mixed) -> CompileError:
    return CompileError(
        f"{_told(node, error.why)}; micro-batches would give another result than the whole batch. To change: "
        f"{error.remedy}; or pass microbatches=1, where ranks take turns at the whole batch, in less memory each"
    )


def _told(node: fx.Node, why: str) -> str:
    return f"module {node.meta.get('path') or '(the model itself)'}: {node.target} ({node.name}): {why}"


def _needed(results: Sequence[fx.Node], follow: Follow) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that micro-batches hold, and those among them that the whole batch computes."""

    def operands(node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if node not in follow.whole and on_tensors(node) else []

    needed = set(reached(results, operands))
    return needed, needed & follow.whole


def parts_of_batch(capture: Capture) -> int:
    """Into how many parts forward cuts the batch, as `chunk(2)` of images and those of a prior; 1 where into none."""
    values = [value for node in capture.graph.nodes for value in private.tensors_in(node.meta.get("val"))]
    return math.lcm(*{found for value in values for size in value.shape for found in private.sizes.divisors(size)})


def require_independent(capture: Capture) -> None:
    """Prove that each sample of what `capture` returns is made of that sample alone, so that any ranks may have it.

    Raises:
        CompileError: an operation mixes samples, or the batch is no first dimension of the result; names its module.
    """
    if not capture.batch:
        places = (name.rpartition(".") for name in capture.inputs.tensor_names)
        lists = dict.fromkeys(of for of, _, place in places if place.isdigit())
        listed = [f"{of} is a list of tensors, and where these are samples, a graph has them all" for of in lists]
        why = "; ".join((*listed[:1], *capture.notes))
        raise CompileError(f"samples cannot be computed apart: {why or 'there is one'}")
    follow = Follow(capture)
    try:
        follow.run()
    except Mixed as error:
        raise CompileError(_told(follow.failed, error.why)) from None
    state = follow.states[capture.result]
    if state != State(BatchLayout(0)):
        raise CompileError(_told(capture.result, "its samples do not lie in dimension 0 one by one"))
    _, whole = _needed([capture.result], follow)
    if whole:
        node = min(whole, key=lambda node: capture.places[node.name])
        raise CompileError(_told(node, "it mixes samples"))
