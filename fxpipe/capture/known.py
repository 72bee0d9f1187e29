"""Numbers that forward reads from tensors which nothing but numbers made: the graph has them as numbers.

times = linspace(1, 0, 4)     float(times[1])             0.666..., run as the trace has recorded it
                              float(x[1]), float(w[1])    refused: of inputs, draws and what the model holds
uniform = rand(1)             if uniform > 0.0            True: no draw decides it, as with a dropout of nothing
"""

from typing import Any

import torch

from fxpipe.capture import private
from fxpipe.capture.calls import Table


def _read(func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    value = private.value_of(tensor)
    if value is None:
        return func(tensor, *args)
    with private.outside_trace(), private.outside_fakes():
        return func(value, *args)


KNOWN: Table = dict.fromkeys(
    (
        torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__,
        torch.Tensor.__index__,
    ),
    _read,
)  # fmt: skip
