"""One mode for all calls that forward makes while it is watched, each looked up in a table once.

Every operation passes here, and so does every size that torch's own kernels ask a traced tensor for, some forty for an
operation: modes on top of each other would be paid for as often.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError

Table = Mapping[Any, Callable[..., Any]]  # what runs instead of a function, given the function and its arguments


class Calls(TorchFunctionMode):
    """Runs what the tables name for a function, and any other function as it is; refuses generators."""

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
            if kwargs.pop("generator") is not None:
                raise CaptureError(
                    "a torch.Generator passed inside the model cannot be captured; draw without generator="
                )
        return func(*args, **kwargs) if instead is None else instead(func, *args, **kwargs)
