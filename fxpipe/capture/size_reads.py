"""Sizes that a trace leaves free are no integers; code that looks at what they are would take another way, unseen.

isinstance(height, int)     True, as without a trace
int(a.shape[1] ** 0.5)      a size as well, where all are free
len(set(lengths))           as many as differ, where lengths are free; their order makes them numbers
n * 0.7 * 10                a number from here on: sizes are written n * 7.0, which is not the same of all numbers
tables[f"{height}"]         its text is that of one number: the size is this number from here on
len(images)                 free as well, though Python has every length an integer
np.sqrt(a.numel() / batch)  as by math.sqrt: numpy asks a size for a method of that name
tables[f"{batch:d}"]        its text with a form: this number from here on, in training, too
torch.tensor([0] * batch)   as many entries as samples: the list is one of a free length until something asks for more
if batch == 1:              noted down, though a trace takes for granted that no free size is one
tables[height]              no key, as ever; that whoever goes on without it goes another way is noted
type(height) is int         True, as without a trace; so are numpy.isscalar(height) and type(a) is torch.Tensor
height.numerator            of its number: it is this number from here on
"""

import builtins
import functools
import math
import numbers
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import numpy
import sympy
import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.holders import holders_of
from fxpipe.capture.known import note_failure, note_text
from fxpipe.errors import CaptureError

T = TypeVar("T")
_LIKE: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
_OF_NUMBERS = ("torch", "sympy", "mpmath", "numpy", "scipy", "sklearn", "pandas", "networkx")  # no code of models
_GENERATED = "<eval_", "<string>"
"""Code without a file of its own, as of graphs and dataclasses: its caller's."""
_NOT_USERS = {*sys.stdlib_module_names, *_OF_NUMBERS, "fxpipe", "passes", "cost_models"} - {"__main__"}


@contextmanager
def sizes_read_plainly() -> Iterator[None]:
    """Inside, modules of models and of their libraries see free sizes as integers, and their text as a number's."""
    with ExitStack() as stack:
        functions = {"isinstance": _isinstance, "int": _Int, "float": _Float, "set": _Set, "type": _Type}
        stack.enter_context(_in_users_modules(functions))
        for kind, read in ((torch.SymInt, operator.index), (torch.SymFloat, float)):
            stack.enter_context(private.replaced(kind, "__repr__", _text(vars(kind)["__repr__"], read)))
            stack.enter_context(private.added(kind, {"__format__": _text(object.__format__, read)}))
        yield


@contextmanager
def builtins_watched(model: nn.Module, lengths: Mapping[int, Any]) -> Iterator[None]:
    """Inside, in models' modules: free sizes are of the type of numbers; the length of a tensor is its size, or one of
    those known by id, and the largest of its entries one of them; what is repeated a free number of times is a
    `Repeated`; iterators that the model keeps have no next."""
    with ExitStack() as stack:
        stack.enter_context(private.numbers_by_kind({numbers.Integral: torch.SymInt, numbers.Real: torch.SymFloat}))
        stack.enter_context(private.replaced(functools, "_find_impl", _dispatched(vars(functools)["_find_impl"])))
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(private.added(kind, _NUMBERS | _of_plain(kind)))
            for name in _SUMS_AND_PRODUCTS:
                stack.enter_context(private.replaced(kind, name, _as_written(name, vars(kind)[name])))
        for name in ("__mul__", "__rmul__"):
            stack.enter_context(private.replaced(torch.SymInt, name, _repeating(vars(torch.SymInt)[name])))
        # Export gives max and min of a tensor, their only argument, to torch.maximum.
        functions: dict[str, Any] = {name: partial(_of_entries, name) for name in ("max", "min")}
        functions |= {"len": partial(_len, lengths), "next": _next_but_of(model)}
        stack.enter_context(_in_users_modules({**functions, "isinstance": _isinstance, "type": _PlainType}))
        yield


@contextmanager
def _in_users_modules(functions: Mapping[str, Any]) -> Iterator[None]:
    """Builtins by name, other ones inside, but where a module has its own."""
    modules = [one for path, one in list(sys.modules.items()) if _of_users(path) and isinstance(one, types.ModuleType)]
    around = [(names, _but_own(functions, names)) for names in map(vars, modules)]
    try:
        for names, others in around:
            names.update(others)
        yield
    finally:
        for names, others in around:
            for name in others:
                names.pop(name, None)


def _but_own(functions: Mapping[str, Any], names: dict[str, Any]) -> Mapping[str, Any]:
    if names.keys().isdisjoint(functions):  # most modules
        return functions
    return {name: one for name, one in functions.items() if name not in names}


