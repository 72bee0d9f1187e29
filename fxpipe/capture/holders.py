"""Where Python keeps a model's state: attributes of its modules, of the objects on them and of their own classes;
dicts, lists, sets and arrays among those; and what the model's own code names, globals or variables of functions around
it. Own is what no installed package has made."""

import functools
import os
import sys
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.code_names import globals_in, names_in
from fxpipe.capture.files import is_installed
from fxpipe.capture.kept_numbers import Count
from fxpipe.capture.model_digest import STANDS_FOR

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
WEIGHTS = ("_parameters", "_buffers", "_modules")
NOT_STATE = frozenset({"training", *WEIGHTS, "_non_persistent_buffers_set"})
_OPAQUE = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, nn.Module, Count,
)  # fmt: skip
_WRAPPERS = (
    staticmethod, classmethod, property, functools.partial, functools.cached_property, functools._lru_cache_wrapper,
    types.MethodType,
)  # fmt: skip
AROUND = ("_global_forward_pre_hooks", "_global_forward_hooks")
"""Of `torch.nn.modules.module`, of all modules."""
DEPTH = 6  # of objects and containers in each other
_MOST_BYTES = 2**24  # of an array whose values are looked at
ABSENT = object()
"""In the place of what is not there."""


@dataclass(frozen=True, eq=False)
class Holder:
    """A dict, a list, a set, an array, a class or a cell whose entries can be put back.

    Args:
        owner: name of the module that it was found in.
        path: of it there, empty for the module's own attributes.
        values: the dict (of attributes: an object's `__dict__`), list, set, array, class, or cell of a closure.
        of_attributes: whether entries are attributes, not items.
        keys: the entries looked at, of globals; the variable of a cell; all where None.
    """

    owner: str
    path: str
    values: Any
    of_attributes: bool = False
    keys: set[str] | None = None

    def entries(self) -> dict[Any, Any]:
        """All by name, or by index; an array's values as one."""
        values = self.values
        if _is_array(values):
            return {"values": values.tobytes()} if values.nbytes <= _MOST_BYTES else {}
        if isinstance(values, numpy.ndarray):
            return dict(enumerate(values.flat))
        if isinstance(values, list | deque):
            return dict(enumerate(values))
        if isinstance(values, set):
            return {value: value for value in values}
        if isinstance(values, types.CellType):
            try:
                return dict.fromkeys(self.keys or (), values.cell_contents)
            except ValueError:  # not yet filled
                return {}
        if not isinstance(values, dict | type):
            return {name: getattr(values, name) for name in _slots(values) if hasattr(values, name)}
        inside = vars(values) if isinstance(values, type) else values
        return {key: inside[key] for key in (inside if self.keys is None else self.keys & inside.keys())}

    def restore(self, entries: dict[Any, Any]) -> None:
        """Have these entries and no others."""
        now, values = self.entries(), self.values
        changed = {key: value for key, value in entries.items() if now.get(key, ABSENT) is not value}
        extra = [key for key in now if key not in entries]
        if _is_array(values):
            if changed and changed != now:
                values[...] = numpy.frombuffer(changed["values"], values.dtype).reshape(values.shape)
        elif isinstance(values, numpy.ndarray):
            for place, value in changed.items():
                values.flat[place] = value
        elif isinstance(values, list | deque | set):
            if changed or extra:
                values.clear()
                (values.update if isinstance(values, set) else values.extend)(entries.values())
        elif isinstance(values, types.CellType):
            for value in changed.values():
                values.cell_contents = value
        elif isinstance(values, type) or _slots(values):
            put, drop = (setattr, delattr) if isinstance(values, type) else (object.__setattr__, object.__delattr__)
            for key in extra:
                drop(values, key)
            for key, value in changed.items():
                put(values, key, value)
        else:
            for key in extra:
                del values[key]
            if changed:  # some refuse to be updated
                values.update(changed)

    def name(self, key: Any) -> str:
        """Of an entry, as code in its module would write it."""
        if _is_array(self.values):
            return self.path
        return f"{self.path}.{key}".lstrip(".") if self.of_attributes else f"{self.path}[{key!r}]"


def holders_of(model: nn.Module) -> tuple[list[Holder], list[Any]]:
    """Every holder of a model, and its functions under `functools.lru_cache`."""
    walk = _Walk()
    walk.modules(model)
    return list(walk.found.values()), walk.caches


def named_by(model: nn.Module) -> list[Holder]:
    """Its own classes, those of what hangs on it, the globals that all their code names, what is in its closures, and
    the objects whose methods it calls."""
    walk = _Walk()
    for hooks in AROUND:
        walk.code("", vars(nn.modules.module)[hooks], DEPTH)
    for name, module in model.named_modules():
        walk.code(name, module.__dict__, DEPTH)
        walk.kind(name, type(module))
    return list(walk.found.values())


_OF_DATACLASSES = {"__init__", "__repr__", "__eq__", "__setattr__", "__delattr__"}


def own_functions(model: nn.Module) -> list[types.FunctionType]:
    """Those that forward's own code may call; of its dataclasses not what these are given."""
    walk = _Walk()
    walk.modules(model)
    return [one for one in walk.seen if isinstance(one, types.FunctionType) and one.__name__ not in _OF_DATACLASSES]


def is_opaque(value: Any) -> bool:
    """Whether nothing is looked for inside."""
    return type(value) in PLAIN or isinstance(value, _OPAQUE)


def _is_array(value: Any) -> bool:
    """Whether a value is numbers in memory."""
    return isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _slots(value: Any) -> list[str]:
    """Attributes of an object that has no dict of them, where its class is no library's."""
    kind = type(value)
    if hasattr(value, "__dict__") or is_installed(kind.__module__):
        return []
    return [name for one in kind.__mro__ for name in vars(one).get("__slots__", ()) if not name.startswith("__")]


