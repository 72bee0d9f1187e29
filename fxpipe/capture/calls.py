"""One mode for all calls that forward makes while it is watched, each looked up in a table once.

Every operation passes here, and so does every size that torch's own kernels ask a traced tensor for, some forty for an
operation: modes on top of each other would be paid for as often.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.capture import private
from fxpipe.errors import CaptureError

Table = Mapping[Any, Callable[..., Any]]  # what runs instead of a function, given the function and its arguments


_off: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("off", default=None)  # parameters frozen for a while
_own: ContextVar[tuple[torch.Generator, ...]] = ContextVar("generators", default=())


@contextmanager
def own_generators(model: nn.Module, tell: bool = False) -> Iterator[None]:
    """Inside, draws by generators that its modules hold are draws like any other; `tell` warns of the first."""
    values = [value for part in model.modules() for value in vars(part).values()]
    held = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    own = tuple(one for one in held if isinstance(one, torch.Generator))
    token, before = _own.set(own), [one.get_state() for one in own]
    if tell and _own.get():
        warnings.warn(
            "the model holds a torch.Generator: what forward draws with it is drawn by the engine, seeded by its seed "
            "and step",
            stacklevel=2,
        )
    try:
        yield
        if tell and not all(map(torch.equal, before, [one.get_state() for one in own])):  # a trace draws nothing
            raise CaptureError(
                "forward seeds a torch.Generator of the model, but its draws are the engine's, each by its place; seed "
                "it in __init__, and draw once what is used twice"
            )
    finally:
        _own.reset(token)
        if tell:
            for one, state in zip(own, before, strict=True):
                one.set_state(state)


@contextmanager
def flags_kept() -> Iterator[None]:
    """Inside, parameters may be frozen that are not afterwards: what reads them meanwhile gives them no gradient.

    Raises:
        CaptureError: one is still frozen at the end.
    """
    token = _off.set({})
    try:
        yield
        if _off.get():
            raise CaptureError(_FLAG.format(False))
    finally:
        _off.reset(token)


def is_watched() -> bool:
    """Whether it is this thread's forward that is watched."""
    return _off.get() is not None


def set_flag(func: Any, tensor: torch.Tensor, value: bool = True) -> Any:
    """Instead of setting whether a parameter requires grad; that of other tensors is set."""
    off = _off.get()
    if off is None or not isinstance(tensor, nn.Parameter):
        return func(tensor, value)
    if value and not tensor.requires_grad and id(tensor) not in off:
        raise CaptureError(_FLAG.format(value))
    if value:
        off.pop(id(tensor), None)
    elif tensor.requires_grad:
        off[id(tensor)] = tensor
    return func(tensor, value)


_FLAG = (
    "forward sets requires_grad={} on a parameter, and leaves it so, but a graph has every call alike; set it before "
    "compiling, or set it back in forward"
)


class Calls(TorchFunctionMode):
    """Runs what the tables name for a function, and any other function as it is; refuses generators that no module
    holds, which may be seeded anew in every call. Errors that only a trace gives are noted, which forward may catch."""

    def __init__(self, *tables: Table, note_failure: Callable[[Exception], None] | None = None) -> None:
        super().__init__()
        self._note_failure = note_failure
        self._table: dict[Any, Callable[..., Any]] = {}
        for table in tables:
            self._table |= table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = self._table.get(func)
        if instead is not set_flag and (off := _off.get()) and torch.is_grad_enabled() and _reads(func):
            cut = _Cut(off)
            args, kwargs = pytree.tree_map(cut.off, (args, kwargs))
            return pytree.tree_map(cut.on, self._called(func, instead, args, kwargs))
        return self._called(func, instead, args, kwargs)

    def _called(self, func: Any, instead: Any, args: Any, kwargs: Any) -> Any:
        try:
            if not kwargs:
                return func(*args) if instead is None else instead(func, *args)
            if "generator" in kwargs:
                kwargs = dict(kwargs)
                given = kwargs.pop("generator")
                if given is not None and all(given is not own for own in _own.get()):
                    raise CaptureError(_GENERATOR)
            return func(*args, **kwargs) if instead is None else instead(func, *args, **kwargs)
        except Exception as error:
            if self._note_failure is not None and private.is_of_traces(error):
                self._note_failure(error)
            raise


_GENERATOR = (
    "a torch.Generator passed inside the model, held by no module, cannot be captured: it may be seeded in every call; "
    "draw without generator=, or keep the generator in an attribute of the model"
)


_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}


def _reads(func: Any) -> bool:
    """Whether a function reads what a tensor holds, and does not ask for an attribute."""
    return func in _VIEWS or getattr(func, "__name__", "") not in ("__get__", "__set__")


class _Cut:
    """Parameters that are frozen here, whose gradients other parts of forward have, as a graph has them frozen."""

    def __init__(self, frozen: Mapping[int, torch.Tensor]) -> None:
        self._frozen = frozen
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def off(self, one: Any) -> Any:
        """What a function is given instead."""
        if id(one) not in self._frozen:
            return one
        self._given.append((one.detach(), one))
        return self._given[-1][0]

    def on(self, one: Any) -> Any:
        """A result that is a parameter itself, as of `contiguous`, and is read where this is not frozen, too."""
        return next((own for given, own in self._given if one is given), one)


def require_on(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse parameters that are frozen here where nobody sees them read."""
    if any(id(one) in (_off.get() or ()) for one in tensors):
        raise CaptureError("an autograd function reads a parameter that forward freezes for a while; give it .detach()")
