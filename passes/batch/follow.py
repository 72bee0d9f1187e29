"""Find the state of every node in order: by its rule, or on the whole batch where no parameter is involved.

arange(B)          whole batch, or counted within the micro-batch: both are open
h[arange(B), ids]  only the second fits: go back and take it
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.backwards import OWN_GRADIENT
from fxpipe.capture.reach import reached
from passes.batch import composite, own_rows, sums
from passes.batch.layout import BatchLayout, Mixed, Result, RuleCall, State, batch_dims, splits
from passes.batch.own_gradients import follow_gradient
from passes.batch.rules import pointwise
from passes.batch.table import RULES
from passes.operations import operation_name

# Every choice of a layout is right where one is open; a wrong one only meets a refusal later. More tries than this at
# one node mean that none fits.
_TRIES = 100
_MOVING = ("to", "_to_copy", "unsqueeze", "slice", "view", "reshape", "clone", "detach", "alias", "expand", "repeat")
_BY_NUMBER = ("index", "index_put", "index_select", "index_add", "scatter_add")
_SIZE_READERS = ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset")


class Follow:
    """The states of all nodes, found in order; where several are right, the first with which no later node fails."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.order = _by_first_use([n for n in capture.graph.nodes if n.op in ("placeholder", "call_function")])
        self.states: dict[fx.Node, Result] = {}
        self.whole: set[fx.Node] = set()
        self.depends = depends_on_parameters(self.order)
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
                if node in self.depends and _has_no_layout(node):
                    raise
                node = self._last_choice(node, position)
                index = position[node]
            state, whole = self._options[node].pop(0)
            self.states[node] = state
            (self.whole.add if whole else self.whole.discard)(node)
            index += 1

    def _last_choice(self, failed: fx.Node, position: Mapping[fx.Node, int]) -> fx.Node:
        self._tries[failed] = self._tries.get(failed, 0) + 1
        ancestors = reached(failed.all_input_nodes, lambda node: node.all_input_nodes)
        choices = [node for node in ancestors if self._options.get(node)]
        if not choices or self._tries[failed] > _TRIES:
            assert self._why is not None
            raise self._why
        return max(choices, key=position.__getitem__)

    def _possible(self, node: fx.Node) -> list[tuple[Result, bool]]:
        """The states `node` may have, the likely first, each with whether the whole batch computes it."""
        if node.op == "placeholder":
            return self._placeholder(node)
        try:
            results = _results(RuleCall(node, self.states))
        except Mixed:
            if node in self.depends or not on_tensors(node):
                raise
            return self._of_whole(node)
        local = [(result, False) for result in results]
        counted = any(isinstance(r, State) and (r.form == "partial" or r.counts) for r in results)
        if not counted or node in self.depends:
            return local
        return [*local, *self._of_whole(node)] if self._is_looked_up(node) else [*self._of_whole(node), *local]

    def _is_looked_up(self, node: fx.Node) -> bool:
        """Whether it is among numbers at which what depends on a parameter is read."""

        def users(one: fx.Node) -> list[fx.Node]:
            return [] if operation_name(one.target) in _BY_NUMBER else list(one.users)

        found = set(reached([node], users))
        lookups = (one for one in found & self.depends if operation_name(one.target) in _BY_NUMBER)
        return any(one.args[0] not in found for one in lookups)

    def _placeholder(self, node: fx.Node) -> list[tuple[Result, bool]]:
        kind = node.meta["kind"]
        if kind == "draw":
            return [(state, False) for state, _ in self._of_whole(node)]
        batched = kind == "input" and node.meta["input"] in {f.name for f in self.capture.inputs.leaves if f.batched}
        return [(State(BatchLayout(0)) if batched else State(), False)]

    def _of_whole(self, node: fx.Node) -> list[tuple[Result, bool]]:
        """The states of a value computed on the whole batch: cut into samples in any way, or the same for all."""
        value = node.meta["val"]
        if isinstance(value, list | tuple):
            return [(State(form="whole"), True)]
        try:
            dims = batch_dims(value)
        except Mixed:
            return [(State(form="whole"), True)]
        layouts = [layout for dim, k in dims for layout in splits(dim, k)] if len(dims) == 1 else []
        layouts.sort(key=lambda layout: layout.outer % self.capture.inputs.rows)  # first those of the inputs
        if dims:
            return [*((State(layout), True) for layout in layouts), (State(form="whole"), True)]
        return [(State(), True)]


def _results(call: RuleCall) -> list[Result]:
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
    if node.target is OWN_GRADIENT:
        return follow_gradient(call, _results)
    if any(s.form == "whole" for s in states):
        raise Mixed("its operand exists on the whole batch only, and no dimension of it can be cut into samples")
    numbers = call.batch_numbers()
    if all(s == State() for s in states) and not numbers and not _has_batch(value):
        return [tuple(State() for _ in value) if isinstance(value, list | tuple) else State()]
    if not all(s.plain or s.counts for s in states) or (numbers and call.name in sums.PRODUCTS):
        return sums.linear(call, _rule)
    if any(s.counts for s in states) and call.name not in _BY_NUMBER:
        moves = call.name in _MOVING and all(s.form == "position" for s in states)
        return _position(call) if moves else own_rows.follow(call, _rule)
    return _rule(call)


def _rule(call: RuleCall) -> list[Result]:
    tagged = torch.Tag.pointwise in getattr(call.node.target, "tags", ())
    rule = pointwise if tagged else RULES.get(call.name)
    return rule(call) if rule is not None else composite.follow_parts(call, _results)


def _position(call: RuleCall) -> list[Result]:
    """What leaves every number at its own place along the batch."""
    before, results = call.layout(call.operands[0]), [one for one in _rule(call) if isinstance(one, State)]
    if any(before is None or one.layout is None or one.layout.at(0) != before.at(0) for one in results):
        raise Mixed("it repeats the numbers of samples")
    return [State(one.layout, "position") for one in results]


def _has_no_layout(node: fx.Node) -> bool:
    """Whether its shape alone says so, as that of a half of the batch: no choice before it helps."""
    try:
        _has_batch(node.meta["val"])
    except Mixed:
        return True
    return False


def on_tensors(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor | list | tuple)


def _has_batch(value: Any) -> bool:
    return any(batch_dims(v) for v in (value if isinstance(value, list | tuple) else [value]) if v is not None)


def _by_first_use(nodes: list[fx.Node]) -> list[fx.Node]:
    """Graph order, with each placeholder just before its first user: its layout is chosen where others are known."""
    at = {n: i for i, n in enumerate(nodes)}

    def key(node: fx.Node) -> tuple[int, int]:
        uses = [at[u] for u in node.users if u in at]
        return (min(uses), 0) if node.op == "placeholder" and uses else (at[node], 1)

    return sorted(nodes, key=key)


def depends_on_parameters(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            depends = node.meta["kind"] == "parameter"
        elif node.op == "output":
            continue
        else:
            depends = on_tensors(node) and any(a in found for a in node.all_input_nodes)
        if depends:
            found.add(node)
    return found
