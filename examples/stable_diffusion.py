"""A small Stable Diffusion training step: the parts and their order as in the full model, random weights.

    python examples/stable_diffusion.py
    fxpipe compile examples/stable_diffusion.py:step --world-size 8 --dump out/
    torchrun --nproc-per-node 4 examples/stable_diffusion.py

Nothing here knows of fxpipe: this is the step as one would write it for one device.
"""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel

VOCABULARY, NUM_TOKENS = 1000, 16


class StableDiffusionStep(nn.Module):
    """Frozen VAE and text encoder, trainable U-Net; images [B, 3, 32, 32] and token ids [B, 16] to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = AutoencoderKL(
            sample_size=32,
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            norm_num_groups=8,
        )
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=NUM_TOKENS,
                bos_token_id=VOCABULARY - 2,
                eos_token_id=VOCABULARY - 1,
            )
        )
        self.unet = UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64, 64),
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=8,
            norm_num_groups=8,
        )
        self.vae.requires_grad_(False).eval()
        self.text_encoder.requires_grad_(False).eval()
        noise_schedule = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
        self.register_buffer("signal", noise_schedule.alphas_cumprod)

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
        """Random images and captions, the same on every call."""
        generator = torch.Generator().manual_seed(0)
        pixels = torch.rand(batch_size, 3, 32, 32, generator=generator, dtype=self.get_buffer("signal").dtype) * 2 - 1
        return {
            "pixels": pixels,
            "token_ids": torch.randint(VOCABULARY, (batch_size, NUM_TOKENS), generator=generator),
        }


def step() -> StableDiffusionStep:
    """The same weights in every process."""
    torch.manual_seed(0)
    return StableDiffusionStep()


if __name__ == "__main__":
    from examples.try_out import try_out

    try_out(step().double(), world_size=4, schedule="wave")
