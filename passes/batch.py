"""Follow the batch through the captured graph: what may run on micro-batches, and how their losses add up.

    x [B, C]             Layout(0)        l = ((unet(x) - y) ** 2)   [B, C]  Layout(0)
    w [B]                Layout(0)        n = (w * l.mean(1)).sum()          a sum over samples
    w.sum()              whole batch      n / w.sum()                        loss_scale "sum"

Every operation between the inputs and the loss's reduction must act on each sample alone. One that mixes samples is
run on the whole batch where it depends on no parameter, and refused with its place where it does. Nothing is assumed
of an operation without a rule.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from passes import batch_composite, batch_rewrite, batch_sums
from passes.batch_layout import Call, Layout, Mixed, Result, State, batch_dims, bind, splits
from passes.batch_rules import pointwise
from passes.batch_sums import Unequal
from passes.batch_table import RULES

# Every choice of a layout is right where one is open; a wrong one only meets a refusal later. More tries than this at
# one node mean that none fits.
_TRIES = 100
_MOST_WEIGHTS = 2
_SIZE_READERS = ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset")


@dataclass(frozen=True)
class BatchPlan:
    """How a captured step runs on micro-batches.

    layouts      for each node that micro-batches evaluate, where its samples lie; None is the same for every sample.
                 A tuple for nodes with several results. Nodes that only `whole_batch` needs are absent.
    loss_scale   with b_m of B samples in micro-batch m, the whole batch's loss is the sum of its losses ("sum"), or of
                 its losses times b_m/B ("mean")
    whole_batch  nodes to evaluate, with their ancestors, on the whole batch: no parameter is among these. Sizes among
                 the ancestors are functions of the batch (`fxpipe.sizes`), not of the tensors they were read from.
                 Micro-batches take the samples of the result that `layouts` names, or all of it.
    divisible    False when the batch could be captured at one size only: there is one micro-batch
    """

    layouts: Mapping[str, "Layout | tuple[Layout | None, ...] | None"]
    loss_scale: Literal["mean", "sum"]
    whole_batch: tuple[str, ...]
    divisible: bool = True


def analyse(capture: Capture) -> BatchPlan:
    """Prove that micro-batches of `capture` add up to its whole batch.

    Rewrites its graph where that makes them add up (passes/batch_rewrite.py); the whole batch's loss is the same.

    Raises:
        CompileError: an operation that depends on a parameter mixes samples, or has no rule here; names its module.
    """
    if not capture.batch:
        nodes = [n for n in capture.graph.nodes if n.op in ("placeholder", "call_function")]
        return BatchPlan({n.name: _nothing(n) for n in nodes}, "mean", (), divisible=False)
    batch_rewrite.prepare(capture.graph, _depends_on_parameters(capture.graph.nodes))
    follow = _followed(capture)
    state = follow.states[capture.loss]
    assert isinstance(state, State)
    scale = _loss_scale(capture.loss, state)
    needed, whole = _needed(capture.loss, follow)
    nodes = [n for n in capture.graph.nodes if n in follow.states]
    layouts = {n.name: _layouts(follow.states[n]) for n in nodes if n in needed}
    return BatchPlan(layouts, scale, tuple(n.name for n in nodes if n in whole))


def _followed(capture: Capture) -> "_Follow":
    """The states of all nodes; terms of the loss that need different weights get them in the graph."""
    batched = {leaf.name for leaf in capture.inputs.leaves if leaf.batched}
    placeholders = capture.graph.find_nodes(op="placeholder")
    source = next(n for n in placeholders if n.meta["kind"] == "input" and n.meta["input"] in batched)
    while True:
        follow = _Follow(capture)
        try:
            follow.run()
        except Unequal as error:
            node = follow.failed
            if min(error.powers) < 0 or max(error.powers) > _MOST_WEIGHTS:
                raise _refusal(node, error) from None
            terms = list(bind(node, {}).operands)
            batch_rewrite.scale_terms(capture.graph, node, list(zip(terms, error.powers, strict=True)), source)
        except Mixed as error:
            raise _refusal(follow.failed, error) from None
        else:
            return follow


def _nothing(node: fx.Node) -> Any:
    value = node.meta["val"]
    return tuple(None for _ in value) if isinstance(value, list | tuple) else None


def _layouts(result: Result) -> Any:
    return tuple(s.layout for s in result) if isinstance(result, tuple) else result.layout


def _loss_scale(node: fx.Node, state: State) -> Literal["mean", "sum"]:
    power = state.power + int(state.form == "value")  # what no sample changes is the mean of its copies
    if state.layout is None and power in (0, 1):
        return "mean" if power else "sum"
    raise _refusal(node, Mixed("the loss is neither a mean nor a sum over samples", "reduce it by mean() or sum()"))


def _refusal(node: fx.Node, error: Mixed) -> CompileError:
    path = node.meta.get("path") or "(the model itself)"
    return CompileError(
        f"module {path}: {node.target} ({node.name}): {error.why}; micro-batches would give another result than the "
        f"whole batch. To change: {error.remedy}"
    )


class _Follow:
    """The states of all nodes, found in order; where several are right, the first with which no later node fails."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.order = _by_first_use([n for n in capture.graph.nodes if n.op in ("placeholder", "call_function")])
        self.states: dict[fx.Node, Result] = {}
        self.whole: set[fx.Node] = set()
        self.depends = _depends_on_parameters(self.order)
        self.failed = self.order[0]  # the furthest node that no choice so far could follow, and why
        self._why: Mixed | None = None
        self._tries: dict[fx.Node, int] = {}
        self._options: dict[fx.Node, list[tuple[Result, bool]]] = {}

    def run(self) -> None:
        position = {node: i for i, node in enumerate(self.order)}
        index = 0
        while index < len(self.order):
            node = self.order[index]
            try:
                self._options[node] = self._possible(node)
            except Mixed as error:
                if self._why is None or position[node] > position[self.failed]:
                    self.failed, self._why = node, error
                node = self._last_choice(node, position)
                index = position[node]
            state, whole = self._options[node].pop(0)
            self.states[node] = state
            (self.whole.add if whole else self.whole.discard)(node)
            index += 1

    def _last_choice(self, failed: fx.Node, position: Mapping[fx.Node, int]) -> fx.Node:
        self._tries[failed] = self._tries.get(failed, 0) + 1
        choices = [n for n in _ancestors(failed) if self._options.get(n)]
        if not choices or self._tries[failed] > _TRIES:
            assert self._why is not None
            raise self._why
        return max(choices, key=position.__getitem__)

    def _possible(self, node: fx.Node) -> list[tuple[Result, bool]]:
        """The states `node` may have, the likely first, each with whether the whole batch computes it."""
        if node.op == "placeholder":
            return self._placeholder(node)
        try:
            results = _results(bind(node, self.states))
        except Mixed:
            if node in self.depends or not _on_tensors(node):
                raise
            return _of_whole(node)
        local = [(result, False) for result in results]
        counted = any(isinstance(r, State) and r.form in ("partial", "position") for r in results)
        return [*_of_whole(node), *local] if counted and node not in self.depends else local

    def _placeholder(self, node: fx.Node) -> list[tuple[Result, bool]]:
        kind = node.meta["kind"]
        if kind == "draw":
            return [(state, False) for state, _ in _of_whole(node)]
        batched = kind == "input" and node.meta["input"] in {f.name for f in self.capture.inputs.leaves if f.batched}
        return [(State(Layout(0)) if batched else State(), False)]


