"""Contestants of the race compute the same step: the U-Net cut by hand is the U-Net, and who computes less is told."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.racing.contestant import on_one_device, require_same
from benchmarks.racing.model import Batch, RacedStep
from benchmarks.racing.units import Stage, units


@pytest.fixture(scope="module")
def step() -> RacedStep:
    return RacedStep(tiny=True).double()


def cut_step(step: RacedStep, batch: Batch, cut: int) -> Tensor:
    """The loss by the two stages of a cut."""
    latents, text = step.encoded(batch["pixels"], batch["token_ids"])
    times = {"text": text, "timesteps": batch["timesteps"]}
    crossing = Stage(step, cut, True)(step.noisy(latents, batch["noise"], batch["timesteps"]), **times)
    return mse_loss(Stage(step, cut, False)(*crossing, **times), batch["noise"])


class ByHand:
    name = "by hand"

    def __init__(self, step: RacedStep, cut: int, scale: float = 1.0) -> None:
        self.model, self.cut, self.scale = step, cut, scale

    def gradients(self, batch: Batch) -> Iterator[tuple[Tensor | None, Mapping[str, Tensor]]]:
        loss = cut_step(self.model, batch, self.cut)
        parameters = dict(self.model.unet.named_parameters())
        gradients = torch.autograd.grad(self.scale * loss, [*parameters.values()])
        yield loss.detach(), {f"unet.{name}": gradient for name, gradient in zip(parameters, gradients, strict=True)}

    def step(self, batch: Batch) -> None: ...


def doubles(step: RacedStep) -> Batch:
    batch = step.example_inputs(2)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def test_every_cut_is_the_unet(step: RacedStep) -> None:
    batch = doubles(step)
    true = on_one_device(step, batch)
    for cut in range(1, len(units(step))):
        assert require_same(ByHand(step, cut), batch, true) == true[1].keys()


def test_who_computes_less_is_told(step: RacedStep) -> None:
    batch = doubles(step)
    with pytest.raises(SystemExit, match=r"by hand: the gradient of unet\..* off one device's"):
        require_same(ByHand(step, 3, scale=0.5), batch, on_one_device(step, batch))
