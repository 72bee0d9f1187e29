"""The step that is raced: Stable Diffusion's layout at a tenth of its width and half its resolution.

    images [B, 3, 256, 256] --- VAE, frozen ----- latents [B, 4, 32, 32] --+
    tokens [B, 77] -------- text encoder, frozen ----------------------- U-Net --- mean squared error

The noise comes with the batch, so that all ways to compute the step compute the same.
"""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel

VOCABULARY = 1000
Batch = dict[str, Tensor]


class RacedStep(nn.Module):
    """Frozen VAE and text encoder, whose time is a third of the trained U-Net's; returns the loss."""

    def __init__(self, tiny: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        vae = (8, 8) if tiny else (12, 24, 48, 48)
        unet = (8, 16) if tiny else (32, 64, 128, 128)
        self.side, self.num_tokens = (16, 8) if tiny else (256, 77)
        self.vae = AutoencoderKL(
            sample_size=self.side, block_out_channels=vae, layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * len(vae), up_block_types=("UpDecoderBlock2D",) * len(vae),
        )  # fmt: skip
        del self.vae.decoder, self.vae.post_quant_conv  # not of a training step
        hidden = 16 if tiny else 64
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=4,
                num_hidden_layers=2 if tiny else 12, max_position_embeddings=self.num_tokens,
                bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1,
            )
        )  # fmt: skip
        crossed = len(unet) - 1
        self.unet = UNet2DConditionModel(
            sample_size=self.side // 2 ** (len(vae) - 1), block_out_channels=unet, cross_attention_dim=hidden,
            down_block_types=("CrossAttnDownBlock2D",) * crossed + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * crossed,
            layers_per_block=1 if tiny else 2, norm_num_groups=8,
            attention_head_dim=tuple(-(-width // 32) for width in unet),  # numbers of heads, of 32 channels
        )  # fmt: skip
        for frozen in (self.vae, self.text_encoder):
            frozen.requires_grad_(False).eval()
        noise_schedule = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
        self.register_buffer("signal", noise_schedule.alphas_cumprod)

    def forward(self, pixels: Tensor, token_ids: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        latents, text = self.encoded(pixels, token_ids)
        return mse_loss(self.unet(self.noisy(latents, noise, timesteps), timesteps, text).sample, noise)

    def encoded(self, pixels: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and text states: the frozen work."""
        return self.latents(pixels), self.text(token_ids)

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels).latent_dist.mode() * self.vae.config.scaling_factor

    @torch.no_grad()
    def text(self, token_ids: Tensor) -> Tensor:
        return self.text_encoder(token_ids)[0]

    def noisy(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        signal = self.get_buffer("signal")[timesteps].view(-1, 1, 1, 1)
        return signal.sqrt() * latents + (1 - signal).sqrt() * noise

    def example_inputs(self, batch_size: int, seed: int = 0) -> Batch:
        """Random images and captions, the same on every call."""
        drawn = torch.Generator().manual_seed(seed)
        latent = self.unet.config.sample_size
        return {
            "pixels": torch.rand(batch_size, 3, self.side, self.side, generator=drawn) * 2 - 1,
            "token_ids": torch.randint(VOCABULARY, (batch_size, self.num_tokens), generator=drawn),
            "noise": torch.randn(batch_size, 4, latent, latent, generator=drawn),
            "timesteps": torch.randint(0, 1000, (batch_size,), generator=drawn),
        }
