"""Pipelines of diffusers, or written alike: which of their modules predicts, what it is called with, and the same
pipeline with another module in its place.

pipe(prompt="...", height=64)   ->   pipe.unet(sample [2, 4, 8, 8], t, encoder_hidden_states=..., return_dict=False)
pipe with unet = shell          ->   the user's own loop, scheduler and callbacks, around the shell
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CompileError
from fxpipe.models.backbones import is_backbone

_DENOISERS = ("unet", "transformer", "prior", "decoder")


class Shell(nn.Module):
    """Stands where `module` stood: calls go to `run`, everything else to the module."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["wrapped"], self.__dict__["run"] = module, run  # no submodule: its weights are not listed twice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)


class _Recorded(Exception):
    """The first call, on its way out of the pipeline."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("recorded")
        self.call = args, kwargs


def is_pipeline(model: object) -> bool:
    """Whether `model` is a pipeline: no module, but something with components that one can call."""
    return not isinstance(model, nn.Module) and callable(model) and isinstance(_components(model), Mapping)


def denoiser_name(pipe: Any) -> str:
    """The name of the component that predicts.

    Raises:
        CompileError: there is none, or it cannot be told which.
    """
    components = _components(pipe) or {}
    found: list[str] = [name for name, part in components.items() if is_backbone(part)]
    named = [name for name in _DENOISERS if name in found]
    if len(found) > 1 and named:
        found = named[:1]
    if len(found) != 1:
        parts = ", ".join(f"{name}: {type(part).__name__}" for name, part in components.items())
        raise CompileError(
            f"{type(pipe).__name__} has {len(found)} denoisers {found} among its components ({parts}); compile the "
            "module that predicts, with example=its keyword arguments"
        )
    return found[0]


def recorded_call(pipe: Any, name: str, example: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the first call of component `name` when the pipeline is called with `example`; it ends there.

    Raises:
        CompileError: the pipeline never calls it, or fails before.
    """

    def record(*args: Any, **kwargs: Any) -> Any:
        raise _Recorded(args, kwargs)

    own = getattr(pipe, name)
    scheduler = copy.deepcopy(getattr(pipe, "scheduler", None))  # a call sets its steps
    recording = with_components(pipe, {name: Shell(own, record)})
    if scheduler is not None:
        recording.__dict__["scheduler"] = scheduler
    try:
        with torch.no_grad():
            recording(**example)
    except _Recorded as recorded:
        return recorded.call
    except Exception as error:
        raise CompileError(
            f"{type(pipe).__name__}(**example) fails before it calls its {name}: {type(error).__name__}: {error}; "
            "example must be a call that works"
        ) from error
    raise CompileError(f"{type(pipe).__name__}(**example) never calls its {name}; give an example that samples")


def with_components(
    pipe: Any,
    parts: Mapping[str, object],
    around: Callable[[], AbstractContextManager[None]] | None = None,
    finish: Callable[[Any], Any] = lambda result: result,
) -> Any:
    """A shallow copy of the pipeline with these components; its calls run inside `around()`, and `finish` has what they
    return."""
    new = copy.copy(pipe)
    new.__dict__.update(parts)  # past its own setter, which writes the component's class into the saved config
    if around is not None:
        new.__class__ = _around(type(pipe), around, finish)
    return new


def _around(kind: type, around: Callable[[], AbstractContextManager[None]], finish: Callable[[Any], Any]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around():
            return finish(kind.__call__(self, *args, **kwargs))

    call.__doc__ = kind.__call__.__doc__
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _components(pipe: object) -> Any:
    """By name; a pipeline whose registry is not complete has none."""
    return getattr(pipe, "components", None)


def with_submodule(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """A shallow copy of a module, with another direct submodule; weights are shared."""
    new = copy.copy(module)
    new.__dict__["_modules"] = {**module._modules, name: part}
    return new
