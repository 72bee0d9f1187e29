"""What patches do that differ in their units alone: two graphs are written, and every number of others is on a line.

units 1:5    x = halo(...) [2, 4, 10, 64]    view(x, [2, 512, 8])
units 1:9    x = halo(...) [2, 4, 18, 64]    view(x, [2, 1024, 8])
6 units                          14                      768

Operations with equal numbers in both graphs are a class, and take equally long: seconds are asked for once in a class.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import fx

from passes.rows import RowPlan
from passes.rows.how import Window
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import Patch
from passes.sampling.work import PatchWork, SecondsOf, Tellers, owners_of, value_bytes, work_of

_FEW = 8
"""Units of an image of which every patch has its own graph."""


@dataclass(frozen=True, eq=False)
class Alike:
    """The graphs of two patches, node by node, with so many `units`."""

    plan: RowPlan
    units: tuple[int, int]
    pairs: tuple[tuple[fx.Node, fx.Node], ...]

    def work(self, units: int, tellers: Tellers, seconds_of: SecondsOf) -> PatchWork:
        """Of a patch of so many units, one of these."""
        graph, env, made = fx.Graph(), dict[fx.Node, fx.Node](), dict[int, fx.Node]()
        line = _Line(*self.units, units)

        def operand(one: fx.Node, two: fx.Node) -> fx.Node:
            if one not in env:
                env[one] = graph.placeholder(one.name)
                env[one].meta.update(one.meta, val=line.at(one.meta["val"], two.meta["val"]))
            return env[one]

        for kind, (one, two) in self.classes.items():
            arguments = line.at((one.args, dict(one.kwargs)), (two.args, dict(two.kwargs)), operand)
            made[kind] = graph.create_node("call_function", one.target, *arguments)
            made[kind].meta.update(one.meta, val=line.at(one.meta["val"], two.meta["val"]))
        found = seconds_of(graph)
        of_class = {kind: found.get(node, 0.0) for kind, node in made.items()}
        seconds = {node: of_class[kind] for node, kind in self.kinds.items()}
        sizes = {node: line.number(*both) for node, both in self.sizes.items()}
        return work_of(self.owners, sizes, seconds, tellers, self.plan.sized.result.name)

    @cached_property
    def owners(self) -> Mapping[fx.Node, str]:
        return owners_of(self.pairs[0][0].graph, self.plan)

    @cached_property
    def kinds(self) -> Mapping[fx.Node, int]:
        """The class of every operation of the first graph, by number."""
        number = defaultdict[object, int](count().__next__)
        likes = {one: number[_both(one.meta.get("val"), two.meta.get("val"), {})] for one, two in self.pairs}
        return {
            one: number[one.target, _both(one.args, two.args, likes), _both(one.kwargs, two.kwargs, likes), likes[one]]
            for one, two in self.pairs
            if one.op == "call_function"
        }

    @cached_property
    def classes(self) -> Mapping[int, tuple[fx.Node, fx.Node]]:
        return {self.kinds[one]: (one, two) for one, two in self.pairs if one in self.kinds}

    @cached_property
    def sizes(self) -> Mapping[fx.Node, tuple[int, int]]:
        """Bytes of every value in both graphs."""
        return {one: (value_bytes(one), value_bytes(two)) for one, two in self.pairs}


def alike(plan: RowPlan, patch: Patch, shared: frozenset[str]) -> Alike | None:
    """What patches do that are where this one is, and own what it owns; None where each has its own graph."""
    if plan.units.count < _FEW or patch.is_whole:
        return None
    units = plan.units.count // 4, plan.units.count // 2
    one, two = (patch_graph(plan, _like(patch, size), None, shared) for size in units)
    pairs = tuple(zip(one.nodes, two.nodes, strict=False))
    if len(one.nodes) != len(two.nodes) or any((a.name, a.target) != (b.name, b.target) for a, b in pairs):
        return None
    found, line = Alike(plan, units, pairs), _Line(*units, units[0] + 1)
    try:
        for kind in found.classes.values():
            a, b = ([node.args, dict(node.kwargs), node.meta["val"]] for node in kind)
            line.at(a, b)
    except ArithmeticError:
        return None
    return found


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


def _both(one: Any, two: Any, likes: Mapping[fx.Node, object]) -> object:
    """Both in one, as hashable data; of a node what its value is like."""
    if isinstance(one, fx.Node):
        return likes[one]
    if isinstance(one, torch.Tensor):
        return tuple(one.shape), tuple(two.shape), one.dtype
    if isinstance(one, dict):
        return tuple((name, _both(value, two[name], likes)) for name, value in one.items())
    if isinstance(one, list | tuple):
        return tuple(_both(a, b, likes) for a, b in zip(one, two, strict=True))
    return one, two
