"""Pipelines of diffusers, or written alike: which of their modules predicts, what it is called with, and the same
pipeline with another module in its place.

pipe(prompt="...", height=64)   ->   pipe.unet(sample [2, 4, 8, 8], t, encoder_hidden_states=..., return_dict=False)
pipe with unet = its shell      ->   the user's own loop, scheduler and callbacks, around calls that go elsewhere
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fxpipe.capture.model_digest import STANDS_FOR
from fxpipe.capture.private import uncompiled
from fxpipe.capture.state import state_kept
from fxpipe.errors import CompileError
from fxpipe.models.backbones import SAMPLE_NAMES, is_backbone, takes_sample_and_time


def shell(
    module: nn.Module, run: Callable[..., Any], runs_of: Callable[[nn.Module], Callable[..., Any]] | None = None
) -> nn.Module:
    """The module itself in all but its calls, which go to `run`: of its class, with its attributes and weights.

    A deep copy has weights of its own, so its calls go to what `runs_of` gives for the module's copy; where that is
    left out it is a copy of the module.
    """
    kind = type(module)

    def copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        own = copy.deepcopy(module, memo)
        return own if runs_of is None else shell(own, runs_of(own), runs_of)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    @contextmanager
    def cache_context(self: nn.Module, name: str, **about: Any) -> Iterator[None]:
        """What a pipeline calls in here belongs to the stream of this name; the module is told, too."""
        told = getattr(module, "cache_context", None)
        stream: Any = run
        before, stream.stream_name = getattr(run, "stream_name", None), name
        try:
            with nullcontext() if told is None else told(name, **about):
                yield
        finally:
            stream.stream_name = before

    # torch.compile of a shell has nothing to compile, and ranks run nothing that it could trace
    members = {"cache_context": cache_context, "__deepcopy__": copied, STANDS_FOR: module}
    return _sharing(module, _like(kind, torch.compiler.disable(call), **members))


class _Recorded(BaseException):
    """The first call, on its way out of the pipeline, which may log errors, or go on after them."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("recorded")
        self.name, self.call = name, (args, kwargs)


def is_pipeline(model: object) -> bool:
    """Whether `model` is a pipeline: no module, but something with components that one can call."""
    return not isinstance(model, nn.Module) and callable(model) and isinstance(_components(model), Mapping)


def denoiser_names(pipe: Any) -> list[str]:
    """The names of the components that predict: by their arguments, else by the names that diffusers gives them. A
    ControlNet predicts where nothing else might, with its backbone in it.

    Raises:
        CompileError: there is none.
    """
    components = _components(pipe) or {}
    able = [name for name, part in components.items() if takes_sample_and_time(uncompiled(part))]
    found = [name for name in able if is_backbone(uncompiled(components[name]))] or able
    found = found or [name for name in ("unet", "transformer") if isinstance(components.get(name), nn.Module)]
    if not found:
        parts = ", ".join(f"{name}: {type(part).__name__}" for name, part in components.items())
        raise CompileError(
            f"{type(pipe).__name__} has no denoiser among its components ({parts}): a module with a dict as its config "
            f"whose forward takes one of {', '.join(SAMPLE_NAMES)} and a timestep, or one called unet or transformer; "
            "or compile the module that predicts, with example=its keyword arguments"
        )
    return found


