"""The sizes that a trace has left free: the numbers that stand for them in a call, and whether the trace holds there.

sample [s0, 4, s1, s2]                      call [2, 4, 48, 80]    ->   s0 = 2, s1 = 48, s2 = 80
guards Ne(s1//2, 16), Eq(Mod(s1, 8), 0)                            ->   hold; or the call needs a trace of its own
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxpipe.capture import private
from fxpipe.capture.expressions import expression_data, expression_of, symbol
from fxpipe.capture.sizes import expression
from fxpipe.errors import CompileError

Numbers = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class FreeSizes:
    """`shapes` of the inputs by name, in symbols; the trace is right where all `guards` are true and every symbol lies
    within its `bounds` (None is infinity). A batch of one counts as two for guards: it runs as a part of two."""

    shapes: Mapping[str, tuple[Any, ...]]
    guards: tuple[Any, ...]
    bounds: Mapping[sympy.Symbol, tuple[int, int | None]]
    batch: tuple[sympy.Symbol, ...]

    @staticmethod
    def of(inputs: Mapping[str, torch.Tensor], batch: Sequence[sympy.Symbol]) -> "FreeSizes":
        """Of a trace whose inputs have these fake values; `batch`: the symbols of the number of samples."""
        shapes = {name: tuple(map(expression, value.shape)) for name, value in inputs.items()}
        guards, bounds = private.sizes.conditions(list(inputs.values()))
        return FreeSizes(shapes, guards, bounds, tuple(batch))

    def numbers(self, shapes: Mapping[str, Sequence[int]]) -> Numbers:
        """What the symbols are where the inputs have these shapes.

        Raises:
            CompileError: the trace does not hold there; says why.
        """
        numbers: dict[sympy.Symbol, int] = {}
        pairs = [pair for name, shape in shapes.items() for pair in self._pairs(name, shape)]
        for size, number, _ in pairs:
            if size.is_Symbol:
                numbers.setdefault(size, number)
        for size, number, name in pairs:
            if size.xreplace(_integers(numbers)) != number:
                raise CompileError(f"input {name} has {number} entries where the trace has {size}")
        self._require(numbers)
        return numbers

    def _pairs(self, name: str, shape: Sequence[int]) -> list[tuple[Any, int, str]]:
        traced = self.shapes[name]
        if len(shape) != len(traced):
            raise CompileError(f"input {name} has {len(shape)} dimensions, it was traced with {len(traced)}")
        return [(size, int(number), name) for size, number in zip(traced, shape, strict=True)]

    def _require(self, numbers: Numbers) -> None:
        counted = {one: max(number, 2) if one in self.batch else number for one, number in numbers.items()}
        for one, (lower, upper) in self.bounds.items():
            number = counted.get(one)
            if number is None or number < lower or (upper is not None and number > upper):
                raise CompileError(f"the trace holds for {one} from {lower} to {upper}, here it is {number}")
        for guard in self.guards:
            if guard.xreplace(_integers(counted)) != sympy.true:
                raise CompileError(f"the trace holds only where {guard}, here {_said(numbers)}")

    def to_data(self) -> dict[str, Any]:
        """As JSON data; raises Unwritable where that has no word for a guard."""
        return {
            "shapes": {name: list(map(expression_data, shape)) for name, shape in self.shapes.items()},
            "guards": list(map(expression_data, self.guards)),
            "bounds": {one.name: list(bounds) for one, bounds in self.bounds.items()},
            "batch": [one.name for one in self.batch],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "FreeSizes":
        """What `to_data` said; any exception means that the data is none."""
        shapes = {name: tuple(map(expression_of, shape)) for name, shape in data["shapes"].items()}
        bounds = {symbol(name): (int(lower), upper) for name, (lower, upper) in data["bounds"].items()}
        guards = tuple(map(expression_of, data["guards"]))
        return FreeSizes(shapes, guards, bounds, tuple(map(symbol, data["batch"])))


def _integers(numbers: Numbers) -> dict[Any, Any]:
    return {one: sympy.Integer(number) for one, number in numbers.items()}


def _said(numbers: Numbers) -> str:
    return ", ".join(f"{one} is {number}" for one, number in numbers.items())
