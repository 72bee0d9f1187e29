"""What forward reads of a model beside tensors, as far as its attributes tell, and the classes and globals that its own
code names (`holders.named_by`): equal ones before every call are cheap to compare, and mean the same graph.

    unet.set_attn_processor(...), a processor's scale, enable_freeu, a hook, a config's entry   ->   other settings
    weights, training                                                                            ->   the same
"""

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import numpy
import torch
from torch import nn

from fxpipe.capture.files import is_installed
from fxpipe.capture.holders import ABSENT, AROUND, DEPTH, NOT_STATE, PLAIN, WEIGHTS, Holder
from fxpipe.capture.snapshot import SameEntries
from fxpipe.capture.surroundings import autocasts
from fxpipe.errors import CaptureError


class Settings(list[Any]):
    """Flat; `passed`: how deep it was looked into objects and containers, and which these are, by id.

    What it was looked into: `dicts`, the `objects` that some are the attributes of, and all else, as `holders`, where
    that is all.
    """

    def __init__(self) -> None:
        self.passed: dict[int, tuple[int, int]] = {}
        self.dicts, self.objects, self.holders = list[dict[Any, Any]](), list[Any](), list[Holder]()
        self.are_all = True

    def has_passed(self, value: object, depth: int) -> bool:
        """Whether it was looked as deep into a value, which is told then; else it will have been."""
        known = self.passed.get(id(value), (0, len(self.passed)))
        if known[0] < depth:
            self.passed[id(value)] = depth, known[1]
            return False
        self.append(known[1])
        return True

    def look_into(self, values: object) -> None:
        if isinstance(values, dict):
            self.dicts.append(values)
        else:
            self.are_all = False


_NAMED = (type, types.BuiltinFunctionType, types.ModuleType)
_OF_CLASSES = (staticmethod, classmethod, property)
_TOLD = (
    types.FunctionType, types.MethodType, functools.partial, dict, list, tuple, set, frozenset, deque, numpy.ndarray,
    numpy.generic, torch.Tensor, types.SimpleNamespace, ContextVar, *_OF_CLASSES,
)  # fmt: skip


class _Same:
    """Equal to itself alone, while it is there; not kept, with its weights."""

    __slots__ = ("get",)

    def __init__(self, value: object) -> None:
        try:
            self.get: Callable[[], object] = ref(value)
        except TypeError:
            self.get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (value := self.get()) is not None and other.get() is value

    __hash__ = None  # type: ignore[assignment]


def settings_of(model: nn.Module, named: Sequence[Holder]) -> Settings:
    """Of all its modules, in order, flat; of what is around all modules, and of what its code names."""
    parts = [*model.modules()]
    found = Settings()
    found.passed = {id(part): (DEPTH, -1) for part in parts}
    found += _around()
    for name in AROUND:
        _add_attributes(found, vars(nn.modules.module)[name], 1)
    for holder in named:
        found.holders.append(holder)
        _add_entries(found, {key: value for key, value in holder.entries().items() if _is_told(value)}, DEPTH)
    _add_modules(found, parts)
    found.passed.clear()
    return found


def _around() -> tuple[Any, ...]:
    attention = nn.functional.scaled_dot_product_attention
    return attention, torch.get_default_dtype(), torch.get_default_device(), autocasts()


def _add_modules(found: Settings, parts: Sequence[nn.Module]) -> None:
    for part in parts:
        found += type(part), _forward(type(part))
        found.objects.append(part)
        for name in WEIGHTS:
            found.look_into(part.__dict__.get(name))
        _add_attributes(found, part.__dict__, DEPTH)


def _forward(kind: type) -> Any:
    return getattr(kind, "forward", None)  # a script has none


def _is_told(value: Any) -> bool:
    """Whether a class's attribute, or a global, is compared: numbers and texts, functions, and what has such."""
    kind = type(value)
    return kind in PLAIN or isinstance(value, _TOLD) or not (isinstance(value, type) or is_installed(kind.__module__))