@contextmanager
def decisions_noted() -> Iterator[None]:
    """Inside, what forward itself decides by free sizes is known to `private.sizes.fewest_samples`."""
    with ExitStack() as stack:
        for kind, name in ((torch.SymBool, "__bool__"), (torch.SymInt, "__int__"), (torch.SymInt, "__index__")):
            stack.enter_context(private.replaced(kind, name, _noted(vars(kind)[name])))
        for size in (torch.SymInt, torch.SymFloat):
            stack.enter_context(private.replaced(size, "__repr__", _told(vars(size)["__repr__"])))
        stack.enter_context(private.replaced(torch.SymInt, "__hash__", _no_key(torch.SymInt.__hash__)))
        yield


@cache
def _of_users(name: str) -> bool:
    return name.partition(".")[0] not in _NOT_USERS


def _len(lengths: Mapping[int, Any], value: Any) -> Any:
    if id(value) in lengths:
        return lengths[id(value)]
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else len(value)


def _made_when_asked(kind: type) -> Callable[[type[T]], type[T]]:
    """For a class of what stands for a builtin of numbers, free sizes among them: what it does not say itself it asks
    of `made`, the builtin itself, for which sizes become numbers."""

    def method_of(name: str) -> Callable[..., Any]:
        return lambda self, *args, **named: getattr(self.made, name)(*map(_made, args), **named)

    def completed(stand_in: type[T]) -> type[T]:
        for name in ({*dir(kind)} - {*dir(object)} | _COMPARISONS | {"__repr__"}) - {*vars(stand_in)}:
            setattr(stand_in, name, method_of(name))
        return stand_in

    return completed


def _made(value: Any) -> Any:
    return value.made if type(value) in (Repeated, Distinct) else value


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}


@_made_when_asked(list)
class Repeated:
    """`[row] * count` of numbers, of a free count, until something but the first or last entry is asked for."""

    def __init__(self, row: Any, count: torch.SymInt) -> None:
        self.row, self.count = row, count
        self._made: list[Any] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return list

    @property
    def is_made(self) -> bool:
        return self._made is not None

    @property
    def made(self) -> list[Any]:
        if self._made is None:
            expr, count = private.sizes.expression_of(self.count), operator.index(self.count)
            if expr is not None:
                private.sizes.note(self.count, expr, count)
            self._made = [self.row] * count
        return self._made

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + self.made

    def __getitem__(self, place: Any) -> Any:
        return self.row if place in (0, -1) and not self.is_made else self.made[place]


def _repeating(original: Any) -> Any:
    def multiplied(size: Any, other: Any) -> Any:
        if type(other) is list and len(other) == 1 and _is_of_numbers(other) and type(size) is torch.SymInt:
            return Repeated(other[0], size)
        return original(size, other)

    return multiplied


_SUMS_AND_PRODUCTS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")


def _as_written(name: str, original: Any) -> Any:
    """Sums and products of fractions are free as long as they are written as they are computed, one after the other."""

    def computed(size: Any, other: Any) -> Any:
        found = original(size, other)
        if type(found) is not torch.SymFloat or private.sizes.is_as_computed(found, size, other):
            return found
        return getattr(float(size), name)(float(other))

    return computed


def _is_of_numbers(value: Any) -> bool:
    return all(map(_is_of_numbers, value)) if type(value) in (list, tuple) else type(value) in (int, float, bool)


def _next_but_of(model: nn.Module) -> Callable[..., Any]:
    kept = cache(lambda: {id(value) for holder in holders_of(model)[0] for value in holder.entries().values()})

    def following(iterator: Any, *default: Any) -> Any:
        if id(iterator) in kept():
            raise CaptureError(
                f"forward takes the next of a {type(iterator).__name__} that the model keeps, but a graph has every "
                "call alike; give it what changes as an input"
            )
        return next(iterator, *default)

    return following


def _of_entries(name: str, *args: Any, **kwargs: Any) -> Any:
    given = [list(args[0])] if len(args) == 1 and isinstance(args[0], torch.Tensor) else args
    return getattr(builtins, name)(*given, **kwargs)


def _isinstance(value: Any, kinds: Any) -> bool:
    kind = type(value)
    return builtins.isinstance(value, kinds) or (kind in _LIKE and builtins.isinstance(_LIKE[kind], kinds))


class _StandIn(type):
    """Of a builtin type's stand-in, to which free sizes belong, and which leaves them free."""

    @property
    def builtin(cls) -> type:
        return cls.__mro__[1]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = _FREE[cls.builtin](args[0]) if len(args) == 1 and not kwargs else None
        return cls.builtin(*args, **kwargs) if found is None else found

    def __instancecheck__(cls, value: Any) -> bool:
        return _isinstance(value, cls.builtin)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, cls.builtin)

    def __eq__(cls, kind: Any) -> bool:
        return kind is cls or kind is cls.builtin

    def __hash__(cls) -> int:
        return hash(cls.builtin)


class _KindOf(type):
    """Of a stand-in for `type`, to which a free size is a number, of a type that may have a stand-in, too, and what
    stands for a tensor in a trace is a tensor."""

    stand_ins: Mapping[type, type]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        if kind in _LIKE:
            kind = type(_LIKE[kind])
        elif issubclass(kind, torch.Tensor) and kind.__module__.startswith("torch._subclasses"):  # as traces have them
            kind = nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return cls.stand_ins.get(kind, kind)

    def __instancecheck__(cls, value: Any) -> bool:
        return builtins.isinstance(value, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)


