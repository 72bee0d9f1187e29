"""Everything that forward may depend on, as one digest: two steps with the same digest have the same capture.

    modules     classes and all their attributes, in depth: numbers, configs, hooks, processors; weights without values
    code        of methods and functions, with defaults, closures and the globals that they name, followed into
                functions and classes of the model's own libraries
    torch       version, switches of its backends, default type
    call        shapes, types and constants of the example inputs

What cannot be told apart safely is refused: objects without readable state, code that asks the clock, the environment
or files. Torch, the standard library and other installed packages count by their files (`fxpipe/capture/files.py`).
"""

import enum
import functools
import hashlib
import logging
import os
import platform
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import singledispatchmethod
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.code_names import Unknowable, imported, is_outside, names_in
from fxpipe.capture.files import is_installed
from fxpipe.capture.inputs import InputSpec

STANDS_FOR = "_fxpipe_stands_for"
"""An attribute of a class whose instances are, to whoever asks what a model holds, the module that it names."""
_FORMAT = 4  # of what is stored: another one makes every entry another
_MOST_BYTES = 1 << 26  # of tensors and arrays that count by their values
_UNORDERED = ("_use_default_values",)  # a list that diffusers makes of a set: in another order in every process
_MADE = ("_CAN_RECORD_REGISTRY", "_can_set_experts_implementation_cached_value")  # notes of transformers, by class
_NOT_FORWARD = ("example_inputs", "__repr__", "extra_repr", "_abc_impl", *_MADE)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice, numpy.dtype)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload, PurePath)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset, types.MappingProxyType)
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)
_WRAPPERS = (
    staticmethod, classmethod, functools.partial, functools.partialmethod, property, functools.cached_property,
    functools._lru_cache_wrapper,
)  # fmt: skip


def step_digest(model: nn.Module, inputs: InputSpec, devices: Any, purpose: tuple[str, ...] = ()) -> str:
    """The digest of a step and of one call of it.

    Args:
        devices: of the call's tensors.
        purpose: of a digest of its own, as that of a sampler's call is.

    Raises:
        Unknowable: forward may depend on something that has no digest.
    """
    private.require_no_modes(Unknowable)
    digest = _Digest({type(module).__module__ for module in model.modules()})
    digest.value((_FORMAT, __file__, torch.__file__, sys.version, sys.flags.optimize, platform.machine()), "python")
    digest.value(private.switches(), "torch")
    leaves = [(leaf.name, leaf.is_tensor, leaf.batched, leaf.shape, leaf.dtype) for leaf in inputs.leaves]
    digest.value((leaves, [leaf.constant for leaf in inputs.leaves], inputs.batch_size, inputs.rows, devices), "inputs")
    digest.value(purpose, "purpose")
    digest.value((str(inputs.tree), str(inputs.signature), inputs.num_placed, inputs.same), "inputs")
    digest.value(model, "model")
    return digest.hexdigest()