def require_stateless(model: nn.Module) -> None:
    """Refuse hooks that keep values from one call to the next, as a graph has every call alike; and those that bring
    weights for each call, which ranks would not find.

    Raises:
        CaptureError: there is such a hook; names its module.
    """
    for name, part in model.named_modules():
        around = getattr(part, "_hf_hook", None)
        if any(getattr(hook, "offload", False) for hook in getattr(around, "hooks", (around,))):
            raise CaptureError(
                f"module {name or '(the model itself)'}: accelerate holds its weights elsewhere between calls, as of "
                "enable_sequential_cpu_offload(); call the pipeline's remove_all_hooks() first"
            )
        for hook in getattr(getattr(part, "_diffusers_hook", None), "hooks", {}).values():
            if getattr(hook, "_is_stateful", False):
                raise CaptureError(
                    f"module {name or '(the model itself)'}: its {type(hook).__name__} keeps values from step to step, "
                    "which a graph cannot; call disable_cache() first"
                )


def _add_attributes(found: Settings, values: Mapping[Any, Any], depth: int) -> None:
    found.look_into(values)
    _add_entries(found, values, depth)


def _add_entries(found: Settings, values: Mapping[Any, Any], depth: int) -> None:
    for key, value in values.items():
        kind = type(value)
        if key in NOT_STATE:
            continue
        if (kind is dict or kind is OrderedDict) and not value:
            found.dicts.append(value)
            continue
        found.append(key)
        if kind in PLAIN:
            found.append(value)
        else:
            _add(found, value, depth)


def _add(found: Settings, value: Any, depth: int) -> None:
    """A value in depth: containers by what is in them, objects by class and attributes; functions, modules and tensors
    as such."""
    if type(value) in PLAIN or isinstance(value, (*_NAMED, numpy.generic)):
        found.append(value)
    elif isinstance(value, types.FunctionType):
        found.append(ref(value))  # a closure may keep modules; equal where the function is the same
    elif isinstance(value, _OF_CLASSES):
        found.append(_Same(value))
    elif isinstance(value, types.MethodType):
        found.append(_Same(value.__self__))
        _add(found, value.__func__, depth)
    elif isinstance(value, nn.Module | torch.Tensor) or depth == 0:
        found.append(_Same(value) if depth else type(value))
        if depth and isinstance(value, nn.Module) and not found.has_passed(value, DEPTH):  # no part of the model
            parts = [*value.modules()]
            found.passed |= {id(part): (DEPTH, -1) for part in parts}
            _add_modules(found, parts)
            _add_entries(found, dict(value.named_parameters()) | dict(value.named_buffers()), 1)
    elif isinstance(value, ContextVar):
        found.are_all = False
        _add(found, value.get(None), depth)
    elif isinstance(value, functools.partial):
        _add(found, value.func, depth)
        _add(found, value.args, depth)
        _add(found, value.keywords, depth)
    elif found.has_passed(value, depth):
        return
    elif isinstance(value, dict | types.MappingProxyType):
        found += type(value), len(value)
        _add_attributes(found, value, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        found += type(value), len(value)
        if isinstance(value, list | set | deque):
            found.holders.append(Holder("", "", value))
        for one in value:
            _add(found, one, depth - 1)
    else:
        found.append(type(value))
        inside = getattr(value, "__dict__", None)
        if inside is None:
            found.holders.append(slots := Holder("", "", value))
            _add_entries(found, slots.entries(), depth - 1)
        else:
            found.objects.append(value)
            _add_attributes(found, inside, depth - 1)


class Untouched:
    """Whether settings, and a model's tensors, are as they were without a look at each: all that they were read from
    has the same entries, told by where these lie in memory. It takes less than half the time; where it does not hold,
    they may still be equal."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._are_all, self._objects, self._around = settings.are_all, settings.objects, _around()
        self._entries = SameEntries(settings.dicts)
        self._kinds, self._insides = [*map(type, self._objects)], [*map(vars, self._objects)]
        self._forwards = {kind: _forward(kind) for kind in {*self._kinds} if issubclass(kind, nn.Module)}
        self._others = [(holder, holder.entries()) for holder in settings.holders]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._shapes = [*map(_SHAPE, self._tensors)]

    def holds(self) -> bool:
        return (
            self._are_all
            and self._entries.hold()
            and self._around == _around()
            and all(map(is_, map(type, self._objects), self._kinds))
            and all(map(is_, map(vars, self._objects), self._insides))
            and all(_forward(kind) is forward for kind, forward in self._forwards.items())
            and all(_are_same(holder.entries(), before) for holder, before in self._others)
            and [*map(_SHAPE, self._tensors)] == self._shapes
        )


_SHAPE = attrgetter("shape", "dtype", "device")


def _are_same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Of arrays, by their values."""
    if len(now) != len(before):
        return False
    return all(now.get(key, ABSENT) is one or (type(one) is bytes and now[key] == one) for key, one in before.items())
