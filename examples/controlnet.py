"""A ControlNet training step: the U-Net is locked, a trainable copy of its encoder learns to steer it.

    python examples/controlnet.py
    fxpipe compile examples/controlnet.py:step --world-size 2 --schedule wave --dump out/
    torchrun --nproc-per-node 2 examples/controlnet.py

The locked encoder needs no gradient: it becomes a frozen component, run ahead of the pipeline. The locked decoder has
no weights to train, but gradients pass through it to the ControlNet: its stages have backwards. The ControlNet's
residuals are skips like any other.
"""

from typing import Any

import torch
from diffusers import ControlNetModel, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH = 16


class ControlNetStep(nn.Module):
    """Latents [B, 4, 8, 8], text states [B, 7, 16] and condition images [B, 3, 16, 16] to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=WIDTH,
            attention_head_dim=8,
            norm_num_groups=8,
        )
        self.controlnet = ControlNetModel.from_unet(self.unet, conditioning_embedding_out_channels=(8, 16))
        self.unet.requires_grad_(False)
        self.register_buffer("signal", DDPMScheduler().alphas_cumprod)

    def forward(self, latents: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
        signal = self.get_buffer("signal")[timesteps].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        down, middle = self.controlnet(noisy, timesteps, text, condition, return_dict=False)
        predicted = self.unet(
            noisy, timesteps, text, down_block_additional_residuals=down, mid_block_additional_residual=middle
        ).sample
        return mse_loss(predicted, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """Random tensors, the same on every call."""
        options: Any = {"generator": torch.Generator().manual_seed(0), "dtype": self.get_buffer("signal").dtype}
        shapes = {"latents": (4, 8, 8), "text": (7, WIDTH), "condition": (3, 16, 16)}
        return {name: torch.randn(batch_size, *shape, **options) for name, shape in shapes.items()}


def step() -> ControlNetStep:
    """The same weights in every process; the ControlNet's zero convolutions are drawn as after some training."""
    torch.manual_seed(0)
    made = ControlNetStep()
    with torch.no_grad():
        for parameter in made.controlnet.parameters():
            if not parameter.any():  # at zero, they would hide every gradient but their own
                parameter.normal_(std=0.05)
    return made


if __name__ == "__main__":
    from examples.try_out import try_out

    try_out(step().double(), world_size=2, schedule="wave")