def _results(call: Call) -> list[Result]:
    node = call.node
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor | list | tuple):
        number = isinstance(value, int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool)
        if number and call.operands and call.name not in _SIZE_READERS:
            raise Mixed("it turns a tensor's value into a number", "keep it a tensor")
        return [State()]
    if call.name == "getitem":
        parts = call.states[node.args[0]]  # type: ignore[index]
        if isinstance(parts, tuple):
            return [parts[node.args[1]]]  # type: ignore[index]
        raise Mixed("its operand exists on the whole batch only")
    states = [s for s in (call.states[n] for n in call.operands) if isinstance(s, State)]
    if any(s.form == "whole" for s in states):
        raise Mixed("its operand exists on the whole batch only, and no dimension of it can be cut into samples")
    numbers = call.batch_numbers()
    if all(s == State() for s in states) and not numbers and not _has_batch(value):
        return [tuple(State() for _ in value) if isinstance(value, list | tuple) else State()]
    if not all(s.plain or s.form == "position" for s in states) or (numbers and call.name in ("mul", "div")):
        return batch_sums.linear(call, _rule)
    if any(s.form == "position" for s in states) and call.name != "index":
        return _position(call)
    return _rule(call)


def _rule(call: Call) -> list[Result]:
    tagged = torch.Tag.pointwise in getattr(call.node.target, "tags", ())
    rule = pointwise if tagged else RULES.get(call.name)
    return rule(call) if rule is not None else batch_composite.follow_parts(call, _results)


def _position(call: Call) -> list[Result]:
    if call.name not in ("to", "_to_copy", "unsqueeze", "view", "reshape", "clone", "detach", "alias"):
        raise Mixed("it computes with the numbers of samples")
    return [State(r.layout, "position") for r in _rule(call) if isinstance(r, State)]


def _on_tensors(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor | list | tuple)


def _has_batch(value: Any) -> bool:
    return any(batch_dims(v) for v in (value if isinstance(value, list | tuple) else [value]) if v is not None)


def _of_whole(node: fx.Node) -> list[tuple[Result, bool]]:
    """The states of a value computed on the whole batch: cut into samples in any way, or the same for all."""
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        return [(State(form="whole"), True)]
    try:
        dims = batch_dims(value)
    except Mixed:
        return [(State(form="whole"), True)]
    layouts = [layout for dim, k in dims for layout in splits(dim, k)] if len(dims) == 1 else []
    if dims:
        return [*((State(layout), True) for layout in layouts), (State(form="whole"), True)]
    return [(State(), True)]


def _by_first_use(nodes: list[fx.Node]) -> list[fx.Node]:
    """Graph order, with each placeholder just before its first user: its layout is chosen where others are known."""
    at = {n: i for i, n in enumerate(nodes)}

    def key(node: fx.Node) -> tuple[int, int]:
        uses = [at[u] for u in node.users if u in at]
        return (min(uses), 0) if node.op == "placeholder" and uses else (at[node], 1)

    return sorted(nodes, key=key)


def _depends_on_parameters(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            depends = node.meta["kind"] == "parameter"
        elif node.op == "output":
            continue
        else:
            depends = _on_tensors(node) and any(a in found for a in node.all_input_nodes)
        if depends:
            found.add(node)
    return found


def _ancestors(node: fx.Node) -> Iterator[fx.Node]:
    seen, pending = {node}, [node]
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
                yield operand


def _needed(loss: fx.Node, follow: _Follow) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that micro-batches hold, and those among them that the whole batch computes."""
    needed, whole, pending = {loss}, set[fx.Node](), [loss]
    while pending:
        node = pending.pop()
        if node in follow.whole:
            whole.add(node)
        if node in follow.whole or not _on_tensors(node):
            continue
        for operand in node.all_input_nodes:
            if operand not in needed:
                needed.add(operand)
                pending.append(operand)
    return needed, whole
