"""Everything that forward may depend on, as one digest: two steps with the same digest have the same capture.

    modules     classes and all their attributes, in depth: numbers, configs, hooks, processors; weights without values
    code        of methods and functions, with defaults, closures and the globals that they name, followed into
                functions and classes of the model's own libraries
    torch       version, switches of its backends, default type
    call        shapes, types and constants of the example inputs

What cannot be told apart safely is refused: objects without readable state, code that asks the clock, the environment
or files. Torch, the standard library and other installed packages count by their files (`fxpipe/capture/files.py`).
"""

import dis
import enum
import functools
import hashlib
import logging
import os
import platform
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.files import is_installed
from fxpipe.capture.inputs import InputSpec
from fxpipe.errors import FxpipeError

_FORMAT = 1  # of what is stored: another one makes every entry another
_MOST_BYTES = 1 << 26  # of tensors and arrays that count by their values
_NAMED_ONLY = (*sys.stdlib_module_names, "torch", "numpy", "sympy", "fxpipe", "passes", "cost_models")
# What reads something outside the model: no digest can tell whether that is as before.
_OUTSIDE = ("os", "io", "time", "datetime", "pathlib", "socket", "subprocess", "sys", "importlib", "secrets", "uuid")
_UNORDERED = ("_use_default_values",)  # a list that diffusers makes of a set: in another order in every process
_OUTSIDE_CALLS = ("open", "eval", "exec", "compile", "globals", "vars", "input", "__import__")
_NOT_FORWARD = {
    "__init__", "example_inputs", "__repr__", "extra_repr", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__module__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "__signature__", "_abc_impl",
    "__parameters__", "__orig_bases__", "__match_args__", "__dataclass_fields__", "__dataclass_params__",
}  # fmt: skip
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice, numpy.dtype, PurePath)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload)
_WRAPPERS = (staticmethod, classmethod, functools.partial, functools.partialmethod, property, functools.cached_property)


class Unknowable(FxpipeError):
    """What forward may depend on cannot be told; says what."""


def step_digest(model: nn.Module, inputs: InputSpec, devices: Any) -> str:
    """The digest of a step and of one call of it.

    Args:
        devices: of the call's tensors.

    Raises:
        Unknowable: forward may depend on something that has no digest.
    """
    private.require_no_modes(Unknowable)
    digest = _Digest(_libraries(model))
    digest.value((_FORMAT, sys.version, sys.flags.optimize, platform.machine()), "python")
    digest.value(private.switches(), "torch")
    leaves = [(leaf.name, leaf.is_tensor, leaf.batched, leaf.shape, leaf.dtype) for leaf in inputs.leaves]
    digest.value((leaves, [leaf.constant for leaf in inputs.leaves], inputs.batch_size, devices), "inputs")
    digest.value((str(inputs.tree), str(inputs.signature)), "inputs")
    digest.value(model, "model")
    return digest.hexdigest()


def _libraries(model: nn.Module) -> set[str]:
    """The files of installed packages that the model's own classes are from: their functions are followed."""
    return {type(module).__module__ for module in model.modules()}


