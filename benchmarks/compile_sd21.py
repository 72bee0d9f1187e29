"""Time and memory to compile Stable Diffusion 2.1's training step at full size for 8 ranks, on one core.

    python benchmarks/compile_sd21.py
    python benchmarks/compile_sd21.py --batch-size 32 --world-size 4

The step is the whole one: VAE encoder and text encoder (frozen), noise, U-Net, loss, images at 512x512 in float32. The
weights are on the meta device: there are none, and no arithmetic is done. Configurations are those of
huggingface.co/stabilityai/stable-diffusion-2-1-base.
"""

import argparse
import resource
import sys
import tempfile
import time

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel

import fxpipe


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

    def forward(self, pixels: Tensor, token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            latents = self.vae.encode(pixels).latent_dist.sample() * self.vae.config.scaling_factor
            text = self.text_encoder(token_ids)[0]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
        signal = self.get_buffer("signal")[timesteps].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        return mse_loss(self.unet(noisy, timesteps, text).sample, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """On the meta device: shapes and types only."""
        token_ids = torch.empty(batch_size, 77, dtype=torch.long, device="meta")
        return {"pixels": torch.empty(batch_size, 3, 512, 512, device="meta"), "token_ids": token_ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.device("meta"):
        step = StableDiffusion21Step()
    for name, part in step.named_children():
        print(f"{name:<12} {sum(p.numel() for p in part.parameters()) / 1e6:6.1f} M weights")

    started, cpu = time.perf_counter(), time.process_time()
    program = fxpipe.compile(step, options.world_size, batch_size=options.batch_size)
    compiled, cpu = time.perf_counter(), time.process_time() - cpu
    with tempfile.TemporaryDirectory() as folder:
        size = sum(path.stat().st_size for path in program.dump(folder).iterdir())
    dumped = time.perf_counter()
    print(str(program.plan).partition("\n")[0])
    print(f"compile {compiled - started:.1f} s, of which {cpu:.1f} s on a core")
    print(f"dump {dumped - compiled:.1f} s, {size / 2**20:.1f} MiB")
    print(f"peak memory of the process {peak_bytes() / 2**30:.2f} GiB")


def peak_bytes() -> int:
    """Largest resident memory so far; the unit of ru_maxrss is 1 KiB, on macOS one byte."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