class _Walk:
    def __init__(self) -> None:
        self.found: dict[int, Holder] = {}
        self.caches: list[Any] = []
        self.seen: set[Any] = set()  # classes and functions
        self._passed: set[int] = set()  # objects and containers, by id

    def modules(self, model: nn.Module, owner: str | None = None, path: str = "") -> None:
        """All of a model, or of one that an owner's module holds without knowing it as a part."""
        new = [(name, one) for name, one in model.named_modules() if id(one) not in self._passed]
        self._passed |= {id(one) for _, one in new}
        for name, one in new:
            of, inside = (name, "") if owner is None else (owner, f"{path}.{name}".rstrip("."))
            self._add(Holder(of, inside, one.__dict__, of_attributes=True), DEPTH)
            self.kind(of, type(one))

    def code(self, owner: str, value: Any, depth: int) -> None:
        """What is named by the code of a value, and of those in it, without their own entries."""
        self._code(owner, value)
        if is_opaque(value) or isinstance(value, torch.Tensor) or id(value) in self._passed or not depth:
            return
        self._passed.add(id(value))
        if not isinstance(value, dict | list | tuple):
            self.kind(owner, type(value))
            value = getattr(value, "__dict__", {})
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if not (isinstance(key, str) and key in WEIGHTS):
                self.code(owner, one, depth - 1)

    def _add(self, holder: Holder, depth: int) -> None:
        known = self.found.setdefault(id(holder.values), holder)
        if known is not holder:
            if known.keys is None or holder.keys is None:
                return
            holder.keys.difference_update(known.keys)
            known.keys.update(holder.keys)
        for key, value in holder.entries().items():
            if not (isinstance(key, str) and key in WEIGHTS):
                self._value(holder.owner, holder.name(key), value, depth - 1)

    def _value(self, owner: str, path: str, value: Any, depth: int) -> None:
        if type(value) in PLAIN or isinstance(value, torch.Tensor):
            return
        value = getattr(type(value), STANDS_FOR, value)
        if isinstance(value, nn.Module):
            self.modules(value, owner, path)
        elif isinstance(value, type):
            self.kind(owner, value)
        elif not is_opaque(value) and depth:
            self._inside(owner, path, value, depth)
        self._code(owner, value)

    def _inside(self, owner: str, path: str, value: Any, depth: int) -> None:
        if isinstance(value, dict | list | set | deque | numpy.ndarray):
            self._add(Holder(owner, path, value), depth)
        elif isinstance(value, tuple):
            for index, one in enumerate(value):
                self._value(owner, f"{path}[{index}]", one, depth - 1)
        elif isinstance(inside := getattr(value, "__dict__", None), dict) or _slots(value):
            self._add(Holder(owner, path, value if inside is None else inside, of_attributes=True), depth)
            self.kind(owner, type(value))

    def kind(self, owner: str, kind: type) -> None:
        """Attributes of own classes, and what their code names; of installed ones, caches alone."""
        for one in kind.__mro__:
            if one in self.seen:
                continue
            self.seen.add(one)
            if not is_installed(one.__module__):
                self._add(Holder(owner, one.__name__, one, of_attributes=True), DEPTH)
                continue
            beside = vars(sys.modules[one.__module__]) if one.__module__ in sys.modules else {}
            for value in (*vars(one).values(), *beside.values()):
                self._cache(value.__func__ if isinstance(value, staticmethod | classmethod) else value)

    def _cache(self, value: Any) -> None:
        if isinstance(value, functools._lru_cache_wrapper) and all(value is not one for one in self.caches):
            self.caches.append(value)

    def _code(self, owner: str, value: Any) -> None:
        """The globals that own code names, and what is in its closures."""
        value = private.uncompiled(value)
        self._cache(value)
        if isinstance(value, _WRAPPERS):
            for name in ("func", "__func__", "__wrapped__", "fget"):
                self._code(owner, getattr(value, name, None))
        if isinstance(value, functools.partial):
            self._value(owner, "partial", (value.args, value.keywords), DEPTH)
        if isinstance(value, types.MethodType):
            self._value(owner, type(value.__self__).__name__, value.__self__, DEPTH)
        if not isinstance(value, types.FunctionType) or value in self.seen or is_installed(value.__module__):
            return
        self.seen.add(value)
        if not {"environ", "getenv"}.isdisjoint(names_in(value.__code__)):
            self._add(Holder(owner, "os.environ", vars(os.environ)["_data"]), DEPTH)
        named = set(globals_in(value.__code__)) & value.__globals__.keys()
        self._add(Holder(owner, value.__module__, value.__globals__, of_attributes=True, keys=named), DEPTH)
        kept = value.__defaults__, value.__kwdefaults__, vars(value) or None
        self._value(owner, value.__name__, kept, DEPTH)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._add(Holder(owner, value.__name__, cell, of_attributes=True, keys={name}), DEPTH + 1)


def as_held(model: nn.Module, constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters of modules in lists and the like, which may get other .data, in the place of a trace's views."""
    if not constants:
        return constants
    own: dict[tuple[Any, ...], torch.Tensor] = {}
    for holder in holders_of(model)[0]:
        inside = holder.values.get("_parameters") if isinstance(holder.values, dict) else None
        held = [*holder.entries().values(), *(inside.values() if isinstance(inside, dict) else ())]
        own |= {_place(one): one for one in held if isinstance(one, nn.Parameter)}
    return {name: own.get(_place(tensor), tensor) for name, tensor in constants.items()}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return (id(tensor),)
    laid = tensor.shape, tensor.stride(), tensor.storage_offset()
    return private.memory_of(tensor), *laid, tensor.dtype, tensor.requires_grad
