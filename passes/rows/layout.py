"""Where the image's rows lie in one value, and one graph node seen with the rows of its operands.

sample            [B, C, 34, W]        9 units of 4 rows, 2 short     Rows(2, rows 4-2)
patch embedding   [B, 17*W/2, D]       tokens of half as many rows    Rows(1, rows W-W/2)
frames of video   [B, F*H*W, D]        each frame has all the rows    Rows(1, F x rows W)
text and image    [B, T + H*W, D]      text belongs to no row         Rows(1, whole T | rows W)
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from passes.operations import BoundCall

Slot = tuple[str, int | None]
"""An operand by its argument's name, and its place where that is a list."""


@dataclass(frozen=True)
class RowUnits:
    """The `rows` entries of the sample's row dimension as units of `each`; the last one may be short."""

    rows: int
    each: int = 1

    @property
    def count(self) -> int:
        return -(-self.rows // self.each)

    def short(self, inner: int, size: int) -> int:
        """What the last unit lacks of `inner` entries, in a dimension of `size`; below 0 where it has more."""
        return self.count * inner - size


@dataclass(frozen=True)
class Part:
    """A stretch of a dimension.

    rows   outer x (U*inner - short) entries: of every copy, unit u has [u*inner, (u+1)*inner), the last `short` less
    whole  `inner` entries that belong to no row
    """

    kind: Literal["rows", "whole"]
    inner: int
    outer: int = 1
    short: int = 0

    def size(self, units: int) -> int:
        return self.outer * (self.inner * units - self.short) if self.kind == "rows" else self.inner

    def times(self, each: int) -> "Part":
        """Of a dimension with so many entries for every one."""
        return Part(self.kind, self.inner * each, self.outer, self.short * each)

    def __str__(self) -> str:
        text = f"{self.outer} x " * (self.outer > 1) + f"{self.kind} {self.inner}"
        return text + f"-{self.short}" * (self.short > 0)


@dataclass(frozen=True)
class Rows:
    """Dimension `dim` is its parts one after the other.

    `pad`: rows above and below that are not there yet, made as `mode` of `torch.nn.functional.pad` says.
    """

    dim: int
    parts: tuple[Part, ...]
    pad: tuple[int, int] = (0, 0)
    mode: str = "constant"

    @staticmethod
    def of(dim: int, parts: Iterable[Part]) -> "Rows":
        """Of what belongs to no row, one part where several follow each other."""
        joined: list[Part] = []
        for part in parts:
            if joined and joined[-1].kind == part.kind == "whole":
                part = Part("whole", joined.pop().inner + part.inner)
            joined.append(part)
        return Rows(dim, tuple(joined))

    def at(self, dim: int) -> "Rows":
        return replace(self, dim=dim)

    def size(self, units: int) -> int:
        return sum(part.size(units) for part in self.parts)

    @cached_property
    def all_rows(self) -> bool:
        """Whether every entry belongs to some row."""
        return all(part.kind == "rows" for part in self.parts)

    @cached_property
    def single(self) -> Part | None:
        """The part, where there is one alone, of rows."""
        return self.parts[0] if len(self.parts) == 1 and self.all_rows else None

    @cached_property
    def plain(self) -> Part | None:
        """The part of rows in their order, each once; it may be cut, padded, convolved."""
        return self.single if self.single is not None and self.single.outer == 1 else None

    def __str__(self) -> str:
        pad = f" padded {self.pad[0]}, {self.pad[1]}" if self.pad != (0, 0) else ""
        return f"dim {self.dim}: {' | '.join(map(str, self.parts))}{pad}"


Place = Rows | None
"""None: the value is the same for all patches."""
Result = Place | tuple[Place, ...]


class NoRule(Exception):
    """What an operation does with rows cannot be followed: it is to have its operands whole."""


class NeedRows(Exception):
    """Units of so many times as many rows are needed, for this reason."""

    def __init__(self, times: int, why: str) -> None:
        super().__init__(why)
        self.times, self.why = times, why


@dataclass(frozen=True)
class RowCall(BoundCall):
    """A call, and where the rows lie in each operand."""

    states: Mapping[fx.Node, Result]
    units: RowUnits

    @cached_property
    def operands(self) -> dict[Slot, fx.Node]:
        """The tensor operands in order, each as often as it is used."""
        return dict(operands_of(self.arguments))

    @cached_property
    def live(self) -> dict[Slot, fx.Node]:
        """The operands that have rows."""
        return {slot: node for slot, node in self.operands.items() if self.states[node] is not None}

    def rows(self, node: fx.Node) -> Place:
        state = self.states[node]
        if isinstance(state, tuple):
            raise NoRule("it reads several results at once")
        return state

    def first(self) -> tuple[fx.Node, Rows]:
        """The first operand, which must have the rows, alone."""
        slot, node = next(iter(self.operands.items()))
        if list(self.live) != [slot]:
            raise NoRule("its other operands have rows")
        state = self.rows(node)
        assert state is not None
        return node, state

    @property
    def value(self) -> torch.Tensor:
        """The result on the meta device; the first of several."""
        value = self.node.meta["val"]
        return value[0] if isinstance(value, list | tuple) else value  # type: ignore[no-any-return]

    def each(self, state: Place) -> Result:
        """The state of the result where each of several has the same."""
        value = self.node.meta["val"]
        return tuple(state for _ in value) if isinstance(value, list | tuple) else state


def operands_of(arguments: Mapping[str, Any]) -> Iterator[tuple[Slot, fx.Node]]:
    for name, value in arguments.items():
        if isinstance(value, fx.Node):
            yield (name, None), value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, fx.Node):
                    yield (name, index), item


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
