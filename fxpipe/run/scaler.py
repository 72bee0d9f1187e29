"""Scaled losses, so that small gradients do not vanish in float16: torch's own scaler, with one verdict for all ranks.

    rank 0    unscale_: all finite     ->  some rank: inf  ->  step left out, scale halved
    rank 1    unscale_: inf            ->  some rank: inf  ->  step left out, scale halved

A rank sees the gradients of what it trains alone. Were only those with an overflow to leave a step out, the parts of
the model would be of different steps, and scales would differ from then on.
"""

from collections.abc import Callable
from typing import Any

import torch

from fxpipe.capture import private


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` of an engine, see `engine.scaler()`; every rank calls every method.

    Args:
        on_any: collective: whether what is true here is true on any rank.
    """

    def __init__(self, device: torch.device, on_any: Callable[[bool], bool], **options: Any) -> None:
        super().__init__(device.type, **options)
        self._where, self._on_any = device, on_any

    @property
    def now(self) -> torch.Tensor | None:
        """What losses are multiplied with; None where that is nothing."""
        return self.scale(torch.ones((), device=self._where)) if self.is_enabled() else None

    def unscale_(self, optimizer: Any) -> None:
        """Collective: as torch's, and whether any rank's gradients are not finite, known on all."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found = private.overflows(self, optimizer)
        overflown = self._on_any(any(bool(value) for value in found.values()))
        for device in found or (self._where,):  # none where this rank has no gradient
            found[device] = torch.full((), float(overflown), device=device)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as torch's; left out on all ranks or on none."""
        if self.is_enabled() and not private.is_unscaled(self, optimizer):
            self.unscale_(optimizer)  # fused optimizers would look at this rank's gradients alone
        return super().step(optimizer, *args, **kwargs)
