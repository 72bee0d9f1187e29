"""One mode for all calls that forward makes while it is watched, each looked up in a table once.

Every operation passes here, and so does every size that torch's own kernels ask a traced tensor for, some forty for an
operation: modes on top of each other would be paid for as often.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError

Table = Mapping[Any, Callable[..., Any]]  # what runs instead of a function, given the function and its arguments


_own: ContextVar[tuple[torch.Generator, ...]] = ContextVar("generators", default=())


@contextmanager
def own_generators(model: nn.Module, tell: bool = False) -> Iterator[None]:
    """Inside, draws by generators that its modules hold are draws like any other; `tell` warns of the first."""
    values = [value for part in model.modules() for value in vars(part).values()]
    held = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    token = _own.set(tuple(one for one in held if isinstance(one, torch.Generator)))
    if tell and _own.get():
        warnings.warn(
            "the model holds a torch.Generator: what forward draws with it is drawn by the engine, seeded by its seed "
            "and step",
            stacklevel=2,
        )
    try:
        yield
    finally:
        _own.reset(token)


class Calls(TorchFunctionMode):
    """Runs what the tables name for a function, and any other function as it is; refuses generators that no module
    holds, which may be seeded anew in every call."""

    def __init__(self, *tables: Table) -> None:
        super().__init__()
        self._table: dict[Any, Callable[..., Any]] = {}
        for table in tables:
            self._table |= table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = self._table.get(func)
        if not kwargs:
            return func(*args) if instead is None else instead(func, *args)
        if "generator" in kwargs:
            kwargs = dict(kwargs)
            given = kwargs.pop("generator")
            if given is not None and all(given is not own for own in _own.get()):
                raise CaptureError(
                    "a torch.Generator passed inside the model, held by no module, cannot be captured: it may be "
                    "seeded in every call; draw without generator=, or keep the generator in an attribute of the model"
                )
        return func(*args, **kwargs) if instead is None else instead(func, *args, **kwargs)