class _Digest:
    """Of values in depth; those of `libraries`, modules of installed packages, are followed into their functions."""

    def __init__(self, libraries: set[str]) -> None:
        self._hash = hashlib.sha256()
        self._libraries = libraries
        self._strict = True  # in code of an installed package, what has no digest counts by its kind
        self._seen: dict[tuple[int, bool], int] = {}
        self._waiting: deque[tuple[Any, str, bool]] = deque()
        self._kept: list[Any] = []  # an object that was let go could lend its id to another

    def hexdigest(self) -> str:
        while self._waiting:
            value, where, self._strict = self._waiting.popleft()
            self._put("is", self._seen[id(value), self._strict])
            self._add(value, where)
        return self._hash.hexdigest()

    def value(self, value: Any, where: str) -> None:
        """Add a value; `where` it is found, for a refusal."""
        value = getattr(type(value), STANDS_FOR, value)
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _NAMED):
            self._put(kind.__name__, value.hex() if kind is float else repr(value))
            return
        key = id(value), self._strict
        known = key in self._seen
        self._put("refers", self._seen.setdefault(key, len(self._seen)))
        if known:
            return
        self._kept.append(value)
        if isinstance(value, _CONTAINERS):
            self._add(value, where)
        else:  # later: what code names goes deep
            self._waiting.append((value, where, self._strict))

    def _put(self, *words: Any) -> None:
        self._hash.update(repr(words).encode(errors="surrogatepass"))

    def _refuse(self, value: Any, why: str) -> None:
        if self._strict:
            raise Unknowable(why)
        self._put("unknown", _name(type(value)))

    @singledispatchmethod
    def _add(self, value: Any, where: str) -> None:
        """An instance, unless it is of a class in C, whose state no attribute shows."""
        if any(isinstance(one, _IN_C) for kind in type(value).__mro__[:-1] for one in vars(kind).values()):
            self._refuse(value, f"{where} is a {_name(type(value))}, whose state cannot be read")
        else:
            self._instance(value, where)

    def _instance(self, value: Any, where: str) -> None:
        """By its class and its attributes, those in slots too."""
        self.value(type(value), where)
        self.value(object.__getstate__(value), where)

    @_add.register(list)
    @_add.register(tuple)
    @_add.register(deque)
    def _sequence(self, value: Any, where: str) -> None:
        self._items(value, value, where)

    @_add.register(set)
    @_add.register(frozenset)
    def _set(self, value: Any, where: str) -> None:
        def key(one: Any) -> tuple[str, str]:
            return _name(type(one)), repr(one) if isinstance(one, _PLAIN) else _name(one)

        self._items(value, sorted(value, key=key), where)

    @_add.register(dict)
    @_add.register(types.MappingProxyType)
    def _mapping(self, value: Any, where: str) -> None:
        self._items(value, [value.default_factory] if isinstance(value, defaultdict) else [], where)
        self._put(len(value))
        for key, one in value.items():
            self.value(key, where)
            self.value(_ordered(key, one), f"{where}.{key}" if isinstance(key, str) else where)

    def _items(self, value: Any, items: Any, where: str) -> None:
        """A container by what is in it, and what a subclass keeps beside that."""
        self._put(_name(type(value)), len(items))
        for index, one in enumerate(items):
            self.value(one, f"{where}[{index}]")
        if getattr(value, "__dict__", None):
            self._instance(value, where)

    @_add.register
    def _number(self, value: int | float | complex | str | bytes, where: str) -> None:
        """An instance of a subclass of a plain kind."""
        kind: Any = next(kind for kind in _PLAIN if isinstance(value, kind))
        self._put("number", kind.__repr__(value))
        self._instance(value, where)

    @_add.register
    def _tensor(self, value: torch.Tensor, where: str, by_value: bool = True) -> None:
        """A tensor that is no weight counts by its values."""
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided:
            self._refuse(value, f"{where} is a {type(value).__name__}")
            return
        self._put("tensor", type(value).__name__, str(value.dtype), str(value.device), tuple(value.shape))
        self._put(value.stride(), value.storage_offset(), value.requires_grad, value.is_conj())
        self.value(value.__dict__, where)
        if not by_value or value.is_meta:
            return
        if value.device.type != "cpu":
            self._refuse(value, f"{where} is a tensor on {value.device}, no weight or buffer")
            return
        content = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)[:, None]
        self._array(content.view(torch.uint8).numpy() if content.numel() else numpy.empty(0), where)

    @_add.register(numpy.ndarray)
    @_add.register(numpy.generic)
    def _array(self, value: Any, where: str) -> None:
        if value.dtype.hasobject or value.nbytes > _MOST_BYTES:
            self._refuse(value, f"{where} is an array of {value.dtype}, {value.nbytes} bytes")
            return
        self._put("array", type(value).__name__, value.dtype.str, value.shape)
        self._hash.update(numpy.ascontiguousarray(value).tobytes())

    @_add.register
    def _module(self, value: nn.Module, where: str) -> None:
        self.value(type(value), where)
        self._put("module", len(value.__dict__))
        for name, one in value.__dict__.items():
            self._put(name)
            if name in ("_parameters", "_buffers"):
                self._weights(one, f"{where}.{name}")
            else:
                self.value(one, f"{where}.{name}")

    def _weights(self, weights: Mapping[str, torch.Tensor | None], where: str) -> None:
        """Weights and buffers count by what a trace sees of them; those that share memory have its number."""
        self._put("weights", len(weights))
        for name, tensor in weights.items():
            key = id(tensor), True
            self._put(name, self._seen.get(key))
            if tensor is not None and key not in self._seen:
                self._seen[key] = len(self._seen)
                self._tensor(tensor, f"{where}.{name}", by_value=False)
                memory = -1 - tensor.untyped_storage()._cdata, True
                self._put("memory", self._seen.setdefault(memory, len(self._seen)))

    @_add.register
    def _method(self, value: types.MethodType, where: str) -> None:
        self.value((value.__func__, value.__self__), where)

    @_add.register
    def _enum(self, value: enum.Enum, where: str) -> None:
        self._put("enum", _name(type(value)), value.name)
        self.value(value.value, where)

    def _wrapper(self, value: Any, where: str) -> None:
        names = ("func", "args", "keywords", "__func__", "__wrapped__", "fget", "fset")
        self._put("wrapper", type(value).__name__)
        self.value([getattr(value, name, None) for name in names], where)

    for _kind in _WRAPPERS:
        _add.register(_kind)(_wrapper)

    @_add.register(types.GetSetDescriptorType)
    @_add.register(types.MemberDescriptorType)
    @_add.register(types.ClassMethodDescriptorType)
    @_add.register(types.MethodDescriptorType)
    @_add.register(types.WrapperDescriptorType)
    @_add.register(types.MethodWrapperType)
    @_add.register(types.BuiltinFunctionType)
    def _in_c(self, value: Any, where: str) -> None:
        self._put("in C", _name(value))
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, types.ModuleType | type):
            self.value(bound, where)

    @_add.register
    def _of_process(self, value: logging.Logger | types.ModuleType, where: str) -> None:
        self._put("named", value.__name__ if isinstance(value, types.ModuleType) else value.name)

    @_add.register
    def _function(self, value: types.FunctionType, where: str) -> None:
        value = private.uncompiled(value)
        self._put("function", _name(value))
        self._code(value.__code__, where)
        own = {n: one for n, one in vars(value).items() if "dynamo" not in n and (n == "__wrapped__" or not _dunder(n))}
        self.value((value.__defaults__, value.__kwdefaults__, own), where)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:  # not yet filled
                inside = None
            self.value(inside, f"{where}'s {name}")
        if self._follows(value.__module__):
            with self._code_of(value.__module__):
                self._globals(value, _name(value))

    @_add.register
    def _code(self, code: types.CodeType, where: str) -> None:
        """Instructions and constants, whatever the lines they are on."""
        self._put("code", code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_flags)
        self._put(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._put(code.co_code, code.co_exceptiontable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, where)
            else:
                self.value(constant, code.co_name)

    def _globals(self, value: types.FunctionType, where: str) -> None:
        """The globals that a function names, and what it names of modules among them."""
        names = names_in(value.__code__)
        scopes: list[Mapping[str, Any]] = [value.__globals__]
        if self._strict:
            scopes += [vars(sys.modules[name]) for name in imported(value, where) if name in sys.modules]
        for scope in scopes:  # which grow
            for name in (name for name in names if name in scope and name not in _MADE):
                found = scope[name]
                self._put("global", name)
                if not isinstance(found, types.ModuleType):
                    self._global(found, f"{where} names {name}, which")
                    continue
                self._put("module", found.__name__)
                if self._strict and "getattr" in names and not is_installed(found.__name__):
                    raise Unknowable(f"{where} may read any attribute of the module {name}")
                if all(vars(found) is not one for one in scopes):
                    scopes.append(vars(found))

    def _global(self, value: Any, where: str) -> None:
        home = getattr(value, "__module__", None)
        outside = isinstance(home, str) and is_outside(home)
        if outside and (callable(value) or isinstance(value, type(os.environ))):
            self._refuse(value, f"{where} is of the module {home}")
        else:
            self.value(value, where)

    @contextmanager
    def _code_of(self, module: str | None) -> Iterator[None]:
        """What code of a module names is inside."""
        before, self._strict = self._strict, not is_installed(module)
        try:
            yield
        finally:
            self._strict = before

    @_add.register
    def _class(self, value: type, where: str) -> None:
        self._put("class", _name(value))
        if not self._follows(value.__module__):
            return
        skipped = (*_NOT_FORWARD, *["__init__"][: issubclass(value, nn.Module)])
        self.value(value.__bases__, where)
        with self._code_of(value.__module__):
            for name, one in list(vars(value).items()):
                # Of what has two underscores what runs counts: copies and pickles leave notes there, too.
                if name not in skipped and (not _dunder(name) or callable(one) or hasattr(one, "__get__")):
                    self._put("member", name)
                    self._global(one, f"{_name(value)}.{name}")

    def _follows(self, module: str | None) -> bool:
        """Whether code of a module counts with what it names, not by its file alone."""
        if module is None or module in self._libraries:
            return True
        return not is_installed(module)


def _ordered(name: Any, value: Any) -> Any:
    return sorted(value) if isinstance(name, str) and name in _UNORDERED else value


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
