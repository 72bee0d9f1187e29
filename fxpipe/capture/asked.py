"""What forward asks that a trace cannot answer as every step would.

if h.is_contiguous(): h = 2 * h                  refused: something else where the answer is another one
if not h.is_contiguous(): h = h.contiguous()     the same values either way
h.as_strided(h.shape, (1, 4))                    refused: it reads h wherever its entries lie
h.clone(memory_format=torch.contiguous_format)   the same values wherever, also by as_strided
if torch.compiler.is_compiling(): h = 2 * h      no, to the model's own code, as in eager steps; yes, to libraries

Tensors lie in memory in a trace as contiguous inputs have it, in a step as the batch and the cuts have it: what forward
asks of that is noted, and it is traced again with other answers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.calls import Table
from fxpipe.capture.files import is_installed
from fxpipe.errors import CaptureError


@dataclass
class Asked:
    """What forward has asked of tensors in memory, in words; answered as it is not, with strides of an `other` order
    of dimensions: the other way round, or channels last.

    `if_traced`: whether its own code asks if it is traced, which is answered by `is_traced`. `nodes`: those of
    autograd's that it has seen.
    """

    other: str = ""
    is_traced: bool = False
    found: list[str] = field(default_factory=list)
    if_traced: bool = False
    nodes: dict[Any, "_Node"] = field(default_factory=dict)

    def require_same(self, is_same: Callable[[], bool], anew: str) -> None:
        """Refuse a forward that is not the same with other answers, where it has asked; one that fails then would say
        so by itself. Or that is another one again, where there is code that may make it so, `anew`."""
        if anew:
            with asking("", self.is_traced):
                if not is_same():
                    raise CaptureError(
                        "forward computes something else whenever it is called, by a clock, random numbers of the "
                        f"system, or a file, maybe at {anew}, but a graph has every call alike; give it what changes "
                        "as an input, or draw with torch"
                    )
        for order in ("reversed", "channels last") if self.found else ():
            try:
                with asking(order, self.is_traced):
                    same = is_same()
            except CaptureError:
                continue
            if same:
                continue
            raise CaptureError(
                f"forward asks {self.found[0]} how a tensor lies in memory, and computes something else where it lies "
                "otherwise, as those of another batch or of a rank may; compute the same for all (contiguous() where "
                "an operation needs it, reshape instead of view)"
            )


T = TypeVar("T")
_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


def answered(trace: Callable[[], T]) -> tuple[T, Asked]:
    """A trace, and what was asked in it. Where it fails as none that the model's own code knows of, it is one."""
    with asking() as asked:
        try:
            return trace(), asked
        except CaptureError:
            if not asked.if_traced:
                raise
            asked.is_traced = True
            return trace(), asked


@contextmanager
def asking(other: str = "", is_traced: bool = False) -> Iterator[Asked]:
    """Inside, what forward asks is noted."""
    token = _asked.set(asked := Asked(other, is_traced))
    try:
        yield asked
    finally:
        _asked.reset(token)


def _answered(other: Callable[..., Any]) -> Callable[..., Any]:
    def answer(func: Any, tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        found, asked = func(tensor, *args, **named), _asked.get()
        if asked is None or not tensor.ndim or private.is_plain(tensor) or (place := _asker()) is None:
            return found
        asked.found.append(f".{func.__name__}() at {place}")
        return other(found, tensor, *args, **named) if asked.other else found

    return answer


def _asker() -> str | None:
    """Where in the user's code; None where torch itself asks."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_name in _ON_THE_WAY:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return None if file.startswith(private.FRAMEWORK) else f"{file}:{frame.f_lineno}"


_ON_THE_WAY = ("__torch_function__", "handle_torch_function", "dim_order")


def _other_strides(found: Any, tensor: torch.Tensor, dim: int | None = None) -> Any:
    """With gaps, which contiguous tensors do not have."""
    asked, count = _asked.get(), tensor.ndim
    last = asked is not None and asked.other == "channels last" and count > 2
    order = [1, *range(count - 1, 1, -1), 0] if last else range(count)  # of dimensions, the nearest entries first
    strides, step = dict[int, Any](), 1 if last else 2
    for at in order:
        strides[at] = step
        step = step * tensor.shape[at]
    return tuple(strides[at] for at in range(count)) if dim is None else strides[dim % count]


def _as_strided(func: Any, input: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    node = None if _asked.get() is None or private.is_plain(input) else private.traced_node(input)
    in_order = node is None or node.kwargs.get("memory_format") is torch.contiguous_format
    if not in_order and not isinstance(input, nn.Parameter) and (place := _asker()) is not None:
        raise CaptureError(
            f"forward calls as_strided() at {place} on a tensor that may lie otherwise in memory, in another batch or "
            "on a rank; use reshape, unfold or slices, or call it on x.clone(memory_format=torch.contiguous_format)"
        )
    return func(input, *args, **named)  # type: ignore[no-any-return]


class IfTraced:
    """In the place of torch's flags that say so: true to libraries, which compute the same either way."""

    def __bool__(self) -> bool:
        frame, asked = sys._getframe(2), _asked.get()
        if is_installed(frame.f_globals.get("__name__")) or frame.f_code.co_filename.startswith(private.FRAMEWORK):
            return True
        if asked is None:
            return False
        asked.if_traced = True
        return asked.is_traced


class _Node:
    """What has made a tensor, but that its gradient goes on as it is."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise CaptureError(HOOK)
        found = getattr(self._node, name)
        return tuple((_shown(one), at) for one, at in found) if name == "next_functions" else found


def _shown(node: Any) -> Any:
    """The same one whenever it is asked for, of a class of its name."""
    if node is None or (asked := _asked.get()) is None:
        return node
    kind = type(node)
    members = {"__class__": property(lambda one: kind)}
    return asked.nodes.setdefault(node, type(kind.__name__, (_Node,), members)(node))


def _grad_fn(func: Any, tensor: torch.Tensor) -> Any:
    found = func(tensor)
    return found if not torch.is_grad_enabled() or _asker() is None else _shown(found)


HOOK = "a gradient hook on a tensor cannot be captured; do what it does in the backward of an autograd function"
ASKED: Table = {
    vars(torch._C.TensorBase)["grad_fn"].__get__: _grad_fn,
    torch.Tensor.is_contiguous: _answered(lambda found, *_, **__: not found),
    torch.Tensor.stride: _answered(_other_strides),
    torch.Tensor.dim_order: _answered(lambda found, *_, **__: found[::-1]),
    torch.Tensor.storage_offset: _answered(lambda found, *_: found + 1),
    **dict.fromkeys((torch.as_strided, torch.Tensor.as_strided), _as_strided),
}
