"""Trains a small class-conditional U-Net on scikit-learn's 8x8 digits until its samples are digits.

    python examples/digits.py --single                  # one device, eager
    torchrun --nproc-per-node 4 examples/digits.py      # four ranks, each running its own compiled graph

    torchrun --nproc-per-node 4 examples/digits.py --save run            # a checkpoint every 100 steps
    torchrun --nproc-per-node 2 examples/digits.py --save run --resume   # goes on from the newest, on any layout

Each writes `digits_<where>.json` (loss of every step, share of samples that a classifier recognises) and
`digits_<where>.png` (a row of samples per digit). Batches and noise depend on the step alone: both loss curves agree.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import UNet2DModel
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.randomness import SeededDraws
from fxpipe.run.engine import Engine

NUM_TIMESTEPS = 200
BETAS = torch.linspace(1e-4, 0.06, NUM_TIMESTEPS)  # variance of the noise that each timestep adds
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
Loss = Callable[[Tensor, Tensor, int], Tensor]


class DigitsStep(nn.Module):
    """One training step: noise the images [B, 1, 8, 8] at random timesteps, predict the noise, mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            attention_head_dim=8,
            num_class_embeds=10,
        )
        self.register_buffer("signal", torch.cumprod(1 - BETAS, 0))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        timesteps = torch.randint(0, NUM_TIMESTEPS, (images.shape[0],), device=images.device)
        signal = self.get_buffer("signal")[timesteps].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * images + (1 - signal).sqrt() * noise
        predicted = self.unet(noisy, timesteps, class_labels=labels).sample
        return nn.functional.mse_loss(predicted, noise)

    def example_inputs(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, 1, 8, 8), torch.zeros(batch_size, dtype=torch.long)


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] in [-1, 1] and labels [1797]."""
    data: Any = load_digits()
    return torch.tensor(data.images / 8 - 1, dtype=torch.float32)[:, None], torch.tensor(data.target)


def batches(seed: int, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches in every process that asks with the same seed."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        chosen = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
        yield images[chosen], labels[chosen]


def one_device(step: DigitsStep, seed: int) -> Loss:
    """Loss and gradients of the uncompiled step, drawing the numbers that a compiled one draws."""

    def loss_of(images: Tensor, labels: Tensor, index: int) -> Tensor:
        with SeededDraws(seed, index, images.device):
            loss: Tensor = step(images, labels)
        loss.backward()
        return loss.detach()

    return loss_of


def several(engine: Engine) -> Loss:
    """The same on several ranks; the engine counts steps itself."""
    return lambda images, labels, index: engine.step((images, labels))


@dataclass
class Saves:
    """Where a run is saved, after how many steps each, and whether it begins with what is there; one device loads."""

    engine: Engine | None
    directory: Path
    every: int
    resume: bool

    def load(self, step: DigitsStep, optimizer: Any, scheduler: Any) -> list[float]:
        """The losses of the steps before."""
        if not self.resume:
            return []
        if self.engine is None:
            loaded = fxpipe.load_checkpoint(self.directory, step, optimizer, scheduler=scheduler)
        else:
            loaded = self.engine.load(self.directory, optimizer, scheduler=scheduler)
        losses: list[float] = loaded.extra["losses"]
        return losses

    def save(self, optimizer: Any, scheduler: Any, losses: list[float]) -> None:
        if self.engine is not None and len(losses) % self.every == 0:
            extra = {"losses": losses}
            self.engine.save(self.directory, optimizer, scheduler=scheduler, extra=extra, asynchronous=True)


def train(
    loss_of: Loss, step: DigitsStep, seed: int, num_steps: int, report: Callable[[str], None], saves: Saves | None
) -> list[float]:
    """Trains in place; the loss of every step. `loss_of(images, labels, index)` leaves gradients in the parameters."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=LEARNING_RATE)
    warm_then_cool = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps + 1)
    losses = saves.load(step, optimizer, warm_then_cool) if saves else []
    for index, (images, labels) in islice(enumerate(batches(seed, num_steps)), len(losses), None):
        losses.append(float(loss_of(images, labels, index)))
        optimizer.step()
        warm_then_cool.step()
        optimizer.zero_grad()
        if saves:
            saves.save(optimizer, warm_then_cool, losses)
        if index % 50 == 0 or index == num_steps - 1:
            report(f"step {index:4}  loss {losses[-1]:.4f}")
    return losses


