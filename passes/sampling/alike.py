"""What patches do that differ in their units alone: two graphs are written, and every number of others is on a line.

units 1:5    x = halo(...) [2, 4, 10, 64]    view(x, [2, 512, 8])
units 1:9    x = halo(...) [2, 4, 18, 64]    view(x, [2, 1024, 8])
6 units                          14                      768

Of captured operations that are computed in the same way by every patch, as those of equal layers are, one is written.
Which are, a graph of all operations tells once: of an image of another size it is the same, but for its numbers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.plan import row_ops
from fxpipe.remembered import remembered
from passes.rows import RowPlan
from passes.rows.how import Window
from passes.rows.sized import plain_like
from passes.sampling.lives import Lives
from passes.sampling.of_inputs import of_inputs
from passes.sampling.patch_graph import PatchPiece, patch_graph
from passes.sampling.patches import Patch
from passes.sampling.work import (
    PatchWork,
    SecondsOf,
    SentBytes,
    Tellers,
    inside_bytes,
    owners_of,
    sent_of,
    value_bytes,
    work_of,
)

_FEW = 8
"""Units of an image of which every patch has its own graph."""


@dataclass(frozen=True, eq=False)
class PatchForm:
    """The graph of a patch, whatever its numbers. `lives` as of `PatchWork`; `firsts`: of every operation the one, by
    name, that is like it and written for the first of all captured ones that are `groups`; of values that another patch
    owns those that are `shared` are read. `captured`: what the captured operations read."""

    graph: fx.Graph
    lives: Lives
    firsts: Mapping[fx.Node, str]
    groups: tuple[tuple[str, ...], ...]
    shared: frozenset[str]
    captured: Mapping[str, tuple[str, ...]]

    @cached_property
    def given(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.find_nodes(op="placeholder"))

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """What is called for the first of every group."""
        return {node.name: node.target for node, first in self.firsts.items() if node.name == first}

    @cached_property
    def targets(self) -> Mapping[str, Any]:
        return {node.name: node.target for node in self.firsts}


class _Made(NamedTuple):
    """What patches of some units do: the first operations by name, bytes of all values, and of what is inside some
    operations, seconds of all."""

    nodes: Mapping[str, fx.Node]
    sizes: Mapping[fx.Node, int]
    inside: Mapping[fx.Node, int]
    seconds: Mapping[fx.Node, float]


@dataclass(frozen=True, eq=False)
class Alike:
    """The graphs of two patches, with so many `units`: their operations by the names of those that are first in their
    form."""

    plan: RowPlan
    units: tuple[int, int]
    form: PatchForm
    pairs: Mapping[str, tuple[fx.Node, fx.Node]]
    _works: dict[object, PatchWork] = field(default_factory=dict)

    def work(self, units: int, tellers: Tellers, seconds_of: SecondsOf) -> PatchWork:
        """Of a patch of so many units; patches that tell the same, too, have one.

        Raises ArithmeticError of so many that it reads over both borders of the image.
        """
        made, known, firsts = self._at(units, seconds_of), dict[object, SentBytes](), self.form.firsts
        sent = {name: sent_of(node, tellers, known) for name, node in made.nodes.items() if "exchange" in node.meta}
        key = units, *sent.values()
        if key not in self._works:
            result = self.plan.sized.result.name
            self._works[key] = work_of(
                self.form.lives, made.sizes, made.inside, made.seconds, lambda node: sent[firsts[node]], result
            )
        return self._works[key]

    @remembered
    def _at(self, units: int, seconds_of: SecondsOf) -> _Made:
        graph, env, made = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Node]()
        line = _Line(*self.units, units)

        def operand(one: fx.Node, two: fx.Node) -> fx.Node:
            if one not in env:
                env[one] = graph.placeholder(one.name)
                env[one].meta.update(one.meta, val=line.at(one.meta["val"], two.meta["val"]))
            return env[one]

        for name, (one, two) in self.pairs.items():
            arguments = line.at((one.args, dict(one.kwargs)), (two.args, dict(two.kwargs)), operand)
            made[name] = graph.create_node("call_function", one.target, *arguments)
            made[name].meta.update(one.meta, val=line.at(one.meta["val"], two.meta["val"]))
            if one.target is row_ops.cut_rows and any(
                start + length > each for *_, each, start, length in arguments[0][2]
            ):
                raise ArithmeticError(f"{name} of {units} units has less around it than it reads")
        found, firsts = seconds_of(graph), self.form.firsts
        of_firsts = {name: (value_bytes(node), found.get(node, 0.0)) for name, node in made.items()}
        of_given = {node: value_bytes(self.plan.sized.nodes[node.name]) for node in self.form.given}
        sizes = of_given | {node: of_firsts[first][0] for node, first in firsts.items()}
        held = inside_bytes(made.values())
        inside = {node: held[made[first]] for node, first in firsts.items() if made[first] in held}
        return _Made(made, sizes, inside, {node: of_firsts[first][1] for node, first in firsts.items()})


def alike(plan: RowPlan, patch: Patch, shared: frozenset[str], known: PatchForm | None = None) -> Alike | None:
    """What patches do that are where this one is, and own what it owns; None where each has its own graph.

    `known`: what such a graph was at another size.
    """
    if plan.units.count < _FEW or patch.is_whole:
        return None
    if known is not None and known.shared == shared and _holds(plan, known) and (found := _alike(plan, patch, known)):
        return found
    return _alike(plan, patch, _form(plan, _like(patch, _units(plan)[0]), shared))


def _units(plan: RowPlan) -> tuple[int, int]:
    return plan.units.count // 4, plan.units.count // 2


def _form(plan: RowPlan, patch: Patch, shared: frozenset[str]) -> PatchForm:
    graph = patch_graph(plan, patch, None, shared)
    owners, number = owners_of(graph, plan), defaultdict[object, int](count().__next__)
    likes = {node: number[plain_like(node.meta.get("val"), {})] for node in graph.nodes}
    written: dict[str, list[fx.Node]] = {}
    for node, owner in owners.items():
        written.setdefault(owner, []).append(node)
    groups = dict[object, list[str]]()
    for owner, nodes in written.items():
        told = ((n.target, plain_like(n.args, likes), plain_like(n.kwargs, likes), likes[n]) for n in nodes)
        groups.setdefault((plan.kinds[owner], *told), []).append(owner)
    firsts = {
        node: first.name
        for names in groups.values()
        for name in names
        for node, first in zip(written[name], written[names[0]], strict=True)
    }
    return PatchForm(graph, Lives(owners), firsts, tuple(map(tuple, groups.values())), shared, plan.sized.reads)


def _holds(plan: RowPlan, form: PatchForm) -> bool:
    """Whether what was alike at another size is so at this one."""
    kinds = plan.kinds
    return form.captured == plan.sized.reads and all(len({kinds[name] for name in names}) == 1 for names in form.groups)


def _alike(plan: RowPlan, patch: Patch, form: PatchForm) -> Alike | None:
    units, names = _units(plan), tuple(names[0] for names in form.groups)
    windows = (plan.sized.nodes[name] for name in names if isinstance(plan.found[name].how, Window))
    made = {*names, *(node.name for one in windows for node in of_inputs(plan, one.all_input_nodes[0]) or ())}
    operands = {operand for name in made for operand in plan.sized.nodes[name].all_input_nodes}
    reads = tuple(n.name for n in operands if n.op == "call_function" and n.name not in made)
    piece = PatchPiece(frozenset(made), frozenset(), reads, names, form.shared, has_inputs=True)
    graphs = [patch_graph(plan, _like(patch, size), piece) for size in units]
    one, two = ({node.name: node for node in graph.nodes if node.op == "call_function"} for graph in graphs)
    targets = [{name: node.target for name, node in nodes.items()} for nodes in (one, two)]
    if targets[0] != targets[1] or not form.written.items() <= targets[0].items() <= form.targets.items():
        return None
    pairs, line = {name: (one[name], two[name]) for name in form.written}, _Line(*units, units[0] + 1)
    try:
        for both in pairs.values():
            a, b = ([node.args, dict(node.kwargs), node.meta["val"]] for node in both)
            line.at(a, b)
    except ArithmeticError:
        return None
    return Alike(plan, units, form, pairs)


def ends_apart(plan: RowPlan) -> bool:
    """Whether the patch at the end does something else than others of its units."""
    states = [one for state in plan.states.values() for one in (state if isinstance(state, tuple) else (state,))]
    short = any(part.short for state in states if state is not None for part in state.parts)
    windows = (found.how for found in plan.found.values() if isinstance(found.how, Window))
    return short or any(how.end != how.below for how in windows)


def _like(patch: Patch, units: int) -> Patch:
    """One of so many units in its place."""
    count = patch.count
    first = count - units if patch.stop == count else min(patch.first, 1)
    return Patch(patch.index, first, first + units, count, patch.owns)


@dataclass(frozen=True)
class _Line:
    """Numbers at so many units, by what they are at two others."""

    one: int
    two: int
    units: int

    def number(self, one: int, two: int) -> int:
        """Raises ArithmeticError where they are on no line."""
        slope, rest = divmod(two - one, self.two - self.one)
        if rest:
            raise ArithmeticError(f"from {one} to {two} in {self.two - self.one} units")
        return one + slope * (self.units - self.one)

    def at(self, one: Any, two: Any, operand: Callable[[fx.Node, fx.Node], Any] | None = None) -> Any:
        """Of a nest of numbers, tensors, which have shapes of them, and nodes, for which an `operand` is put."""
        if isinstance(one, fx.Node):
            return operand and operand(one, two)
        if isinstance(one, torch.Tensor):
            shape = [self.number(a, b) for a, b in zip(one.shape, two.shape, strict=True)]
            return torch.empty(shape, dtype=one.dtype, device="meta")
        if isinstance(one, dict):
            return {name: self.at(value, two[name], operand) for name, value in one.items()}
        if isinstance(one, list | tuple):
            return type(one)(self.at(a, b, operand) for a, b in zip(one, two, strict=True))
        return self.number(one, two) if type(one) is int else one
