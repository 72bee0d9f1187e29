"""A training step around one function, and whether its compiled form is exact."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.inputs import call_of
from fxpipe.program import Program

Middle = Callable[["Step", Tensor, Tensor], Tensor]


class Step(nn.Module):
    """mse(b(middle(a(x), y)), y) on [batch, 4], with things that a middle might use."""

    def __init__(self, middle: Middle, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle = middle
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.rand(4))
        self.to(dtype)
        self.table = torch.ones(4, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.middle(self, self.a(x), y)), y)


class Steps(nn.Module):
    """Several side by side, by name, with the sum of their losses: a gradient's name tells which of them is wrong."""

    def __init__(self, middles: Mapping[str, Middle]) -> None:
        super().__init__()
        self.steps = nn.ModuleDict({name: Step(middle) for name, middle in middles.items()})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([step(x, y) for step in self.steps.values()]).sum()


def batch(size: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x and y of a `Step`."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(size, 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, y


def exact(model: nn.Module, inputs: Any, **options: Any) -> Program:
    """The step compiled without a search for shorter orders, once its loss and gradients are one device's."""
    program = fxpipe.compile(model, 2, example_inputs=inputs, budget=0, **options)
    args, kwargs = call_of(inputs)
    report = program.verify(*args, **kwargs)
    assert report.ok, report
    assert report.gradients, "nothing was compared"
    assert not isinstance(model, Steps) or len(model.steps) == 1 or report.tolerance == 1e-10, "a step loosens others'"
    return program


def losses_of(engine: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    """Of a step of training on each of these."""
    losses = []
    for one in batches:
        losses.append(float(engine.step(one).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def needed_bytes(program: Program) -> int:
    """The most memory that any rank needs at once, in a step alone or with the next batch's frozen work."""
    return max(max(program.simulate(filled=filled).peak_bytes) for filled in (False, True))