@torch.no_grad()
def sample(step: DigitsStep, labels: Tensor, seed: int) -> Tensor:
    """Images [len(labels), 1, 8, 8] in [-1, 1], by ancestral sampling (Ho et al. 2020, algorithm 2)."""
    generator = torch.Generator().manual_seed(seed)
    signals = step.get_buffer("signal")
    images = torch.randn(len(labels), 1, 8, 8, generator=generator)
    for time in reversed(range(NUM_TIMESTEPS)):
        noise = step.unet(images, torch.full_like(labels, time), class_labels=labels).sample
        images = (images - BETAS[time] / (1 - signals[time]).sqrt() * noise) / (1 - BETAS[time]).sqrt()
        if time > 0:
            images += BETAS[time].sqrt() * torch.randn(images.shape, generator=generator)
    return images.clamp(-1, 1)


def recognised(images: Tensor, labels: Tensor) -> float:
    """Share of images in which a classifier trained on the real digits sees their label."""
    real, real_labels = digits()
    classifier = SVC(gamma=0.016).fit(real.flatten(1).numpy(), real_labels.numpy())
    return float((classifier.predict(images.flatten(1).numpy()) == labels.numpy()).mean())


def save_grid(images: Tensor, path: Path, scale: int = 5) -> None:
    """A PNG with a row per digit; images ordered by label, equally many of each."""
    framed = nn.functional.pad(images, (1, 1, 1, 1), value=-1)
    rows = framed.view(10, -1, 10, 10).transpose(1, 2).flatten(0, 1).flatten(1)
    pixels = ((rows + 1) * 127.5).round().numpy().astype(np.uint8)
    grid = Image.fromarray(pixels)
    grid.resize((grid.width * scale, grid.height * scale), Image.Resampling.BICUBIC).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--single", action="store_true", help="one device, without the compiler")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--samples", type=int, default=12, help="samples of each digit; 0 leaves sampling out")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches, noise and samples")
    parser.add_argument("--save", type=Path, help="directory of checkpoints")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --save")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    if not options.single and "WORLD_SIZE" not in os.environ:
        parser.error("start under torchrun, or pass --single")
    if options.resume and options.save is None:
        parser.error("--resume needs the directory, --save")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    step = DigitsStep()
    first = os.environ.get("RANK", "0") == "0"
    report: Callable[[str], None] = print if first else lambda line: None

    if options.single:
        where, engine, loss_of = "single", None, one_device(step, options.seed)
    else:
        where = os.environ["WORLD_SIZE"]
        program = fxpipe.compile(step, int(where), example_inputs=step.example_inputs(BATCH_SIZE))
        report(f"{program.plan}\n{program.schedule}")
        engine = program.engine(seed=options.seed)
        loss_of = several(engine)
    saves = Saves(engine, options.save, options.save_every, options.resume) if options.save else None
    losses = train(loss_of, step, options.seed, options.steps, report, saves)
    if engine is not None:
        engine.sync_model()
        engine.close()
    if first:
        finish(step, losses, where, options)


def finish(step: DigitsStep, losses: list[float], where: str, options: argparse.Namespace) -> None:
    """Writes the loss curve and, where asked for, the samples and how many are recognised."""
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"losses": losses}
    if options.samples:
        labels = torch.arange(10).repeat_interleave(options.samples)
        images = sample(step.eval(), labels, options.seed)
        result["recognised"] = recognised(images, labels)
        save_grid(images, options.out / f"digits_{where}.png")
        print(f"{result['recognised']:.0%} of {len(labels)} samples recognised")
    (options.out / f"digits_{where}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