def recorded_call(
    pipe: Any, names: Sequence[str], example: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The first call of a component among `names` when the pipeline is called with `example`; it ends there, and what
    the pipeline has set on its modules by then, and would have set back at its own end, is as it was.

    Returns:
        The component's name, and the call's arguments.

    Raises:
        CompileError: the pipeline never calls one, or fails before.
    """

    def recorder(name: str) -> nn.Module:
        def record(*args: Any, **kwargs: Any) -> Any:
            raise _Recorded(name, args, kwargs)

        return shell(uncompiled(getattr(pipe, name)), record)

    recording = with_components(pipe, {name: recorder(name) for name in names} | own_schedulers(pipe))
    expected = " or ".join(names)
    modules = [part for part in (_components(pipe) or {}).values() if isinstance(part, nn.Module)]
    try:
        with torch.no_grad(), ExitStack() as kept:
            for module in modules:
                kept.enter_context(state_kept(module))
            recording(**example)
    except _Recorded as recorded:
        return recorded.name, *recorded.call
    except Exception as error:
        raise CompileError(
            f"{type(pipe).__name__}(**example) fails before it calls its {expected}: {type(error).__name__}: {error}; "
            "example must be a call that works"
        ) from error
    raise CompileError(f"{type(pipe).__name__}(**example) never calls its {expected}; give an example that samples")


def own_schedulers(pipe: Any) -> dict[str, object]:
    """Copies by name, for a call that is to leave no steps set."""
    parts = (_components(pipe) or {}).items()
    return {name: copy.deepcopy(part) for name, part in parts if hasattr(part, "set_timesteps")}


def with_components(
    pipe: Any,
    parts: Mapping[str, object],
    around: Callable[[], AbstractContextManager[None]] | None = None,
    finish: Callable[[Any], Any] = lambda result: result,
) -> Any:
    """A shallow copy of the pipeline with these components, also in pipelines that it is made of; its calls run inside
    `around()`, and `finish` has what they return."""
    new = copy.copy(pipe)
    inner = {name: _same(pipe, one, parts) for name, one in vars(pipe).items() if is_pipeline(one)}
    new.__dict__.update({name: with_components(getattr(pipe, name), same) for name, same in inner.items() if same})
    new.__dict__.update(parts)  # past its own setter, which writes the component's class into the saved config
    if around is not None:
        new.__class__ = _around(type(pipe), around, finish)
    return new


def _same(pipe: Any, inner: Any, parts: Mapping[str, object]) -> dict[str, object]:
    """Of these components of a pipeline those that another one has, by its names."""
    of = {id(getattr(pipe, name)): part for name, part in parts.items() if getattr(pipe, name, None) is not None}
    return {name: of[id(own)] for name, own in (_components(inner) or {}).items() if id(own) in of}


def _around(kind: type, around: Callable[[], AbstractContextManager[None]], finish: Callable[[Any], Any]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around():
            return finish(kind.__call__(self, *args, **kwargs))

    return _like(kind, call)


def _like(kind: type, call: Callable[..., Any], **members: Any) -> type:
    """A class that differs from `kind` in its calls, and in these members."""
    functools.update_wrapper(call, kind.__call__)
    return _subclass(kind, {"__call__": call, **members})


def _subclass(kind: type, members: dict[str, Any]) -> type:
    """Of its name, and equal to it: some ask whether a component's class is among those that a pipeline takes."""

    def equal(self: type, other: object) -> bool:
        return other is self or other is kind

    of_class = type(type(kind).__name__, (type(kind),), {"__eq__": equal, "__hash__": lambda self: hash(kind)})
    made: type = of_class(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **members})
    return made


def _components(pipe: object) -> Any:
    """By name; a pipeline whose registry is not complete has none."""
    return getattr(pipe, "components", None)


def with_submodule(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """The module itself in all but a direct submodule, in whose place is `part` for as long as it stays the same one:
    of its class, with its attributes and weights."""
    own = module._modules.get(name)

    def found(self: nn.Module) -> nn.Module | None:
        now = module._modules.get(name)
        return part if now is own else now

    def copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return with_submodule(copy.deepcopy(module, memo), name, copy.deepcopy(part, memo))

    return _sharing(module, _subclass(type(module), {name: property(found), "__deepcopy__": copied}))


def _sharing(module: nn.Module, kind: type) -> nn.Module:
    """Of that class, with the attributes of `module`: what is set on either is set on both."""
    new: nn.Module = object.__new__(kind)
    object.__setattr__(new, "__dict__", module.__dict__)
    return new
