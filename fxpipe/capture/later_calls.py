"""Whether forward computes at all later calls what it does at the first, by what it keeps in Python between them.

self.step += 1; h = h if self.step < 10 else 2 * h          another computation from the tenth call on
self.step += 1; if self.step % 100 == 0: print(self.step)   the same one either way
self.late = self.step > 10                                  traced with that, too

The second call is traced as it is. What it has changed again moves on: forward is traced with a `Count` in a number's
place, which tells what calls decide otherwise, then as at one of these, until none is left.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch

from fxpipe.capture.files import is_installed
from fxpipe.capture.holders import ABSENT, PLAIN, is_opaque
from fxpipe.capture.kept_numbers import CALLS, AlikeCalls, Count
from fxpipe.capture.state import WrittenEntry

Lengths = dict[int, Count]
"""Of what grows, by id."""
Again = Callable[[Sequence[WrittenEntry], Lengths], Sequence[WrittenEntry] | None]
"""A trace of another call in such a state: what it gives other values, or None where it computes something else."""
_State = Mapping[tuple[int, Any], WrittenEntry]
"""By place: what moves has different values before and after the second call."""

_MOST = 16
"""Traces of later calls: a forward of more ways is not followed."""
_FAR = int(numpy.searchsorted(CALLS, 1000))
_LONGEST = 10_000


def later_is_other(written: Sequence[WrittenEntry], second: Sequence[WrittenEntry], again: Again) -> bool:
    """Whether some later call may compute something else, by what the first two have written."""
    moving = [one for one in second if _content(one.before) != _content(one.after)]
    if any(one.after is ABSENT or isinstance(one.after, bytes) for one in moving):  # what shrinks, and arrays
        return True
    seen = {(one.place, _content(value)) for one in (*written, *second) for value in (one.before, one.after)}
    states: list[_State] = [_by_place([replace(one, before=one.after) for one in written] + moving)]
    traces = 0
    for state in states if moving else []:
        left = numpy.ones(len(CALLS), bool)
        while left.any():
            ahead = AlikeCalls(_FAR if left.all() else int(left.argmax()))
            carried, lengths = _carried(state, ahead)
            found, traces = again(carried, lengths), traces + 1
            if found is None or ahead.converted or traces > _MOST:
                return True
            left &= ~ahead.alike
            seen |= {(one.place, _content(one.after)) for one in carried}
            new = [one for one in found if not _grows(one, state) and (one.place, _content(one.after)) not in seen]
            seen |= {(one.place, _content(one.after)) for one in new}
            states += [{**state, **_by_place([_moving_from(one, state.get(one.place)) for one in new])}] if new else []
    return False


def _by_place(written: Sequence[WrittenEntry]) -> _State:
    return {one.place: one for one in written}


def _carried(state: _State, ahead: AlikeCalls) -> tuple[list[WrittenEntry], Lengths]:
    """What is written as it is after so many calls, and how long it is then."""
    lengths: Lengths = {}
    carried = [replace(one, after=_moved(one.before, one.after, ahead, lengths)) for one in state.values()]
    grown: dict[int, list[WrittenEntry]] = {}
    for one in state.values():
        if one.before is ABSENT and not one.holder.of_attributes:
            grown.setdefault(one.place[0], []).append(one)
    for place, news in grown.items():
        holder, each = news[-1].holder, len(news)
        now = len(holder.entries().keys() | {key for where, key in state if where == place})
        lengths[place] = ahead.count(now - each, now)
        if isinstance(holder.values, list):
            carried += [replace(news[-1], key=now + more) for more in range(_more(each, ahead))]
    return carried, lengths


def _more(each: int, ahead: AlikeCalls) -> int:
    return min(each * int(CALLS[ahead.place]), _LONGEST)


def _moved(first: Any, second: Any, ahead: AlikeCalls, lengths: Lengths) -> Any:
    """A value of later calls, by those after two of them."""
    kind = type(second)
    if first is second or kind is not type(first):
        return second
    if kind in (int, float):
        return second if first == second else ahead.count(first, second)
    if kind in (list, tuple, str):
        each = len(second) - len(first)
        if each > 0:
            second = second + second[-1:] * _more(each, ahead)
            lengths[id(second)] = ahead.count(len(first), len(first) + each)
        elif each == 0 and kind is not str:
            second = kind(_moved(*pair, ahead, lengths) for pair in zip(first, second, strict=True))
    elif kind is dict:
        second = {key: _moved(first.get(key), value, ahead, lengths) for key, value in second.items()}
    elif _is_own(second):
        second, both = copy.copy(second), (vars(first), vars(second))
        vars(second).update(_moved(*both, ahead, lengths))
    return second


def _grows(one: WrittenEntry, state: _State) -> bool:
    """Whether an entry is of what is known to grow."""
    known = state.get(one.place)
    if known is not None and isinstance(known.after, list | tuple | str) and type(known.before) is type(known.after):
        return len(known.after) > len(known.before)
    holders = {where for (where, _), other in state.items() if other.before is ABSENT}
    return one.before is ABSENT and not one.holder.of_attributes and one.place[0] in holders


def _moving_from(one: WrittenEntry, known: WrittenEntry | None) -> WrittenEntry:
    """An entry with another value than it could be expected to have: moving on from there as it did before."""
    after = one.after.values[one.after.ahead.place].item() if type(one.after) is Count else one.after
    if known is not None and {type(known.before), type(known.after), type(after)} <= {int, float}:
        each = known.after - known.before
        return replace(one, before=after - 2 * each, after=after - each)
    return replace(one, before=after, after=after)


def _content(value: Any, depth: int = 6) -> Any:
    """Equal for values that a forward could hardly tell from each other."""
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value)
    if kind is Count or value is ABSENT or not depth:
        return kind
    if isinstance(value, list | tuple | set | frozenset):
        return kind, tuple(_content(one, depth - 1) for one in value)
    if isinstance(value, dict):
        return kind, tuple((_content(key, 1), _content(one, depth - 1)) for key, one in value.items())
    return (kind, _content(vars(value), depth - 1)) if _is_own(value) else kind


def _is_own(value: Any) -> bool:
    has_own = not is_opaque(value) and not isinstance(value, torch.Tensor) and hasattr(value, "__dict__")
    return has_own and not is_installed(type(value).__module__)
