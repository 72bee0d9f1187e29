"""A model file as a user would name it on the command line: factories, right and wrong."""

import torch
from torch import Tensor, nn


class ToyStep(nn.Module):
    """Eight linear layers with one long skip; the loss is the mean squared error against `target`."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if i else 6, 6 if i == 7 else width) for i in range(8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skip = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = nn.functional.silu(layer(x))
        return nn.functional.mse_loss(self.layers[-1](x + skip), target)

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 6), torch.randn(batch_size, 6)


def toy() -> ToyStep:
    return ToyStep()


def frozen() -> ToyStep:
    """The same with its first layers frozen: work for idle time."""
    step = ToyStep()
    step.layers[:3].requires_grad_(False)
    return step


def wider() -> ToyStep:
    """The same with wider layers between the first and the last."""
    step = ToyStep(7)
    step.layers[:3].requires_grad_(False)
    return step


def broken() -> nn.Module:
    raise RuntimeError("no weights\nanywhere")


def not_a_module() -> str:
    return "a string"


def silent() -> nn.Module:
    return nn.Linear(2, 2)


INSTANCE = ToyStep()
