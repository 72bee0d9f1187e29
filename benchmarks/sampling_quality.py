"""How far displaced sampling is from one device's, on models that have learnt something: PSNR and digits recognised.

    python benchmarks/sampling_quality.py --out out/            minutes to train, minutes to sample
    python benchmarks/sampling_quality.py --training-steps 800 --steps 50 20

A U-Net and a DiT are trained on scikit-learn's digits, enlarged to 16x16, and sampled by DDIM on one device and on
patches of rows over 2 and 4 ranks of this process, with the same noise: exact, and displaced after two exact steps, by
every kind of norm, with values moved on by their own last change and without. PSNR is that of the images against one
device's, in decibels: the more, the nearer. What is recognised is judged by a classifier trained on real digits.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel, UNet2DModel
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

import fxpipe
from examples.digits import digits, recognised, save_grid

SIDE, WARM_UP, SAMPLES = 16, 2, 4  # of the image; exact steps before displaced ones; samples of every digit
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "sync": {"mode": "displaced", "norms": "sync", "advance": False},
    "corrected": {"mode": "displaced", "norms": "corrected", "advance": False},
    "merged": {"mode": "displaced", "norms": "merged", "advance": False},
    "separate": {"mode": "displaced", "norms": "separate", "advance": False},
    "corrected, advanced": {"mode": "displaced", "norms": "corrected", "advance": True},
}


def unet() -> nn.Module:
    return UNet2DModel(
        sample_size=SIDE, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, attention_head_dim=8, num_class_embeds=10,
    )  # fmt: skip


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=1, out_channels=1, num_layers=6, patch_size=2,
        sample_size=SIDE, num_embeds_ada_norm=1000, dropout=0.0,
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"U-Net": unet, "DiT": dit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 20, 10], help="of a sampling loop")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, help="folder for weights, which are used again, and image grids")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=110)
    for name in options.models:
        model = trained(name, options.training_steps, options.out, console)
        table = Table(title=f"{name}: PSNR in dB, recognised", title_justify="left")
        for column in ("steps", "ranks", *MODES):
            table.add_column(column, justify="right")
        for steps in options.steps:
            for row in rows(model, name, steps, options.out):
                table.add_row(*row)
        console.print(table)


def trained(name: str, num_steps: int, out: Path | None, console: Console) -> nn.Module:
    """The model after so many training steps, or from the folder."""
    torch.manual_seed(0)
    model = MODELS[name]()
    file = None if out is None else out / f"{name}_{num_steps}.pt"
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file))
        return model.eval()
    images, labels = digits()
    images = interpolate(images, SIDE, mode="bilinear")
    scheduler = ddim()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cooling = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=num_steps)
    for step in range(num_steps):
        chosen = torch.randint(len(images), (64,))
        noise, times = torch.randn(64, 1, SIDE, SIDE), torch.randint(0, 1000, (64,))
        noisy = scheduler.add_noise(images[chosen], noise, times)
        loss = mse_loss(model(noisy, timestep=times, class_labels=labels[chosen]).sample, noise)
        loss.backward()
        optimizer.step()
        cooling.step()
        optimizer.zero_grad()
        if step % 250 == 0 or step == num_steps - 1:
            console.print(f"{name}: step {step}, loss {loss.item():.4f}")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return model.eval()


def rows(model: nn.Module, name: str, steps: int, out: Path | None) -> Iterator[list[str]]:
    """A row of the table per number of ranks."""
    labels = torch.arange(10).repeat_interleave(SAMPLES)
    wanted = sample(model, labels, steps)
    keep(wanted, name, f"{steps}_one_device", out)
    yield [str(steps), "1", f"{share(wanted, labels):.0%}", *[""] * (len(MODES) - 1)]
    picture = "hidden_states" if name == "DiT" else "sample"
    times = torch.zeros(len(labels), dtype=torch.long)
    example = {picture: torch.zeros(len(labels), 1, SIDE, SIDE), "timestep": times, "class_labels": labels}
    for ranks in (2, 4):
        cells = []
        for mode, how in MODES.items():
            sampler = fxpipe.compile_sampler(model, ranks, example=example, patches=ranks, warmup=WARM_UP, **how)

            with sampler.call():
                found = sample(sampler.predict, labels, steps)
            keep(found, name, f"{steps}_{ranks}_{mode.replace(', ', '_')}", out)
            cells.append(f"{psnr(found, wanted):.1f}, {share(found, labels):.0%}")
        yield [str(steps), str(ranks), *cells]


@torch.no_grad()
def sample(model: Any, labels: Tensor, steps: int) -> Tensor:
    """Images in [-1, 1] by DDIM without noise (Song et al., "Denoising Diffusion Implicit Models", ICLR 2021)."""
    scheduler = ddim()
    scheduler.set_timesteps(steps)
    images = torch.randn(len(labels), 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    for time in scheduler.timesteps:
        predicted = model(images, timestep=time.expand(len(labels)), class_labels=labels).sample
        images = scheduler.step(predicted, time, images).prev_sample
    return images.clamp(-1, 1)


def ddim() -> DDIMScheduler:
    return DDIMScheduler(num_train_timesteps=1000, beta_schedule="linear", clip_sample=True, steps_offset=1)


def psnr(found: Tensor, wanted: Tensor) -> float:
    """In decibels, for values in [-1, 1]."""
    error = float((found - wanted).square().mean())
    return math.inf if error == 0 else 10 * math.log10(4 / error)


def share(images: Tensor, labels: Tensor) -> float:
    """Of images whose digit is recognised."""
    return recognised(interpolate(images, 8, mode="area"), labels)


def keep(images: Tensor, name: str, what: str, out: Path | None) -> None:
    """A grid of the images, a row per digit."""
    if out is not None:
        save_grid(interpolate(images, 8, mode="area"), out / f"{name}_{what}.png")


if __name__ == "__main__":
    main()
