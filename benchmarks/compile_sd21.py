"""Seconds of a core and memory to compile Stable Diffusion 2.1's training step at full size, phase by phase.

    python benchmarks/compile_sd21.py
    python benchmarks/compile_sd21.py --ranks 8 --samples 4

Capture is to be compared with torch.export of the same step alone, in the same process; a capture from the cache, and
the program of one rank, are what each process under torchrun takes beside the plan, which rank 0 makes.

The step is the whole one: VAE encoder and text encoder (frozen), noise, U-Net, loss, images at 512x512 in float32. The
weights are on the meta device: there are none, and no arithmetic is done. Configurations are those of
huggingface.co/stabilityai/stable-diffusion-2-1-base.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.models.autoencoders import vae
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

import fxpipe
import fxpipe.compiler
from examples.stable_diffusion import StableDiffusionStep
from fxpipe.compiler import requested


class StableDiffusion21Step(nn.Module):
    """Images [B, 3, 512, 512] and token ids [B, 77] to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = AutoencoderKL(
            sample_size=768,
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
        )
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=23,
                num_attention_heads=16,
                hidden_act="gelu",
            )
        )
        self.unet = UNet2DConditionModel(
            sample_size=64,
            block_out_channels=(320, 640, 1280, 1280),
            cross_attention_dim=1024,
            attention_head_dim=(5, 10, 20, 20),
            use_linear_projection=True,
        )
        self.vae.requires_grad_(False).eval()
        self.text_encoder.requires_grad_(False).eval()
        self.register_buffer("signal", DDPMScheduler(beta_schedule="scaled_linear").alphas_cumprod)

    forward = StableDiffusionStep.forward

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """On the meta device: shapes and types only."""
        token_ids = torch.empty(batch_size, 77, dtype=torch.long, device="meta")
        return {"pixels": torch.empty(batch_size, 3, 512, 512, device="meta"), "token_ids": token_ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="8, 64, 512 and 1024 where left out")
    parser.add_argument("--samples", type=int, default=2, help="of the batch, for each rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.device("meta"):
        step = StableDiffusion21Step()
    for name, part in step.named_children():
        print(f"{name:<12} {sum(p.numel() for p in part.parameters()) / 1e6:6.1f} M weights")
    print(f"{'torch.export.export alone':<44} {plain_export_seconds(step):6.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks or (8, 64, 512, 1024):
            print(f"{ranks} ranks, {ranks * options.samples} samples")
            compile_for(step, ranks, ranks * options.samples, Path(folder))


def compile_for(step: nn.Module, ranks: int, batch_size: int, cache: Path) -> None:
    """Print what every phase takes: analysis without a cache, planning, and again with both, down to rank 0's program.

    One process of as many as there are ranks lowers its own.
    """
    clock = Clock()
    asked = requested(step, ranks, batch_size=batch_size, cache=False)
    costed = asked.analysed(clock.lap)
    clock.lap("costs of blocks, for who plans", costed.blocks)
    plan = asked.planned(costed)
    clock.lap("plan")
    clock.total("all but programs")

    clock = Clock()
    with rank_zero():
        fxpipe.compile(step, ranks, batch_size=batch_size, plan=plan, cache=cache, observe=lambda *told: None)
        clock = Clock()
        fxpipe.compile(step, ranks, batch_size=batch_size, plan=plan, cache=cache, observe=clock.lap_of_rank)
    print(str(plan).partition("\n")[0])
    print(f"  {'peak memory of the process so far':<42} {peak_bytes() / 2**30:6.2f} GiB")


class Clock:
    """Prints seconds of a core between calls."""

    def __init__(self) -> None:
        self._started = self._last = time.process_time()

    def lap(self, name: str, artefact: object = None) -> None:
        now = time.process_time()
        print(f"  {name:<42} {now - self._last:6.1f} s", flush=True)
        self._last = now

    def lap_of_rank(self, name: str, artefact: object = None) -> None:
        """Of a process that has the plan and the capture."""
        self.lap({"capture": "capture, cached", "programs": "program of rank 0"}.get(name, f"{name}, again"))

    def total(self, name: str) -> None:
        print(f"  {name:<42} {time.process_time() - self._started:6.1f} s", flush=True)


@contextmanager
def rank_zero() -> Iterator[None]:
    """As torchrun starts it, with nobody to tell the plan."""
    alone = {"join": lambda world_size: 0, "made_by_rank_zero": lambda make, asked, rank: make()}
    with mock.patch.multiple(fxpipe.compiler, **alone):
        yield


def plain_export_seconds(step: nn.Module) -> float:
    """Seconds of a core for torch.export of the same step, any batch size; it takes no generator, not even None."""

    def drawn(shape: tuple[int, ...], generator: None = None, **options: Any) -> Tensor:
        return torch.randn(shape, **{name: options.get(name) for name in ("device", "dtype")})

    inputs = step.example_inputs(7)  # type: ignore[operator]
    shapes = {name: {0: torch.export.Dim.AUTO} for name in inputs}
    with mock.patch.object(vae, "randn_tensor", drawn):
        started = time.process_time()
        torch.export.export(step, (), inputs, dynamic_shapes=shapes, strict=False)
        return time.process_time() - started


def peak_bytes() -> int:
    """Largest resident memory so far; the unit of ru_maxrss is 1 KiB, on macOS one byte."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
