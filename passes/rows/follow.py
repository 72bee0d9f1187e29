"""Follow the rows through a graph in order, by each operation's rule; without one its operands are gathered.

flip(x, [2])     no rule     x is gathered, the result is the same for all patches, and a note says so
conv, stride 2   units of one row cannot be halved: the walk starts again with units of two
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpipe.errors import CompileError
from passes.operations import is_pointwise, operation_name
from passes.rows.how import Found, Same, Whole
from passes.rows.layout import NeedRows, NoRule, Part, Place, Result, RowCall, Rows, RowUnits
from passes.rows.rules import pointwise
from passes.rows.sized import Sized
from passes.rows.table import RULES

_NO_OTHER = "no rule says what it does with rows"


@dataclass(frozen=True)
class Note:
    """An operation that gets its operands whole, as nothing better is known of it; `values` are their names."""

    node: str
    operation: str
    module: str
    why: str
    num_bytes: int
    values: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.node} ({self.operation}) in {self.module}: {self.why}; gathered, {self.num_bytes} bytes"


@dataclass
class Walk:
    """One walk with units of one size; `states`, `found` and `calls` grow."""

    units: RowUnits
    states: dict[fx.Node, Result] = field(default_factory=dict)
    found: dict[fx.Node, Found] = field(default_factory=dict)
    calls: dict[fx.Node, RowCall] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    at: fx.Node | None = None

    def run(self, sized: Sized, inputs: Mapping[str, Rows]) -> None:
        """Args: inputs: where the rows lie in placeholders, by name."""
        for node in sized.graph.nodes:
            self.at = node
            if node.op == "placeholder":
                self.states[node] = inputs.get(node.name)
            elif node.op == "call_function":
                self.found[node] = found = self._visit(node)
                self.states[node] = found.state

    def _visit(self, node: fx.Node) -> Found:
        call = self.calls[node] = RowCall(node, self.states, self.units)
        if call.name == "getitem":
            state = self.states[node.args[0]]  # type: ignore[index]
            return Found(state[node.args[1]] if isinstance(state, tuple) else None)  # type: ignore[index]
        if not call.live:
            return Found(call.each(None))
        try:
            return self._by_rule(call)
        except NoRule as why:
            return self._gathered(call, str(why))
        except NeedRows as need:
            if RowUnits(self.units.rows, self.units.each * need.times).count > 1:
                raise
            return self._gathered(call, f"{need.why}: one unit would have all rows")

    def _by_rule(self, call: RowCall) -> Found:
        rule = pointwise if is_pointwise(call.node.target) else RULES.get(call.name)
        if rule is None:
            raise NoRule(_NO_OTHER)
        found = rule(call)
        states = found.state if isinstance(found.state, tuple) else (found.state,)
        values = call.node.meta["val"] if isinstance(call.node.meta["val"], list | tuple) else (call.node.meta["val"],)
        for state, value in zip(states, values, strict=True):
            if state is not None and not _fits(state, value, self.units):
                raise NoRule("its result is not what its rule expects")
        return found

    def _gathered(self, call: RowCall, why: str) -> Found:
        nodes = set(call.live.values())
        values = [node.meta["val"] for node in nodes]
        num_bytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        path = call.node.meta.get("path") or "(the model itself)"
        names = frozenset(node.name for node in nodes)
        self.notes.append(Note(call.node.name, operation_name(call.node.target), path, why, num_bytes, names))
        share = _share(call)
        if share is not None:
            return Found(share, Whole(), dict.fromkeys(call.live))
        return Found(call.each(None), Same(), dict.fromkeys(call.live))


def _share(call: RowCall) -> Rows | None:
    """How the result of whole operands may be cut: any way is right, the one in proportion meets the others again."""
    node = next(iter(call.live.values()))
    state, value = call.states[node], call.node.meta["val"]
    if not isinstance(value, torch.Tensor) or not isinstance(state, Rows) or value.ndim != node.meta["val"].ndim:
        return None
    rows = [part for part in state.parts if part.kind == "rows"]
    if len(rows) > 1 or rows[0].outer > 1:
        return None
    if len(state.parts) > 1 and value.shape[state.dim] == state.size(call.units.count):
        return state
    inner = -(-value.shape[state.dim] // call.units.count)
    short = call.units.short(inner, value.shape[state.dim])
    return Rows(state.dim, (Part("rows", inner, 1, short),)) if 0 <= short < inner else None


def _fits(state: Rows, value: torch.Tensor, units: RowUnits) -> bool:
    size = state.size(units.count) + sum(state.pad)
    return 0 <= state.dim < value.ndim and value.shape[state.dim] == size


def row_placeholders(sized: Sized, rows: Mapping[str, int], units: RowUnits) -> dict[str, Rows]:
    """Where the rows lie in the inputs that have some; `rows`: their row dimensions by input name."""
    places: dict[str, Rows] = {}
    for node in sized.graph.find_nodes(op="placeholder"):
        dim = rows.get(node.meta.get("input", ""))
        if dim is not None:
            size = node.meta["val"].shape[dim]
            inner = -(-units.each * size // units.rows)
            short = units.short(inner, size)
            if not 0 <= short < inner:
                raise CompileError(
                    f"input {node.meta['input']} has {size} entries in dimension {dim}, which {units.count} units of "
                    f"{units.each} of {units.rows} rows cannot share; leave it out of sample=, it is cut where it "
                    "meets the rows"
                )
            places[node.name] = Rows(dim, (Part("rows", inner, 1, short),))
    return places


def placed(state: Place) -> str:
    """A state in words."""
    return "the same for all patches" if state is None else str(state)
