"""Tiny training steps that the tests compile, as users write them.

Every module returns its loss and has `example_inputs(batch_size)`: keyword arguments of its forward, or a tuple of
positional ones. All are random under a fixed seed, on the CPU, in the dtype asked for: `ZOO["sd"](torch.float64)`.
"""

from collections.abc import Callable

import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from fxpipe.models.backbones import PredictionStep
from tests.peer_cases import PEER_CASES
from tests.tiny_backbones import CONFIGS, backbone

__all__ = ["CONFIGS", "PEER_CASES", "ZOO", "backbone"]

NUM_STEPS = 1000
UNET = {
    "sample_size": 8, "block_out_channels": (8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 4, "cross_attention_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
SDXL = {
    **UNET, "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 32,
    "cross_attention_dim": 16, "use_linear_projection": True, "transformer_layers_per_block": (1, 2, 2),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip


def text_encoder(kind: type[nn.Module] = CLIPTextModel) -> nn.Module:
    """A frozen CLIP text encoder over 7 tokens, width 8."""
    config = CLIPTextConfig(
        vocab_size=50, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=7, projection_dim=8, bos_token_id=48, eos_token_id=49,
    )  # fmt: skip
    return kind(config).requires_grad_(False).eval()


class DiffusionStep(nn.Module):
    """What all steps share: the noise schedule, and draws of time and noise inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - torch.linspace(1e-4, 0.02, NUM_STEPS), 0))

    def noised(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(noisy latents, noise, timesteps [batch], alphas_cumprod [batch, 1, 1, 1])."""
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, NUM_STEPS, (latents.shape[0],), device=latents.device)
        alpha = self.alphas_cumprod[timesteps][:, None, None, None]
        return alpha.sqrt() * latents + (1 - alpha).sqrt() * noise, noise, timesteps, alpha

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.alphas_cumprod.dtype)


class StableDiffusionStep(DiffusionStep):
    """VAE and CLIP under no_grad, conditional U-Net; epsilon, or v-prediction with min-SNR weights per sample."""

    def __init__(self, min_snr_gamma: float | None = None) -> None:
        super().__init__()
        self.min_snr_gamma = min_snr_gamma
        self.vae = AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, layers_per_block=1, sample_size=16,
        ).requires_grad_(False).eval()  # fmt: skip
        self.text_encoder = text_encoder()
        self.unet = UNet2DConditionModel(**UNET)

    def forward(self, pixels: Tensor, token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            latents = self.vae.encode(pixels).latent_dist.sample() * self.vae.config.scaling_factor
            text = self.text_encoder(token_ids)[0]
        noisy, noise, timesteps, alpha = self.noised(latents)
        prediction = self.unet(noisy, timesteps, text).sample
        if self.min_snr_gamma is None:
            return F.mse_loss(prediction, noise)
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
        snr = (alpha / (1 - alpha)).flatten()
        weights = snr.clamp(max=self.min_snr_gamma) / (snr + 1)
        losses = F.mse_loss(prediction, velocity, reduction="none").mean(dim=(1, 2, 3))
        return (losses * weights).mean()

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {"pixels": self.noise(batch_size, 3, 16, 16), "token_ids": torch.randint(48, (batch_size, 7))}


class SDXLStep(DiffusionStep):
    """Two text encoders, their states side by side, pooled text and sizes as added conditions; latents as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = text_encoder()
        self.text_encoder_2 = text_encoder(CLIPTextModelWithProjection)
        self.unet = UNet2DConditionModel(**SDXL)

    def forward(self, latents: Tensor, token_ids: Tensor, token_ids_2: Tensor, time_ids: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.text_encoder(token_ids, output_hidden_states=True)
            second = self.text_encoder_2(token_ids_2, output_hidden_states=True)
            text = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        noisy, noise, timesteps, _ = self.noised(latents)
        added = {"text_embeds": second.text_embeds, "time_ids": time_ids}
        prediction = self.unet(noisy, timesteps, text, added_cond_kwargs=added, return_dict=False)[0]
        return F.mse_loss(prediction, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        ids = torch.randint(48, (2, batch_size, 7))
        time_ids = torch.randint(1000, (batch_size, 6)).to(self.alphas_cumprod.dtype)
        return {
            "latents": self.noise(batch_size, 4, 8, 8),
            "token_ids": ids[0],
            "token_ids_2": ids[1],
            "time_ids": time_ids,
        }


class UnconditionalStep(DiffusionStep):
    """An unconditional U-Net with dropout, on images."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=8, block_out_channels=(8, 16, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
            dropout=0.1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        noisy, noise, timesteps, _ = self.noised(images)
        return F.mse_loss(self.unet(noisy, timesteps).sample, noise)

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (self.noise(batch_size, 3, 8, 8),)


class ControlNetStep(DiffusionStep):
    """A locked U-Net, and a trainable ControlNet that feeds its residuals into the U-Net's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(**UNET).requires_grad_(False)
        self.controlnet = ControlNetModel.from_unet(
            self.unet, conditioning_embedding_out_channels=(4, 8)
        ).requires_grad_(True)
        with torch.no_grad():  # zero convolutions would hide every gradient but their own
            for parameter in self.controlnet.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)

    def forward(self, latents: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        noisy, noise, timesteps, _ = self.noised(latents)
        down, middle = self.controlnet(noisy, timesteps, text, condition, return_dict=False)
        prediction = self.unet(
            noisy, timesteps, text, down_block_additional_residuals=down, mid_block_additional_residual=middle
        ).sample
        return F.mse_loss(prediction, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {
            "latents": self.noise(batch_size, 4, 8, 8),
            "text": self.noise(batch_size, 7, 8),
            "condition": self.noise(batch_size, 3, 16, 16),
        }


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable product of two narrow ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRAStep(DiffusionStep):
    """A frozen U-Net with adapters on queries and values of its middle and decoder: the encoder is a frozen prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(**UNET).requires_grad_(False)
        attentions = [
            m for part in (self.unet.mid_block, self.unet.up_blocks) for m in part.modules() if hasattr(m, "to_q")
        ]
        for attention in attentions:
            attention.to_q, attention.to_v = LowRank(attention.to_q), LowRank(attention.to_v)

    def forward(self, latents: Tensor, text: Tensor) -> Tensor:
        noisy, noise, timesteps, _ = self.noised(latents)
        return F.mse_loss(self.unet(noisy, timesteps, text).sample, noise)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {"latents": self.noise(batch_size, 4, 8, 8), "text": self.noise(batch_size, 7, 8)}


class UViTBlock(nn.Module):
    """Attention and MLP; with a skip, first a linear layer over both halves (U-ViT, Bao et al. 2023, section 3.1)."""

    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.skip = nn.Linear(2 * width, width) if skip else None
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip is not None and skip is not None:
            x = self.skip(torch.cat([x, skip], dim=-1))
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class UViTStep(DiffusionStep):
    """A transformer with long skips, written by hand: no class of diffusers to recognise."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, width, 2, stride=2)
        self.time = nn.Embedding(NUM_STEPS, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.encoder = nn.ModuleList(UViTBlock(width, skip=False) for _ in range(depth))
        self.middle = UViTBlock(width, skip=False)
        self.decoder = nn.ModuleList(UViTBlock(width, skip=True) for _ in range(depth))
        self.head = nn.Linear(width, 12)

    def forward(self, images: Tensor) -> Tensor:
        noisy, noise, timesteps, _ = self.noised(images)
        x = (
            torch.cat([self.time(timesteps)[:, None], self.patchify(noisy).flatten(2).transpose(1, 2)], dim=1)
            + self.position
        )
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.decoder:
            x = block(x, skips.pop())
        patches = self.head(x[:, 1:]).transpose(1, 2).unflatten(2, (4, 4))
        return F.mse_loss(F.pixel_shuffle(patches, 2), noise)

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        return (self.noise(batch_size, 3, 8, 8),)


class PackedStep(PredictionStep):
    """A backbone over packed tokens, with 16 of an image and 7 of a text."""

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        full = super().example_inputs(batch_size)
        cuts = {"txt_ids": (slice(7),), "img_ids": (slice(16),), "encoder_hidden_states": (slice(None), slice(7))}
        cuts |= {name: (slice(None), slice(16)) for name in ("target", "hidden_states")}
        return {name: value[cuts[name]] if name in cuts else value for name, value in full.items()}


def _bare(key: str) -> Callable[..., nn.Module]:
    return lambda dtype=torch.float32: PredictionStep(backbone(key, dtype))


def _seeded(make: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    def build(dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return make().to(dtype)

    return build


ZOO: dict[str, Callable[..., nn.Module]] = {
    "sd": _seeded(StableDiffusionStep),
    "sd_v_min_snr": _seeded(lambda: StableDiffusionStep(min_snr_gamma=5.0)),
    "sdxl": _seeded(SDXLStep),
    "unet2d": _seeded(UnconditionalStep),
    "controlnet": _seeded(ControlNetStep),
    "lora": _seeded(LoRAStep),
    "uvit": _seeded(UViTStep),
    "dit": _bare("DiTTransformer2DModel"),
    "pixart": _bare("PixArtTransformer2DModel"),
    "sd3": _bare("SD3Transformer2DModel"),
    "flux": lambda dtype=torch.float32: PackedStep(backbone("FluxTransformer2DModel", dtype)),
    "hunyuan_dit": _bare("HunyuanDiT2DModel"),
}
