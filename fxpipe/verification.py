"""Verification: a compiled step against the uncompiled model, loss and every gradient."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.capture import loss_of
from fxpipe.errors import CompileError
from fxpipe.randomness import PlainRandomCalls, SeededDraws

# Relative errors that rounding alone can cause, by the least precise type in the step.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# A gradient far below the largest one is rounding noise: errors are taken relative to at least this share of it.
NOISE_SHARE = 1e-4


@dataclass(frozen=True)
class Verification:
    """Relative errors against one device. A gradient's error is its largest difference over its largest value."""

    loss: float
    reference_loss: float
    loss_error: float
    gradients: Mapping[str, float]
    tolerance: float

    @property
    def max_grad_error(self) -> float:
        return max(self.gradients.values(), default=0.0)

    @property
    def ok(self) -> bool:
        # Written so that a NaN fails.
        return self.loss_error <= self.tolerance and all(e <= self.tolerance for e in self.gradients.values())

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT EXACT"
        lines = [
            f"{verdict}: loss {self.loss:.12g} against {self.reference_loss:.12g} on one device (error {self.loss_error:.1e}), "
            f"{len(self.gradients)} gradients within {self.max_grad_error:.1e}, tolerance {self.tolerance:.0e}"
        ]
        bad = sorted(((e, n) for n, e in self.gradients.items() if not e <= self.tolerance), reverse=True)
        return "\n".join(lines + [f"  {name}: {error:.2e}  <-- HERE" for error, name in bad[:10]])


def reference_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, step: int, device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """One device's loss, gradients by (first) parameter name, and the number of random draws made."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), PlainRandomCalls(), SeededDraws(seed, step, device) as draws:
        loss = loss_of(model(*args, **kwargs))
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}
    return loss.detach(), found, draws.count


def compare(
    loss: torch.Tensor,
    gradients: Mapping[str, torch.Tensor],
    reference: tuple[torch.Tensor, Mapping[str, torch.Tensor], int],
    num_draws: int,
    tolerance: float,
) -> Verification:
    """Compare one step's results; a gradient that only one side has counts against zero."""
    reference_loss, reference_gradients, drawn = reference
    if drawn != num_draws:
        raise CompileError(
            f"the uncompiled model made {drawn} random draws, the captured graph {num_draws}; "
            "it draws under a condition that is not captured, so the two cannot be compared"
        )
    largest = max((float(g.abs().max()) for g in reference_gradients.values() if g.numel()), default=0.0)
    errors = {}
    for name in sorted({*gradients, *reference_gradients}):
        ours, theirs = gradients.get(name), reference_gradients.get(name)
        value = ours if theirs is None else theirs
        assert value is not None
        zero = torch.zeros_like(value)
        errors[name] = _error(zero if ours is None else ours, zero if theirs is None else theirs, NOISE_SHARE * largest)
    return Verification(
        float(loss), float(reference_loss), _error(loss, reference_loss, 0.0), errors, tolerance
    )


def _error(ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    difference = float((ours.to(theirs) - theirs).abs().max()) if theirs.numel() else 0.0
    scale = max(float(theirs.abs().max()) if theirs.numel() else 0.0, floor)
    return difference / scale if scale else difference