class _Digest:
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
            self._put("is", str(self._seen[id(value), self._strict]))
            self._add(value, where)
        return self._hash.hexdigest()

    def value(self, value: Any, where: str) -> None:
        """Add a value; `where` it is found, for a refusal."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (*_TORCH_PLAIN, PurePath)):
            self._put(kind.__name__, value.hex() if kind is float else repr(value))
            return
        key = id(value), self._strict
        if key in self._seen:
            self._put("again", str(self._seen[key]))
            return
        self._seen[key] = len(self._seen)
        self._kept.append(value)
        if isinstance(value, _CONTAINERS):
            self._add(value, where)
        else:  # later: what code names goes deep
            self._put("refers", str(self._seen[key]))
            self._waiting.append((value, where, self._strict))

    def _add(self, value: Any, where: str) -> None:
        add = next((add for kinds, add in _ADD if isinstance(value, kinds)), _Digest._instance)
        add(self, value, where)

    def _refuse(self, value: Any, why: str) -> None:
        if self._strict:
            raise Unknowable(why)
        self._put("unknown", _name(type(value)))

    def _put(self, kind: str, text: str) -> None:
        content = text.encode(errors="surrogatepass")
        self._hash.update(f"{kind}:{len(content)}:".encode())
        self._hash.update(content)

    def _sequence(self, value: Any, where: str) -> None:
        self._put("sequence", f"{_name(type(value))} {len(value)}")
        for index, one in enumerate(value):
            self.value(one, f"{where}[{index}]")
        self._rest(value, where)

    def _mapping(self, value: Any, where: str) -> None:
        self._put("mapping", f"{_name(type(value))} {len(value)}")
        if isinstance(value, defaultdict):
            self.value(value.default_factory, where)
        for key, one in value.items():
            self.value(key, where)
            self.value(_ordered(key, one), f"{where}[{key!r}]" if isinstance(key, str) else where)
        self._rest(value, where)

    def _set(self, value: Any, where: str) -> None:
        def key(one: Any) -> tuple[str, str]:
            return _name(type(one)), repr(one) if isinstance(one, _PLAIN) else _name(one)

        self._put("set", f"{_name(type(value))} {len(value)}")
        for one in sorted(value, key=key):
            self.value(one, where)

    def _number(self, value: Any, where: str) -> None:
        """An instance of a subclass of a plain kind."""
        kind = next(kind for kind in _SUBCLASSED if isinstance(value, kind))
        self._put("number", f"{_name(type(value))} {kind.__repr__(value)}")
        self.value(getattr(value, "__dict__", None), where)

    def _rest(self, value: Any, where: str) -> None:
        """What an instance of a subclass of a container has beside its items."""
        if getattr(value, "__dict__", None):
            self._instance(value, where)

    def _enum(self, value: enum.Enum, where: str) -> None:
        self._put("enum", f"{_name(type(value))}.{value.name}")
        self.value(value.value, where)

    def _tensor(self, value: torch.Tensor, where: str, by_value: bool = True) -> None:
        """A tensor that is no weight counts by its values."""
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided:
            self._refuse(value, f"{where} is a {type(value).__name__}")
            return
        self._put("tensor", f"{type(value).__name__} {value.dtype} {value.device} {tuple(value.shape)}")
        self._put("layout", f"{value.stride()} {value.storage_offset()} {value.requires_grad} {value.is_conj()}")
        self.value(value.__dict__, where)
        if not by_value or value.is_meta:
            return
        if value.device.type != "cpu" or value.nbytes > _MOST_BYTES:
            self._refuse(value, f"{where} is a tensor of {value.nbytes} bytes on {value.device}, no weight or buffer")
            return
        content = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        self._hash.update(content.view(torch.uint8).numpy().tobytes() if content.numel() else b"")

    def _array(self, value: numpy.ndarray[Any, Any] | numpy.generic, where: str) -> None:
        if value.dtype.hasobject or value.nbytes > _MOST_BYTES:
            self._refuse(value, f"{where} is an array of {value.dtype}, {value.nbytes} bytes")
            return
        self._put("array", f"{type(value).__name__} {value.dtype.str} {value.shape}")
        self._hash.update(numpy.ascontiguousarray(value).tobytes())

    def _module(self, value: nn.Module, where: str) -> None:
        """Weights and buffers count by what a trace sees of them."""
        self.value(type(value), where)
        self._put("module", f"{len(value.__dict__)}")
        for name, one in value.__dict__.items():
            self._put("attribute", name)
            inside = f"{where}.{name}"
            if name in ("_parameters", "_buffers"):
                self._weights(one, inside)
            else:
                self.value(one, inside)

    def _weights(self, weights: Mapping[str, torch.Tensor | None], where: str) -> None:
        self._put("weights", str(len(weights)))
        for name, tensor in weights.items():
            key = id(tensor), True
            self._put("weight", f"{name} {self._seen.get(key, '')}")
            if tensor is None or key in self._seen:
                continue
            self._seen[key] = len(self._seen)
            self._tensor(tensor, f"{where}.{name}", by_value=False)
            self._put("memory", str(self._memory(tensor)))

    def _memory(self, tensor: torch.Tensor) -> int:
        """Weights that share memory have the same number."""
        key = -1 - tensor.untyped_storage()._cdata, True
        return self._seen.setdefault(key, len(self._seen))

    def _method(self, value: types.MethodType, where: str) -> None:
        self.value(value.__func__, where)
        self.value(value.__self__, where)

    def _wrapper(self, value: Any, where: str) -> None:
        self._put("wrapper", type(value).__name__)
        for name in ("func", "args", "keywords", "__func__", "__wrapped__", "fget", "fset"):
            self.value(getattr(value, name, None), where)

    def _builtin(self, value: Any, where: str) -> None:
        self._put("builtin", f"{getattr(value, '__module__', '')} {value.__qualname__}")
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, types.ModuleType | type):
            self.value(bound, where)

    def _function(self, value: types.FunctionType, where: str) -> None:
        self._put("function", _name(value))
        self._code(value.__code__)
        own = {name: one for name, one in value.__dict__.items() if name not in _NOT_FORWARD and "dynamo" not in name}
        for part in (value.__defaults__, value.__kwdefaults__, own):
            self.value(part, where)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:  # not yet filled
                inside = None
            self.value(inside, f"{where}'s {name}")
        if self._follows(value.__module__):
            with self._code_of(value.__module__):
                self._globals(value, _name(value))

    def _code(self, code: types.CodeType) -> None:
        """Instructions and constants, whatever the lines they are on."""
        self._put("code", f"{code.co_name} {code.co_argcount} {code.co_kwonlyargcount} {code.co_flags}")
        self._put("names", repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)))
        self._hash.update(code.co_code)
        self._hash.update(code.co_exceptiontable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.value(constant, code.co_name)

    def _globals(self, value: types.FunctionType, where: str) -> None:
        """The globals that a function names, and what it names of modules among them."""
        names = _names(value.__code__)
        if self._strict:
            _require_inside(value, where)
        scopes: list[Mapping[str, Any]] = [value.__globals__]
        scopes += [vars(sys.modules[name]) for name in _imported(value) if self._strict and name in sys.modules]
        for scope in scopes:  # which grow
            for name in (name for name in names if name in scope):
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
        outside = isinstance(home, str) and home.partition(".")[0] in _OUTSIDE
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

    def _class(self, value: type, where: str) -> None:
        self._put("class", _name(value))
        if not self._follows(value.__module__):
            return
        is_module = issubclass(value, nn.Module)
        for base in value.__bases__:
            self.value(base, where)
        with self._code_of(value.__module__):
            for name, one in value.__dict__.items():
                if name not in _NOT_FORWARD or (name == "__init__" and not is_module):
                    self._put("member", name)
                    self._global(one, f"{_name(value)}.{name}")

    def _follows(self, module: str | None) -> bool:
        """Whether code of a module counts with what it names, not by its file alone."""
        if module is None or module in self._libraries:
            return True
        return module.partition(".")[0] not in _NAMED_ONLY and not is_installed(module)

    def _instance(self, value: Any, where: str) -> None:
        self.value(type(value), where)
        state = dict(getattr(value, "__dict__", {}))
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        state |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
        if any(map(_hides, type(value).__mro__[:-1])) and not isinstance(value, _CONTAINERS):
            self._refuse(value, f"{where} is a {_name(type(value))}, whose state cannot be read")
            return
        self._put("instance", str(len(state)))
        for name, one in state.items():
            self._put("attribute", name)
            self.value(_ordered(name, one), f"{where}.{name}")


_SUBCLASSED = (int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset, types.MappingProxyType)


_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)


def _hides(kind: type) -> bool:
    """Whether instances of a class written in C may have state that no attribute shows."""
    return any(isinstance(one, _IN_C) for one in vars(kind).values())


def _ordered(name: Any, value: Any) -> Any:
    return sorted(value) if isinstance(name, str) and name in _UNORDERED else value


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def _names(code: types.CodeType) -> list[str]:
    """Every global and attribute that code names, that of functions inside too."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_names(constant))
    return list(names)


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Those of functions inside, too."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _imported(value: types.FunctionType) -> list[str]:
    """The modules that a function imports itself, by all names they may have."""
    package = value.__globals__.get("__package__") or ""
    names = [one.argval for one in _instructions(value.__code__) if one.opname == "IMPORT_NAME"]
    return [known for name in names for known in (name, name.partition(".")[0], f"{package}.{name}")]


