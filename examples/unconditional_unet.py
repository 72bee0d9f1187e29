"""A training step of an unconditional U-Net on images: draw noise and time, predict the noise.

    python examples/unconditional_unet.py
    fxpipe compile examples/unconditional_unet.py:step --world-size 2 --schedule wave --dump out/
    torchrun --nproc-per-node 2 examples/unconditional_unet.py

The wave schedule keeps both ends of every skip on one rank.
"""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss


class UnconditionalStep(nn.Module):
    """Images [B, 3, 16, 16] to the loss; with dropout, whose masks are the same for every number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
            dropout=0.1,
        )
        self.register_buffer("signal", DDPMScheduler().alphas_cumprod)

    def forward(self, images: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        timesteps = torch.randint(0, 1000, (images.shape[0],), device=images.device)
        signal = self.get_buffer("signal")[timesteps].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * images + (1 - signal).sqrt() * noise
        return mse_loss(self.unet(noisy, timesteps).sample, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """Random images, the same on every call."""
        generator = torch.Generator().manual_seed(0)
        dtype = self.get_buffer("signal").dtype
        return {"images": torch.randn(batch_size, 3, 16, 16, generator=generator, dtype=dtype)}


def step() -> UnconditionalStep:
    """The same weights in every process."""
    torch.manual_seed(0)
    return UnconditionalStep()


if __name__ == "__main__":
    from examples.try_out import try_out

    try_out(step().double(), world_size=2, schedule="wave")
