"""Patches: runs of units, and how much of every value each of them has.

9 units of 4 rows, 2 short: 34 rows       bounds 0 4 9       patch 0: rows 0:16, patch 1: rows 16:34
at half the rows, 9 units of 2, 1 short                      patch 0: rows 0:8,  patch 1: rows 8:17
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.row_ops import Stretch
from passes.rows import RowPlan
from passes.rows.layout import Part, Place, Rows, shape_of


@dataclass(frozen=True)
class Patch:
    """Units [first, stop) of `count`; `owns` also what belongs to no row (text), beside rows in one dimension."""

    index: int
    first: int
    stop: int
    count: int
    owns: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return self.stop - self.first == self.count

    def of_part(self, part: Part) -> int:
        """Entries of one copy of a part."""
        if part.kind == "whole":
            return part.inner if self.owns else 0
        return (self.stop - self.first) * part.inner - (part.short if self.stop == self.count else 0)

    def size(self, state: Rows) -> int:
        return sum(part.outer * self.of_part(part) for part in state.parts)

    def span(self, state: Rows) -> tuple[int, int]:
        """Its rows [start, stop) of a dimension of rows in their order."""
        assert state.plain is not None
        start = self.first * state.plain.inner
        return start, start + self.size(state)

    def num_rows(self, state: Rows) -> int:
        """Entries that belong to rows."""
        return sum(part.outer * self.of_part(part) for part in state.parts if part.kind == "rows")

    def shape(self, node: fx.Node, state: Place) -> list[int]:
        """The shape of a captured value in this patch."""
        shape = list(shape_of(node))
        if state is not None:
            shape[state.dim] = self.size(state)
        return shape

    def stretches(self, state: Rows, within: "Patch | None" = None) -> list[Stretch]:
        """This patch's entries of the whole dimension, or of what a patch has of it that this one lies within."""
        at, found = 0, list[Stretch]()
        for part in state.parts:
            each = part.size(self.count) // part.outer if within is None else within.of_part(part)
            first = self.first if within is None else self.first - within.first
            start = first * part.inner if part.kind == "rows" else 0
            found.append((at, part.outer, each, start, self.of_part(part)))
            at += part.outer * each
        return found

    def local(self, state: Rows, entry: int) -> int:
        """Where an entry that begins a part, or lies in a whole one, is in this patch."""
        at, here = 0, 0
        for part in state.parts:
            size = part.size(self.count)
            if entry < at + size:
                return here + (entry - at)
            at, here = at + size, here + part.outer * self.of_part(part)
        return here


def even_bounds(count: int, num_patches: int) -> tuple[int, ...]:
    """Bounds of patches whose units differ by one at most, the larger ones first."""
    return (0, *accumulate(microbatch_sizes(count, num_patches)))


def shared_bounds(count: int, speeds: Sequence[float], first: float = 0.0) -> tuple[int, ...]:
    """Bounds of patches whose units are as even in time as can be: a patch of u units takes u over its speed.

    Args:
        first: units that what the first patch has beside its own takes as long as.
    """
    sizes = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        ends = [(size + 1 + first * (place == 0)) / speeds[place] for place, size in enumerate(sizes)]
        sizes[ends.index(min(ends))] += 1
    return (0, *accumulate(sizes))


def patches_of(plan: RowPlan, bounds: Sequence[int], text: Literal["all", "first"] = "all") -> list[Patch]:
    """The patches between these bounds, from 0 to the number of units.

    Args:
        text: which patches own what belongs to no row.

    Raises:
        CompileError: they leave units out, or one of them has none.
    """
    count = plan.units.count
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != count or sorted(set(bounds)) != list(bounds):
        raise CompileError(f"bounds {list(bounds)} are no patches of {_units(plan)}: from 0 to {count}, each larger")
    return [Patch(i, a, b, count, text == "all" or i == 0) for i, (a, b) in enumerate(pairwise(bounds))]


def held(plan: RowPlan, patch: Patch, name: str) -> torch.Tensor:
    """Shape and type of what a patch has of a captured tensor; nothing is cut for a patch that is whole."""
    node = plan.sized.nodes[name]
    state = None if patch.is_whole else plan.state(node)
    assert not isinstance(state, tuple)
    return torch.empty(patch.shape(node, state), dtype=node.meta["val"].dtype, device="meta")


def first_owns(patches: Sequence[Patch]) -> list[Patch]:
    """The same patches, the first of which alone has what belongs to no row."""
    return [replace(one, owns=one.index == 0) for one in patches]


def all_own(patches: Sequence[Patch]) -> bool:
    """Whether every patch has what belongs to no row."""
    return all(patch.owns for patch in patches)


def require_units(plan: RowPlan, num_patches: int) -> None:
    """Refuse more patches than units."""
    if plan.units.count < num_patches:
        why = f" ({plan.coarsest})" if plan.coarsest else ""
        raise CompileError(
            f"{num_patches} patches of {_units(plan)}{why}: every patch needs one; use {plan.units.count} patches or "
            "fewer, or a larger image"
        )


def _units(plan: RowPlan) -> str:
    return f"{plan.units.count} units of {plan.units.each} of {plan.units.rows} rows"


def neighbours(
    patches: Sequence[Patch], patch: Patch, state: Rows, above: int, below: int
) -> dict[int, tuple[int, int]]:
    """What a patch reads of others around its rows: (from which of its rows on, how many), by their number."""
    start, stop = patch.span(state)
    found = {}
    for other in patches:
        first, last = other.span(state)
        low, high = max(first, start - above), min(last, stop + below)
        if other.index != patch.index and low < high:
            found[other.index] = low - first, high - low
    return found
