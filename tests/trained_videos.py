"""Tiny video pipelines with text encoders, as one would train them, and their training steps written by hand.

CogVideoX's is that of diffusers' `train_cogvideox_lora.py`, whose loss is one of samples, weighed; the others predict
noise or flow as their papers say. Captions are read by the pipelines' own `encode_prompt`.
"""

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from tests.tiny_backbones import CONFIGS
from tests.tiny_pipelines import tiny
from tests.trained_pipelines import T5_TOKENS, _clip, _letters, _t5

FRAMES = 5


def trainable_video(family: str) -> Any:
    """A pipeline of the family in float64, equal every time."""
    torch.manual_seed(0)
    pipe = MADE[family]()
    torch.manual_seed(1)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.double().eval()
            for parameter in part.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
    return pipe


def videos(size: int = 4) -> dict[str, Tensor]:
    """[B, C, F, H, W] in [-1, 1]."""
    generator = torch.Generator().manual_seed(2)
    return {"pixel_values": torch.rand(size, 3, FRAMES, 24, 16, generator=generator, dtype=torch.float64) * 2 - 1}


def _wan() -> Any:
    pipe, _ = tiny("wan")
    pipe.register_modules(**_t5(""), transformer_2=None)
    pipe.register_to_config(boundary_ratio=None)
    pipe.vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0])
    pipe.scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return pipe


def _wan_of_two() -> Any:
    """Of two denoisers, with a time for every token, as other ones of Wan have."""
    pipe = _wan()
    pipe.register_modules(transformer_2=tiny("wan")[0].transformer_2)
    pipe.register_to_config(boundary_ratio=0.875, expand_timesteps=True)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    return pipe


def _cogvideo() -> Any:
    pipe, _ = tiny("cogvideo")
    pipe.register_modules(**_t5(""))
    pipe.scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", snr_shift_scale=3.0)
    return pipe


def _cogvideo_of_two_frames() -> Any:
    """As CogVideoX 1.5: a token has two frames."""
    pipe = _cogvideo()
    config = {**CONFIGS["CogVideoXTransformer3DModel/rotary"], "attention_head_dim": 16, "num_layers": 1}
    config |= {"ofs_embed_dim": None, "sample_height": 12}
    pipe.register_modules(transformer=diffusers.CogVideoXTransformer3DModel(**config))
    return pipe


