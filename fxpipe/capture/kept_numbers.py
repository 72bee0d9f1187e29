"""Whether forward decides by a number that it keeps, such as a count of its calls: a later call may decide otherwise.

self.step += 1; h = h if self.step < 10 else 2 * h          another computation from the tenth call on
self.step += 1; if self.step % 100 == 0: print(self.step)   the same one either way
"""

import operator
import sys
import types
from collections.abc import Callable
from typing import Any

Place = tuple[types.CodeType, int]
"""An instruction of some code."""

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")


class Decisions:
    """The places where code has compared numbers that were `noted`, or what it computed of them; the first comparison
    at the place `other` comes out otherwise. What lies under a number in a dict or a set is not seen."""

    def __init__(self, other: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self._other = other

    def __deepcopy__(self, memo: dict[int, Any]) -> "Decisions":
        return self  # numbers of an export's copy of the model tell it, too

    def noted(self, value: Any) -> Any:
        """A number that tells when it is compared; any other value as it is."""
        kind = _KINDS.get(type(value))
        if kind is None:
            return value
        number = kind(value)
        number.plain, number.decisions = value, self
        return number

    def taken(self, outcome: Any) -> Any:
        """What a comparison two frames above gives."""
        if outcome is not True and outcome is not False:  # a trace puts another `bool` in its place
            return outcome
        frame = sys._getframe(2)
        place = frame.f_code, frame.f_lasti
        is_first = place not in self.places
        self.places[place] = None
        return outcome != (is_first and place == self._other)


def _plain(value: Any) -> Any:
    return getattr(value, "plain", value) if type(value) in _KINDS.values() else value


def _computed(act: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        both = self.plain, _plain(other)
        return self.decisions.noted(act(*(both[::-1] if reflected else both)))

    return compute


def _compared(act: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        return self.decisions.taken(act(self.plain, _plain(other)))

    return compare


def _kind(of: type) -> Any:
    members: dict[str, Any] = {
        "__hash__": of.__hash__,
        "__bool__": lambda self: self.decisions.taken(operator.truth(self.plain)),
    }
    for name in _ARITHMETIC:
        act = getattr(operator, name)
        members |= {f"__{name}__": _computed(act, reflected=False), f"__r{name}__": _computed(act, reflected=True)}
    members |= {f"__{name}__": _compared(getattr(operator, name)) for name in _COMPARISONS}
    return type(of.__name__, (of,), members)


_KINDS = {int: _kind(int), float: _kind(float)}
