"""Follow the image's rows through a captured denoiser: where they lie in every value, what a patch of them needs.

    sample [B, C, H, W]               dim 2: rows 2            units of 2 rows, H/2 of them
    conv, stride 2 [B, C, H/2, W]     dim 2: rows 1            halo: one row above
    group_norm                        dim 2: rows 1            moments
    tokens [B, H/2*W, C]              dim 1: rows W
    cat(text, tokens) [B, T+L, C]     dim 1: whole T | rows W
    attention(q, k, v)                dim 2: whole T | rows W  gather: k, v
    positions [1, L, C] + tokens      dim 1: rows W            cut where they meet the rows

A patch is a run of units, so one walk, over sizes that are numbers, serves every number of patches and every split.
Nothing is assumed of an operation without a rule: it gets its operands whole, which is exact, and a note says so.

layout    where rows lie in a value          follow, table   the rule of every operation, in order
how       what a patch computes instead      rules, views, stretches, windows, products   the rules
sized     the capture at a batch size
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from torch import fx

from fxpipe.capture import Capture
from fxpipe.errors import CompileError
from passes.operations import operation_name
from passes.rows.follow import Note, Walk, placed, row_placeholders
from passes.rows.how import Found, Same
from passes.rows.layout import NeedRows, Place, Result, RowCall, Rows, RowUnits, Slot
from passes.rows.sized import Sized, at_batch_size, plain_like


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Where the rows lie in every value of `sized`, and how a patch of them computes each operation.

    `coarsest` says which operation asked for units of so many rows, None where one row is a unit.
    """

    sized: Sized
    units: RowUnits
    states: Mapping[str, Result]
    found: Mapping[str, Found]
    calls: Mapping[str, RowCall]
    notes: tuple[Note, ...]
    coarsest: str | None

    def state(self, node: fx.Node) -> Result:
        return self.states[node.name]

    def rows(self, node: fx.Node) -> Rows:
        """Of a value that has some."""
        state = self.state(node)
        assert isinstance(state, Rows)
        return state

    @cached_property
    def inputs(self) -> Mapping[str, str]:
        """The model's input that each input placeholder is, by name."""
        placeholders = self.sized.graph.find_nodes(op="placeholder")
        return {node.name: node.meta["input"] for node in placeholders if node.meta["kind"] == "input"}

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Of every operation, by name: those of one kind are computed in the same way by any patch."""
        number, nodes = defaultdict[object, int](count().__next__), self.sized.graph.nodes
        likes = {
            n: number[plain_like(n.meta.get("val"), {}), self.states.get(n.name)] for n in nodes if n.op != "output"
        }

        def kind(node: fx.Node) -> object:
            found = self.found.get(node.name)
            how = found and (type(found.how), plain_like(vars(found.how), likes), tuple(found.wants.items()))
            return node.target, plain_like(node.args, likes), plain_like(node.kwargs, likes), likes[node], how

        return {node.name: number[kind(node)] for node in nodes if node.op == "call_function"}

    def __str__(self) -> str:
        each = f"{self.units.count} units of {self.units.each} rows"
        return "\n".join([f"rows: {each}", *self._lines(), *(f"note: {note}" for note in self.notes)])

    def _lines(self) -> list[str]:
        lines = []
        for name, state in self.states.items():
            states = state if isinstance(state, tuple) else (state,)
            how = self.found[name].how if name in self.found else Same()
            wants = {slot[0]: placed(want) if want else "gathered" for slot, want in self._wants(name)}
            text = [placed(one) for one in dict.fromkeys(states)] + [str(how)] * (
                type(how).__str__ is not object.__str__
            )
            lines.append(f"  {name:<24} {'; '.join(text)}" + "".join(f"; {n} {w}" for n, w in wants.items()))
        return lines

    def _wants(self, name: str) -> Iterable[tuple[Slot, Place]]:
        return self.found[name].wants.items() if name in self.found else ()


def analyse(
    capture: Capture, rows: Mapping[str, int], batch_size: int, sized: Sized | None = None, other: RowPlan | None = None
) -> RowPlan:
    """Follow the rows of a captured denoiser.

    Args:
        rows: the row dimension of every input that has rows, by input name; the first one's entries are the rows.
        batch_size: samples in one call.
        sized: the graph for these, where it is known.
        other: of another number of samples, whose units are no smaller.

    Raises:
        CompileError: an input is not there or has no such dimension; or the graph draws random numbers.
    """
    sized = sized or at_batch_size(capture, batch_size)
    units, coarsest = (other.units, other.coarsest) if other else (RowUnits(_num_rows(sized, rows)), None)
    _refuse_unsafe(sized)
    while True:
        walk = Walk(units)
        try:
            walk.run(sized, row_placeholders(sized, rows, units))
        except NeedRows as need:
            assert walk.at is not None
            units = RowUnits(units.rows, units.each * need.times)
            coarsest = f"module {walk.at.meta.get('path') or '(the model itself)'}: {walk.at.name}, {need.why}"
        else:
            states = {node.name: state for node, state in walk.states.items()}
            found = {node.name: one for node, one in walk.found.items()}
            calls = {node.name: one for node, one in walk.calls.items()}
            return RowPlan(sized, units, states, found, calls, tuple(walk.notes), coarsest)


def _num_rows(sized: Sized, rows: Mapping[str, int]) -> int:
    """Entries of the first row dimension."""
    inputs = {n.meta["input"]: n for n in sized.graph.find_nodes(op="placeholder") if n.meta["kind"] == "input"}
    sizes = list[int]()
    for name, dim in rows.items():
        if name not in inputs:
            raise CompileError(
                f"sample={dict(rows)}: {name!r} is no input that the prediction is made of, which are {[*inputs]}"
            )
        shape = tuple(inputs[name].meta["val"].shape)
        if not 0 <= dim < len(shape):
            raise CompileError(f"sample={dict(rows)}: input {name} is {list(shape)}, it has no dimension {dim}")
        sizes.append(shape[dim])
    if not sizes:
        raise CompileError("sample={}: name the inputs that have rows and which dimension these are, {'sample': 2}")
    return sizes[0]


def _refuse_unsafe(sized: Sized) -> None:
    """Refuse what gathering its operands does not make right, random draws and reads of memory by strides; and what
    predicts nothing."""
    (result,) = (node.args[0] for node in sized.graph.find_nodes(op="output"))
    if result.op == "placeholder" or not result.meta["val"].numel():
        what = f"{result.meta['input']} as it is" if result.op == "placeholder" else "a tensor without entries"
        raise CompileError(f"module (the model itself): forward returns {what}, so that there is nothing to predict")
    for node in sized.graph.nodes:
        path = f"module {node.meta.get('path') or '(the model itself)'}"
        if node.meta.get("kind") == "draw":
            raise CompileError(
                f"{path}: forward draws random numbers ({node.name}), which patches would draw differently; pass them "
                "as an input, or drop out in training alone"
            )
        if operation_name(node.target).startswith("as_strided"):
            raise CompileError(
                f"{path}: {node.target} ({node.name}) reads memory by strides, which patches lay out differently; use "
                "views, unfold or indexing"
            )
