"""What of the process a trace depends on, and what is another one inside."""

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """A module's attribute, another one inside."""
    original = vars(module)[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def asked_if_traced(flag: object) -> Iterator[None]:
    """Inside, torch says that it traces where `flag` is true: asked anew, two frames below whoever asks torch."""
    functions = torch.compiler.is_compiling, torch.compiler.is_exporting  # as they are imported elsewhere
    codes = [function.__code__ for function in functions]
    with replaced(torch.compiler, "_is_compiling_flag", flag), replaced(torch.compiler, "_is_exporting_flag", flag):
        try:
            for function, answer in zip(functions, (_compiling, _exporting), strict=True):
                function.__code__ = answer.__code__
            yield
        finally:
            for function, code in zip(functions, codes, strict=True):
                function.__code__ = code


def _compiling() -> bool:  # among torch.compiler's names
    return bool(_is_compiling_flag)  # type: ignore[name-defined]  # noqa: F821


def _exporting() -> bool:
    return bool(_is_exporting_flag)  # type: ignore[name-defined]  # noqa: F821


def autocast_devices() -> list[str]:
    """The kinds of devices that have one."""
    return torch._C._autocast_supported_devices()


@contextmanager
def added(kind: type, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes that a class does not have, inside."""
    names = [
        name for name in attributes if not hasattr(kind, name) or getattr(kind, name) is getattr(object, name, None)
    ]
    for name in names:
        setattr(kind, name, attributes[name])
    try:
        yield
    finally:
        for name in names:
            delattr(kind, name)


@contextmanager
def numbers_by_kind(kinds: Mapping[Any, type]) -> Iterator[None]:
    """Inside, these are of an abstract class of numbers each, and of those that it is of, as `numpy.isscalar` asks."""

    def decide(of: type, kind: type) -> bool:
        return kinds.get(of) is kind or NotImplemented

    for of in kinds:
        of.__subclasshook__ = classmethod(decide)
    _forget_answers()
    try:
        yield
    finally:
        for of in kinds:
            del of.__subclasshook__
        _forget_answers()


def _forget_answers() -> None:
    for of in (numbers.Number, numbers.Complex, numbers.Real, numbers.Rational, numbers.Integral):
        of._abc_caches_clear()  # type: ignore[attr-defined]


def require_no_modes(refuse: Callable[[str], Exception]) -> None:
    """Refuse what changes every call that a trace makes, and is no part of the model."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise refuse("a mode of torch functions or dispatch is active")
    if any(_global_hooks()):
        raise refuse("hooks of all modules are registered")


def _global_hooks() -> list[dict[int, Any]]:
    """Those of all modules, by kind."""
    module = vars(nn.modules.module)
    return [module[name] for name in module if name.startswith("_global_") and isinstance(module[name], dict)]


@contextmanager
def global_hooks_kept() -> Iterator[None]:
    """Hooks of all modules are afterwards those of before: torch 2.11 leaves one of every trace that fails."""
    before = [dict(hooks) for hooks in _global_hooks()]
    try:
        yield
    finally:
        for hooks, found in zip(_global_hooks(), before, strict=True):
            for key in hooks.keys() - found.keys():
                del hooks[key]


def switches() -> list[Any]:
    """What of torch's state a trace may depend on, beside the model."""
    cuda, backends = torch.backends.cuda, torch.backends
    asked = (
        torch.cuda.is_available, torch.xpu.is_available, backends.mps.is_available, backends.mkldnn.is_available,
        torch.get_default_dtype, torch.get_default_device, torch.get_float32_matmul_precision,
        torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
        cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled,
        backends.mha.get_fastpath_enabled, torch.is_inference_mode_enabled,
    )  # fmt: skip
    versions = torch.__version__, torch.version.git_version, str(torch.version.cuda)
    set_ones = backends.cudnn.enabled, backends.cudnn.deterministic, backends.mkldnn.enabled
    return [*versions, *set_ones, *(one() for one in asked)]
