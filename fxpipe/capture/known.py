"""Numbers that forward reads from tensors which no input and no weight has a part in: the graph has them as numbers.

times = linspace(1, 0, 4)     float(times[1])             0.666..., run as the trace has recorded it
register_buffer("sigma", ..)  float(self.sigma)           its value: another one later is another step, and refused
                              self.scales[1].item()       so of any other tensor from outside
                              float(x[1]), float(w[1])    refused: of inputs, draws and weights
uniform = rand(1)             if uniform > 0.0            True: no draw decides it, as with a dropout of nothing
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.capture.calls import Table
from fxpipe.capture.evaluation import evaluated
from fxpipe.capture.holders import holders_of

Read = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Buffers by name and other tensors that a model holds, each with its value when forward read it as a number."""


@dataclass(frozen=True)
class _Held:
    model: nn.Module
    buffers: Mapping[str, torch.Tensor]
    read: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_held: ContextVar[_Held | None] = ContextVar("held", default=None)


@contextmanager
def buffers_read(model: nn.Module) -> Iterator[Read]:
    """Inside, what forward reads of the model's buffers as numbers is known, and noted down."""
    found = _Held(model, dict(model.named_buffers()))
    token = _held.set(found)
    try:
        yield found.read
    finally:
        _held.reset(token)


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a traced tensor holds where that is known."""
    held, read = _held.get(), dict[str, torch.Tensor]()
    if held is not None and private.is_plain(tensor):
        _note(held, {_name_of(held, tensor): tensor})
        return tensor
    traced = {} if held is None else {private.traced_node(one): name for name, one in held.model.named_buffers()}
    names = {node.name: name for node, name in traced.items() if node is not None}
    given = {} if held is None else {at: held.buffers[name] for at, name in names.items() if name in held.buffers}
    value = evaluated(tensor, given, read)
    if held is None:
        return None if read else value
    _note(held, {names.get(at) or _name_of(held, one): one for at, one in read.items()})
    return value


def _note(held: _Held, read: Mapping[str, torch.Tensor]) -> None:
    with private.outside_trace(), private.outside_fakes():
        held.read.update({name: (one, one.detach().cpu().clone()) for name, one in read.items()})


def _name_of(held: _Held, tensor: torch.Tensor) -> str:
    """Where the model holds a tensor that is no buffer."""
    for holder in holders_of(held.model)[0]:
        for key, value in holder.entries().items():
            if value is tensor:
                return f"{holder.owner}.{holder.name(key)}".lstrip(".")
    return f"tensor {len(held.read)}"


def _read(func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    value = value_of(tensor)
    if value is None:
        return func(tensor, *args)
    with private.outside_trace(), private.outside_fakes():
        return func(value, *args)


def _formatted(func: Any, tensor: torch.Tensor, form: str) -> Any:
    """The text of a number; of one that is not known, that of the tensor, as without a form, for logs to print."""
    if not form or tensor.ndim:
        return func(tensor, form)
    return str(tensor) if value_of(tensor) is None else _read(func, tensor, form)


KNOWN: Table = {
    **dict.fromkeys(
        (
            torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__,
            torch.Tensor.__float__, torch.Tensor.__index__,
        ),
        _read,
    ),
    torch.Tensor.__format__: _formatted,
}  # fmt: skip