def _ltx() -> Any:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(4, 4), decoder_block_out_channels=(4, 4), layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False), scaling_factor=0.7,
        decoder_spatio_temporal_scaling=(True, False), decoder_inject_noise=(False,) * 3,
        upsample_residual=(False,) * 2, upsample_factor=(1, 1), downsample_type=("conv",) * 2,
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        patch_size=2,
    )  # fmt: skip
    vae.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    vae.latents_std.copy_(torch.tensor([1.5, 0.5, 2.0, 1.0]))
    config = {**CONFIGS["LTXVideoTransformer3DModel"], "num_layers": 1}
    return diffusers.LTXPipeline(
        transformer=diffusers.LTXVideoTransformer3DModel(**config), vae=vae, **_t5(""),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def _hunyuan() -> Any:
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4), layers_per_block=1, norm_num_groups=2,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3, up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        spatial_compression_ratio=2, temporal_compression_ratio=4,
    )  # fmt: skip
    config = {**CONFIGS["HunyuanVideoTransformer3DModel"], "num_layers": 1, "num_single_layers": 1}
    llama = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    parts = {"text_encoder": LlamaModel(llama), "tokenizer": _letters(), **_clip("_2", 8, 8, most_tokens=77)}
    return diffusers.HunyuanVideoPipeline(
        transformer=diffusers.HunyuanVideoTransformer3DModel(**config), vae=vae, **parts,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip


def _animatediff() -> Any:
    pipe, _ = tiny("sd/small")
    unet = diffusers.UNetMotionModel(
        block_out_channels=(8,), down_block_types=("CrossAttnDownBlockMotion",), up_block_types=("UpBlockMotion",),
        layers_per_block=1, norm_num_groups=4, cross_attention_dim=8, num_attention_heads=2,
        motion_num_attention_heads=2, use_motion_mid_block=False, sample_size=12,
    )  # fmt: skip
    made = diffusers.AnimateDiffPipeline(
        vae=pipe.vae, unet=unet, motion_adapter=None, **_clip("", 8, 8),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )  # fmt: skip
    made.unet.freeze_unet2d_params()
    return made


MADE = {
    "wan": _wan, "wan/two": _wan_of_two, "cogvideo": _cogvideo, "cogvideo/1.5": _cogvideo_of_two_frames, "ltx": _ltx,
    "hunyuan": _hunyuan,
    "animatediff": _animatediff,
}  # fmt: skip


def video_loss_by_hand(
    pipe: Any,
    pixels: Tensor,
    captions: Sequence[str],
    dropout: float = 0.0,
    main: str = "transformer",
    length: int = T5_TOKENS,
) -> Tensor:
    """The loss; draws the VAE's posterior, noise, times and dropped captions, in this order."""
    kind = type(pipe).__name__
    with torch.no_grad():
        latents = _latents(pipe, pixels)
    noise, size = torch.randn_like(latents), latents.shape[0]
    if kind.startswith(("CogVideoX", "Animate")):
        timesteps = torch.randint(0, 1000, (size,))
        noisy = pipe.scheduler.add_noise(latents, noise, timesteps)
    else:
        shift = pipe.scheduler.config.get("flow_shift") or pipe.scheduler.config.shift
        table = torch.arange(1000, 0, -1, dtype=torch.float32) / 1000
        table = shift * table / (1 + (shift - 1) * table)
        if pipe.config.get("boundary_ratio"):
            much = table * 1000 >= pipe.config.boundary_ratio * 1000
            table = table[much if main == "transformer" else ~much]
        places = (torch.randn(size, dtype=torch.float64).sigmoid() * len(table)).long()
        timesteps, sigmas = (table * 1000)[places].double(), table[places].double().view(-1, 1, 1, 1, 1)
        noisy = (1 - sigmas) * latents + sigmas * noise
    if dropout:
        captions = [c if keep else "" for c, keep in zip(captions, torch.rand(size) >= dropout, strict=True)]
    text = [value for value in _encoded(pipe, list(captions), length) if value is not None]
    predicted = PREDICTED[kind](pipe, noisy, timesteps, text, main)
    if kind.startswith("CogVideoX"):
        sample = pipe.scheduler.get_velocity(predicted, noisy, timesteps)
        weights = (1 / (1 - pipe.scheduler.alphas_cumprod.double()[timesteps])).view(-1, 1, 1, 1, 1)
        return torch.mean((weights * (sample - latents) ** 2).reshape(size, -1), dim=1).mean()
    return F.mse_loss(predicted, noise if kind.startswith("Animate") else noise - latents)


def _latents(pipe: Any, pixels: Tensor) -> Tensor:
    vae, config = pipe.vae, pipe.vae.config
    if type(pipe).__name__.startswith("Animate"):
        size, _, frames, height, width = pixels.shape
        drawn = vae.encode(pixels.permute(0, 2, 1, 3, 4).reshape(-1, 3, height, width)).latent_dist.sample()
        drawn = (drawn - config.shift_factor) * config.scaling_factor
        return drawn.reshape(size, frames, *drawn.shape[1:]).permute(0, 2, 1, 3, 4)
    drawn = vae.encode(pixels).latent_dist.sample()
    if type(pipe).__name__.startswith("LTX"):
        return pipe._normalize_latents(drawn, vae.latents_mean, vae.latents_std, config.scaling_factor)
    if type(pipe).__name__.startswith("Wan"):
        mean, deviation = (
            torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return (drawn - mean) / deviation
    if type(pipe).__name__.startswith("Hunyuan"):
        return drawn * config.scaling_factor
    drawn = (drawn * config.scaling_factor).permute(0, 2, 1, 3, 4)
    patch = pipe.transformer.config.patch_size_t
    copies = 0 if patch is None else drawn.shape[1] % patch
    return torch.cat([drawn[:, :1].repeat(1, copies, 1, 1, 1), drawn], 1).contiguous()


@torch.no_grad()
def _encoded(pipe: Any, captions: list[str], length: int) -> Any:
    if type(pipe).__name__.startswith("Animate"):
        return pipe.encode_prompt(captions, "cpu", 1, False)
    if type(pipe).__name__.startswith("Hunyuan"):
        return pipe.encode_prompt(captions, max_sequence_length=length, device="cpu")
    return pipe.encode_prompt(captions, None, False, max_sequence_length=length, device="cpu")


def _predict_wan(pipe: Any, x: Tensor, t: Tensor, text: list[Tensor], main: str) -> Tensor:
    if pipe.config.expand_timesteps:
        mask = torch.ones_like(x[:, 0])[:, :, ::2, ::2]
        t = (mask * t.view(-1, 1, 1, 1)).flatten(1)
    return getattr(pipe, main)(hidden_states=x, timestep=t, encoder_hidden_states=text[0], return_dict=False)[0]


def _predict_cogvideo(pipe: Any, x: Tensor, t: Tensor, text: list[Tensor], main: str) -> Tensor:
    rotary = pipe._prepare_rotary_positional_embeddings(24, 16, x.shape[1], "cpu")
    return pipe.transformer(x, text[0], t, image_rotary_emb=rotary, return_dict=False)[0]


def _predict_ltx(pipe: Any, x: Tensor, t: Tensor, text: list[Tensor], main: str) -> Tensor:
    frames, height, width = x.shape[2:]
    scale = pipe.vae_spatial_compression_ratio
    predicted = pipe.transformer(
        pipe._pack_latents(x), text[0], t, text[1], num_frames=frames, height=height, width=width, return_dict=False,
        rope_interpolation_scale=(pipe.vae_temporal_compression_ratio / 25, scale, scale),
    )[0]  # fmt: skip
    return pipe._unpack_latents(predicted, frames, height, width)


def _predict_hunyuan(pipe: Any, x: Tensor, t: Tensor, text: list[Tensor], main: str) -> Tensor:
    states, pooled, mask = text
    guidance = torch.full((len(x),), 1000.0, dtype=x.dtype)
    return pipe.transformer(x, t, states, mask, pooled, guidance, return_dict=False)[0]


def _predict_animatediff(pipe: Any, x: Tensor, t: Tensor, text: list[Tensor], main: str) -> Tensor:
    return pipe.unet(x, t, text[0].repeat_interleave(repeats=x.shape[2], dim=0)).sample


PREDICTED = {
    "WanPipeline": _predict_wan, "CogVideoXPipeline": _predict_cogvideo, "LTXPipeline": _predict_ltx,
    "HunyuanVideoPipeline": _predict_hunyuan, "AnimateDiffPipeline": _predict_animatediff,
}  # fmt: skip
