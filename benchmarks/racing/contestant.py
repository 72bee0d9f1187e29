"""What a contestant of the race can do, and whether it computes the step that all others compute."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.racing.model import Batch

TOLERANCE = 1e-4  # of float32, relative to the gradient's largest value, or to 1e-2 of the model's largest


class Contestant(Protocol):
    """One way to train on two ranks. Both ranks call every method, with the whole batch."""

    name: str

    def gradients(self, batch: Batch) -> Iterator[tuple[Tensor | None, Mapping[str, Tensor]]]:
        """The loss, where this rank has it, and this rank's gradients of the batch, of every form of the step."""

    def step(self, batch: Batch) -> None:
        """One step with its optimizer's."""


def on_one_device(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and every gradient of the U-Net by its name."""
    loss = model(**batch)
    loss.backward()
    return loss.detach(), taken_gradients(model)


def taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the parameters that have one, which is taken away."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def require_same(contestant: Contestant, batch: Batch, true: tuple[Tensor, Mapping[str, Tensor]]) -> set[str]:
    """Whether this rank's part is one device's; the names of the gradients that it has.

    Raises:
        SystemExit: it is not: a contestant that computes something else is none.
    """
    largest = max(float(gradient.abs().max()) for gradient in true[1].values())
    for loss, gradients in contestant.gradients(batch):
        if loss is not None and abs(float(loss - true[0])) > TOLERANCE * abs(float(true[0])):
            raise SystemExit(f"{contestant.name}: its loss is {float(loss)}, one device's {float(true[0])}")
        for name, gradient in gradients.items():
            own = true[1][name]
            error = float((gradient - own).abs().max())
            if error > TOLERANCE * max(float(own.abs().max()), 1e-2 * largest):
                raise SystemExit(f"{contestant.name}: the gradient of {name} is {error:.1e} off one device's")
    return set(gradients)


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-5, fused=True)
