"""Inputs are told apart whatever they are called: in capitals, as a program's own inputs, as the next batch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe

NAMES = [
    ("X", "x", "x_1"),
    ("timeStep", "time_step", "B"),
    ("random", "next_x", "x"),
    ("transport", "saved", "carried"),
    ("Random", "nextX", "x"),
    ("Transport", "Saved", "Carried"),
]


class Denoiser(nn.Module):
    """Two convolutions of one input each, and a third input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.W, self.w = nn.Parameter(torch.randn(3, 1, 1)), nn.Parameter(torch.randn(3, 1, 1))
        self.Net, self.net, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        predicted: Tensor = self.last(torch.relu(self.Net(a) * self.W) + 2 * self.net(b) * self.w + 3 * c)
        return predicted


def named(kind: type[nn.Module], names: tuple[str, ...], *given: Any) -> nn.Module:
    """One whose forward's arguments have these names."""
    own: dict[str, Any] = {}
    told = ", ".join(names)
    exec(f"def forward(self, {told}): return self.called({told})", own)
    model: nn.Module = type("Named", (kind,), {"called": kind.forward, "forward": own["forward"]})(*given)
    return model.double()


class Step(nn.Module):
    """One training step: an encoder that is frozen reads two of the inputs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.denoiser, self.names = Denoiser(), names
        self.encoder = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        with torch.no_grad():
            of_a, of_b = self.encoder(a), self.encoder(b) * 2
        loss: Tensor = (self.denoiser(of_a, of_b, c) - torch.randn_like(c)).square().mean()
        return loss

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {name: torch.randn(batch_size, 3, 8, 8, dtype=torch.float64) for name in self.names}


@pytest.mark.parametrize("names", NAMES)
def test_a_step_trains_exactly(names: tuple[str, ...]) -> None:
    model = named(Step, names, names)
    program = fxpipe.compile(model, 2, batch_size=4, microbatches=2, stages=2, schedule="1f1b", fill="idle")
    batch, following = model.example_inputs(4), model.example_inputs(4)  # type: ignore[operator]
    assert program.verify(**batch).ok
    plain, filled = program.local_engine(seed=0), program.local_engine(seed=0)
    expected = [plain.step(batch), plain.step(following)]
    torch.testing.assert_close([filled.step(batch, following), filled.step(following)], expected, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("layout", [{"patches": 2}, {"stages": 2}, {"stages": 2, "patches": 2, "mode": "displaced"}])
def test_a_denoiser_predicts_exactly(names: tuple[str, ...], layout: dict[str, Any]) -> None:
    model, generator = named(Denoiser, names), torch.Generator().manual_seed(1)
    call = {name: torch.randn(1, 3, 16, 16, dtype=torch.float64, generator=generator) for name in names}
    sampler = fxpipe.compile_sampler(model, 2, example=call, cfg=1, **layout)
    assert sampler.verify().ok
