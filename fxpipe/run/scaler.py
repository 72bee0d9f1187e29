"""Scaled losses, so that small gradients do not vanish in float16: torch's own scaler, with one verdict for all ranks.

    rank 0    unscale_: all finite     ->  some rank: inf  ->  step left out, scale halved
    rank 1    unscale_: inf            ->  some rank: inf  ->  step left out, scale halved

A rank sees the gradients of what it trains alone. Were only those with an overflow to leave a step out, the parts of
the model would be of different steps, and scales would differ from then on.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fxpipe.capture import private
from fxpipe.errors import RunError
from fxpipe.run.engine_base import EngineBase


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
        return self.scale(torch.ones((), dtype=torch.float32, device=self._where)) if self.is_enabled() else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the state of a run in which nothing was scaled leaves it as it is."""
        if state_dict:
            super().load_state_dict(state_dict)

    def unscale_(self, optimizer: Any) -> None:
        """Collective: as torch's, and whether any rank's gradients are not finite, known on all."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found = private.overflows(self, optimizer)
        overflown = self._on_any(any(bool(value) for value in found.values()))
        for device in found or (self._where,):  # none where this rank has no gradient
            found[device] = torch.full((), float(overflown), dtype=torch.float32, device=device)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Collective: as torch's; left out on all ranks or on none."""
        if self.is_enabled() and not private.is_unscaled(self, optimizer):
            self.unscale_(optimizer)  # fused optimizers would look at this rank's gradients alone
        return super().step(optimizer, *args, **kwargs)


class EngineScaler(EngineBase):
    """Scaled losses, as every engine offers them."""

    def scaler(self, **options: Any) -> GradScaler:
        """A `torch.amp.GradScaler` whose verdict is that of all ranks, enabled where gradients are in float16.

        Disabled, in other steps, it is torch's: `scaler.step(optimizer)` steps the optimizer, and nothing is scaled. Of
        trained weights in float16, whose gradients torch unscales for nobody, it warns.

        Args:
            options: those of torch's; `enabled=False` leaves it out.

        Raises:
            RunError: it is to be enabled where it can scale nothing.
        """
        self._require_open("scaler")
        scaled = any(program.scaled for program in self._plan.programs)
        why = "" if scaled else self._why_unscaled()
        if options.get("enabled") and not scaled:
            raise RunError(why or "no gradient of this step is in float16, so that none is scaled: leave enabled out")
        if why and options.get("enabled", True) and self._is_first():
            warnings.warn(why, stacklevel=2)
        return GradScaler(self.device, self._on_any, **{"enabled": scaled, **options})

    def _why_unscaled(self) -> str:
        """Where weights are such that a scaler would refuse their gradients."""
        trained = ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)
        half = [name for name, parameter in trained if parameter.dtype == torch.float16]
        if not half:
            return ""
        return (
            f"{len(half)} trained weights ({half[0]}, ...) are in float16, whose gradients no scaler takes: nothing is "
            "scaled, and small gradients become zero; keep what is trained in float32, as "
            "diffusers.training_utils.cast_training_params does, and let what is not require no gradient"
        )

    def _scale_losses(self, scaler: GradScaler | None) -> None:
        """What losses are multiplied with from now on."""
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise RunError(
                f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}, which sees the overflows of one rank "
                "alone; use engine.scaler(), with the same options"
            )
        self._loss_scale = None if scaler is None else scaler.now