def _integer(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _integer(value.item())  # which may be free
    if type(value) is torch.SymFloat:
        return torch.sym_int(value)
    return value if type(value) is torch.SymInt else None


@_made_when_asked(set)
class Distinct:
    """`set(values)` of numbers, free sizes among them, until more than their count is asked for, as their order is: how
    many differ is decided by what they are."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._made: set[Any] | None = None
        self._values = list[Any]()
        for one in values:
            if one not in self._values:
                self._values.append(one)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return set

    @property
    def made(self) -> set[Any]:
        if self._made is None:
            self._made = {operator.index(one) if type(one) is torch.SymInt else one for one in self._values}
        return self._made

    def __len__(self) -> int:
        return len(self._values if self._made is None else self._made)


def _distinct(values: Any) -> Any:
    """Of a list with free sizes; None of any other."""
    has_free = type(values) in (list, tuple) and any(type(one) is torch.SymInt for one in values)
    return Distinct(values) if has_free else None


_Int: Any = _StandIn("int", (int,), {})
_Float: Any = _StandIn("float", (float,), {})
_Set: Any = _StandIn("set", (set,), {})
_Type: Any = _KindOf("type", (type,), {"stand_ins": {int: _Int, float: _Float, set: _Set}})
_PlainType: Any = _KindOf("type", (type,), {"stand_ins": {}})
_FREE: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    float: lambda value: torch.sym_float(value) if type(value) is torch.SymInt else None,
    set: _distinct,
}


def _as_number(function: Callable[..., float]) -> Callable[..., float]:
    return lambda size, *others: function(size, *others)  # which binds the size, as functions of C do not


def _formatted(size: Any, form: str) -> str:
    if not form or private.sizes.depends_on_values(size):  # those for logs to print
        return str(size)
    return format(float(size) if isinstance(size, torch.SymFloat) else int(size), form)


def _numpys(name: str) -> str:
    """What numpy calls its function of that name, `arctan` of `atan`; empty where it has none."""
    found = getattr(numpy, name, None)
    return found.__name__ if isinstance(found, numpy.ufunc) else ""


def _dispatched(find: Any) -> Any:
    """What `functools.singledispatch` finds for a type that it has none for: of a size, a number's."""
    return lambda kind, registry: find(type(_LIKE[kind]) if kind in _LIKE else kind, registry)


def _of_plain(kind: type) -> dict[str, Any]:
    """What else a number has: of its number."""
    return {name: property(partial(_of_its_number, name)) for name in {*dir(type(_LIKE[kind]))} - {*dir(object)}}


def _of_its_number(name: str, size: Any) -> Any:
    return getattr(float(size) if type(size) is torch.SymFloat else operator.index(size), name)


_NUMBERS: dict[str, Any] = {
    "__format__": lambda size, form: _formatted(size, form),
    "__deepcopy__": lambda size, memo: size,
    **{_numpys(name): _as_number(getattr(math, name)) for name in dir(math) if _numpys(name)},
}
"""What free sizes have no methods for: numpy asks what is no number of its own for a method of its function's name.
Sizes that are asked for a text with a form are numbers from here on, as it may decide something."""


def _text(original: Any, read: Any) -> Any:
    def text(size: Any, *form: str) -> str:
        return original(size, *form) if _is_ours(sys._getframe(1)) else format(read(size), *form)

    return text


def _told(original: Any) -> Any:
    def text(size: Any) -> str:
        frame = sys._getframe(1)
        if frame.f_code is _formatted.__code__:
            frame = frame.f_back.f_back  # type: ignore[union-attr, assignment]
        if not _is_ours(frame):
            note_text(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return original(size)  # type: ignore[no-any-return]

    return text


def _noted(original: Any) -> Any:
    def decide(value: Any) -> Any:
        expr, is_ours = private.sizes.expression_of(value), _is_ours(sys._getframe(1))
        try:
            found = original(value)
        except private.VALUE_ERRORS as error:
            if not is_ours:
                note_failure(error)
            raise
        if expr is not None and not is_ours:
            private.sizes.note(value, expr, found)
        return found

    return decide


def _no_key(original: Any) -> Any:
    """Whoever catches that a size is no key goes another way than with a number. einops computes there what it would
    have kept."""

    def hashed(size: Any) -> int:
        frame = sys._getframe(1)
        try:
            return original(size)  # type: ignore[no-any-return]
        except TypeError as error:
            is_einops = frame.f_globals.get("__name__", "").partition(".")[0] == "einops"
            if not _is_ours(frame) and not is_einops:
                note_failure(error)
            raise

    return hashed


def _is_ours(frame: types.FrameType) -> bool:
    while frame.f_code.co_filename.startswith(_GENERATED) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith((*private.FRAMEWORK, *sympy.__path__))
