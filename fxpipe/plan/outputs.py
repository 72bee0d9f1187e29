"""Outputs: what a step returns beside the loss, put together from the values of its micro-batches.

mse      0.5 * mse[0] + 0.25 * mse[1] + 0.25 * mse[2]        a mean over samples; a number: everywhere, as the loss
pred     cat(pred[0], pred[1], pred[2])                      samples, in their order; where stages have made them
scale    scale[0]                                            the same for every sample
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpipe.plan import ops

Parts = Mapping[tuple[str, int], torch.Tensor]
"""By output and micro-batch; numbers have those of the whole batch, as micro-batch -1."""
WHOLE = -1


@dataclass(frozen=True)
class Output:
    """One of them. `weights` are those of micro-batches' values in their sum, or before they are joined where `samples`
    says how they lie: (dimension, outer, inner). `value` is its name in the graphs."""

    name: str
    value: str
    weights: tuple[float, ...]
    samples: tuple[int, int, int] | None
    dtype: torch.dtype
    is_number: bool

    def of(self, parts: Parts) -> torch.Tensor | None:
        """The whole batch's value; None where a step has not made it."""
        if self.is_number:
            return parts.get((self.name, WHOLE))
        wanted = [(self.name, m) for m, weight in enumerate(self.weights) if weight]
        if any(key not in parts for key in wanted):
            return None
        return self._together([parts[key] for key in wanted], [weight for weight in self.weights if weight])

    def _together(self, parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        scaled = [part if weight == 1 else part * weight for part, weight in zip(parts, weights, strict=True)]
        if self.samples is not None:
            return ops.cat_batch(scaled, *self.samples)
        total = scaled[0]
        for part in scaled[1:]:
            total = total + part
        return total
