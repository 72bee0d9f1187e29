"""Transforms of functions, autograd functions of a user's own, and places in autograd's graph."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from fxpipe.capture.private.process import replaced

# Functions that run a transform, and those that return a function which runs it later.
TRANSFORMS = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
)


TRANSFORMS_OF_LATER_CALLS = ((eager_transforms, "_vjp_with_argnums"), (eager_transforms, "linearize"))


@contextmanager
def plain_scripts(refuse: Callable[[], Any]) -> Iterator[None]:
    """Inside, functions that `torch.jit.script` has compiled run as the Python they are made of; what has none (methods
    of scripts, functions that were loaded) calls `refuse`. Compiled, they keep their gradients from a trace."""

    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(script, "_torchdynamo_inline", None)
        return plain(*args, **kwargs) if plain is not None else refuse()

    with replaced(torch._C.ScriptFunction, "__call__", run), replaced(torch._C.ScriptMethod, "__call__", run):
        yield


def under_vmap() -> bool:
    """Whether one of the transforms under way is a vmap."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(one.key() == torch._C._functorch.TransformType.Vmap for one in stack)


def under_transform() -> bool:
    """Whether a transform of functions is under way."""
    return bool(torch._C._functorch.get_interpreter_stack())


def has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


_MATERIALIZED = "fxpipe.materialized"


def is_node_of(node: Any, kind: Any) -> bool:
    """Whether a node of autograd's graph is that of an autograd function, and so the context of its backward."""
    return isinstance(node, kind._backward_cls)


def is_given_none(node: Any) -> bool:
    """Whether a backward gets None, rather than zeros, for results without gradient."""
    return not vars(node).get(_MATERIALIZED, True)


_AUTOGRAD_FUNCTIONS: list[Callable[..., Any]] = []
"""What is called instead of `apply`, the last of these."""


class _Applied:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # runs with torch's globals
        from fxpipe.capture.private import functions

        return functions._AUTOGRAD_FUNCTIONS[-1](__class__, cls, *args, **kwargs)  # type: ignore[name-defined]


@contextmanager
def on_autograd_function(instead: Callable[[Any, Callable[[], Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """What an autograd function of Python's returns is what `instead` makes of its class, what runs it, and what it
    was given; also where its `apply` has another name (`relu = ReLU.apply`), which is why its code is replaced."""
    function = torch.autograd.Function.__dict__["apply"].__func__
    code = function.__code__
    plain = types.FunctionType(code, function.__globals__, closure=function.__closure__)

    def apply(_: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(cls, partial(plain, cls, *args, **kwargs), (*args, *kwargs.values()))

    set_flag = FunctionCtx.set_materialize_grads

    def note_flag(context: Any, value: bool) -> None:
        set_flag(context, value)
        vars(context)[_MATERIALIZED] = value

    _AUTOGRAD_FUNCTIONS.append(apply)
    function.__code__ = _Applied.apply.__code__
    try:
        with replaced(FunctionCtx, "set_materialize_grads", note_flag):
            yield
    finally:
        function.__code__ = code
        _AUTOGRAD_FUNCTIONS.pop()


def autograd_position() -> int:
    """What the next operation that autograd notes down comes after."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def position_in_backward() -> int | None:
    """The place of the operation whose backward runs, None outside of backwards."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