def _require_inside(value: types.FunctionType, where: str) -> None:
    """Refuse code that reads what is neither the model nor a module: files, the environment, the clock."""
    for one in _instructions(value.__code__):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = value.__globals__.get(one.argval)
            if found is None and one.argval in _OUTSIDE_CALLS:
                raise Unknowable(f"{where} calls {one.argval}")
            if isinstance(found, types.ModuleType) and found.__name__.partition(".")[0] in _OUTSIDE:
                raise Unknowable(f"{where} names the module {found.__name__}")
        if one.opname == "IMPORT_NAME" and one.argval.partition(".")[0] in _OUTSIDE:
            raise Unknowable(f"{where} imports {one.argval}")


_ADD: tuple[tuple[Any, Callable[[_Digest, Any, str], None]], ...] = (
    (nn.Module, _Digest._module),
    (torch.Tensor, _Digest._tensor),
    (enum.Enum, _Digest._enum),
    (_SUBCLASSED, _Digest._number),
    (types.FunctionType, _Digest._function),
    (types.MethodType, _Digest._method),
    (type, _Digest._class),
    ((types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType), _Digest._builtin),
    ((types.ClassMethodDescriptorType, types.MethodWrapperType), _Digest._builtin),
    ((*_WRAPPERS, functools._lru_cache_wrapper), _Digest._wrapper),
    ((dict, OrderedDict, types.MappingProxyType), _Digest._mapping),
    ((list, tuple, deque), _Digest._sequence),
    ((set, frozenset), _Digest._set),
    ((numpy.ndarray, numpy.generic), _Digest._array),
    (
        (logging.Logger, types.ModuleType),
        lambda digest, value, where: digest._put(
            "named", value.__name__ if isinstance(value, types.ModuleType) else value.name
        ),
    ),
    (
        (types.GetSetDescriptorType, types.MemberDescriptorType),
        lambda digest, value, where: digest._put("descriptor", value.__name__),
    ),
    (types.CodeType, lambda digest, value, where: digest._code(value)),
)
