"""Numbers that every call moves on by as much, at all later calls at once: which of these decide as a traced one does?

self.step += 1; h = h if self.step < 10 else 2 * h      step = 2, 3, 4, ...: 3, ..., 9 as the traced one, 10, ... not
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy
import torch

from fxpipe.errors import CaptureError

CALLS = numpy.unique(numpy.geomspace(1, 1e6, 100_000).astype(numpy.int64))
"""After two that were traced: each of the first thousands, then ever fewer."""

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_OF_ONE: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "invert": operator.invert,
    "floor": numpy.floor, "ceil": numpy.ceil, "trunc": numpy.trunc, "round": numpy.round,
}  # fmt: skip
_CONVERSIONS = ("int", "float", "complex", "index", "hash")


class AlikeCalls:
    """A trace of one of `CALLS`, by its place there: which of the others go the same way, and whether forward has
    `converted` a number to what does not tell."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.alike = numpy.ones(len(CALLS), bool)
        self.converted = False

    def count(self, first: float, second: float) -> "Count":
        """A number, by its values after the two calls before."""
        return Count(second + (second - first) * CALLS, self)

    def taken(self, outcomes: Any) -> bool:
        now = bool(outcomes[self.place])
        self.alike &= outcomes == now
        return now


class Count:
    """A number's values at all calls: to Python's eyes an integer or a float, which tells what is decided by it. Its
    text is that of the last call."""

    __array_ufunc__ = None  # numpy's numbers leave operations to it

    def __init__(self, values: Any, ahead: AlikeCalls) -> None:
        self.values, self.ahead = numpy.broadcast_to(values, CALLS.shape), ahead

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.values[0].item())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Count":
        return self  # those of an export's copy of the model tell, too

    def __bool__(self) -> bool:
        return self.ahead.taken(self.values != 0)

    def __format__(self, form: str) -> str:
        return format(self.values[-1].item(), form)

    def __str__(self) -> str:
        return str(self.values[-1].item())

    __repr__ = __str__

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other


def _values(value: Any) -> Any:
    return value.values if type(value) is Count else value


def _of_two(act: Callable[[Any, Any], Any], compares: bool, reflected: bool = False) -> Callable[[Any, Any], Any]:
    def operate(self: Count, other: Any) -> Any:
        if isinstance(other, torch.Tensor | torch.SymInt | torch.SymFloat):
            return _converted(self)
        if not isinstance(other, int | float | numpy.number):
            return NotImplemented
        both = self.values, _values(other)
        with numpy.errstate(all="ignore"):
            made = act(*(both[::-1] if reflected else both))
        return self.ahead.taken(made) if compares else Count(made, self.ahead)

    return operate


def _of_itself(act: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: Count, *digits: Any) -> Any:
        made = act(self.values, *digits)
        return Count(made if digits or act in vars(operator).values() else made.astype(numpy.int64), self.ahead)

    return operate


def _converted(self: Count, *given: Any) -> Any:
    self.ahead.converted = True
    raise CaptureError("forward converts a number that it counts (by int or float, as an index, a key, or a tensor)")


for _name in _ARITHMETIC:
    _act = getattr(operator, f"__{_name}__")
    setattr(Count, f"__{_name}__", _of_two(_act, compares=False))
    setattr(Count, f"__r{_name}__", _of_two(_act, compares=False, reflected=True))
for _name in _COMPARISONS:
    setattr(Count, f"__{_name}__", _of_two(getattr(operator, _name), compares=True))
for _name, _one in _OF_ONE.items():
    setattr(Count, f"__{_name}__", _of_itself(_one))
for _name in _CONVERSIONS:
    setattr(Count, f"__{_name}__", _converted)
