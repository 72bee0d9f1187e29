"""Tiny pipelines with text encoders, as one would train them, and their training steps written by hand, for one device.

The steps are those of diffusers' training scripts: the pipelines' own `encode_prompt` and helpers, and the schedulers'
own `add_noise`, on captions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    DDPMScheduler,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    StableDiffusionXLControlNetPipeline,
)
from diffusers.training_utils import compute_snr
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

from tests.tiny_backbones import CONFIGS
from tests.tiny_pipelines import tiny

CAPTIONS = ["a b", "c d e f", "g", "h a a"]
T5_TOKENS = 8


def trainable(family: str) -> Any:
    """A pipeline of the family in float64, equal every time."""
    pipe, _ = tiny({"sd": "sd/small", "sdxl/controlnet": "sdxl", "pixart/alpha": "pixart"}.get(family, family))
    torch.manual_seed(1)
    parts: dict[str, Any] = {}
    if family == "sdxl/controlnet":
        control = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(4, 4))
        for parameter in control.parameters():  # zeros would hide every gradient but their own
            parameter.data += 0.02 * torch.randn_like(parameter)
        kept = {name: part for name, part in pipe.components.items() if "image" not in name and "feature" not in name}
        pipe = StableDiffusionXLControlNetPipeline(**kept, controlnet=control.double())
    if family == "pixart/alpha":
        config = {**CONFIGS["PixArtTransformer2DModel/conditions"], "num_layers": 2, "out_channels": 8}
        kept = {name: part for name, part in pipe.components.items() if name != "transformer"}
        pipe = PixArtAlphaPipeline(**kept, transformer=PixArtTransformer2DModel(**config).double())
    if family.startswith("sdxl"):
        parts = _clip("", 4, 4) | _clip("_2", 4, 8, CLIPTextModelWithProjection)
    elif family == "sd3":
        parts = _clip("", 4, 4, CLIPTextModelWithProjection) | _clip("_2", 2, 4, CLIPTextModelWithProjection)
        parts |= _t5("_3")
    elif family == "flux":
        parts = _clip("", 8, 8) | _t5("_2")
    elif family.startswith("pixart"):
        parts = _t5("")
    pipe.register_modules(**{n: p.double().eval() if isinstance(p, nn.Module) else p for n, p in parts.items()})
    if hasattr(pipe, "tokenizer_max_length"):
        pipe.tokenizer_max_length = 7
    return pipe


def batch_of(pipe: Any, size: int = 4) -> dict[str, Tensor]:
    """Images of 24 x 16 pixels, of a ControlNet also conditions."""
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(2, size, 3, 24, 16, generator=generator, dtype=torch.float64)
    names = ["pixel_values", "conditioning_pixel_values"][: 1 + hasattr(pipe, "controlnet")]
    return {name: 2 * image - 1 for name, image in zip(names, images, strict=False)}


def loss_by_hand(
    pipe: Any, batch: dict[str, Tensor], captions: Sequence[str], snr_gamma: float | None = None, dropout: float = 0.0
) -> Tensor:
    """The loss; draws the VAE's posterior, noise, times and dropped captions, in this order."""
    flow = hasattr(pipe, "transformer") and not hasattr(pipe.scheduler, "alphas_cumprod")
    with torch.no_grad():
        latents = pipe.vae.encode(batch["pixel_values"]).latent_dist.sample()
    latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    noise, size = torch.randn_like(latents), latents.shape[0]
    if flow:
        scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        places = (torch.randn(size, dtype=torch.float64).sigmoid() * 1000).long()
        timesteps, sigmas = scheduler.timesteps[places].double(), scheduler.sigmas[places].double().view(-1, 1, 1, 1)
        noisy, target = (1 - sigmas) * latents + sigmas * noise, noise - latents
    else:
        scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
        timesteps = torch.randint(0, 1000, (size,))
        noisy = scheduler.add_noise(latents, noise, timesteps)
        kind = scheduler.config.prediction_type
        velocity = scheduler.get_velocity(latents, noise, timesteps)
        target = {"epsilon": noise, "v_prediction": velocity, "sample": latents}[kind]
    zeros = torch.ones(size, dtype=torch.bool)
    if dropout:
        zeros = torch.rand(size) >= dropout
        if "XL" not in type(pipe).__name__:  # which is told of no caption by zeros
            captions = [caption if keep else "" for caption, keep in zip(captions, zeros, strict=True)]
            zeros[:] = True
    predicted = _predict(pipe, noisy, timesteps, list(captions), batch, zeros.double())
    if snr_gamma is None:
        return F.mse_loss(predicted, target)
    alphas = scheduler.alphas_cumprod[timesteps].double()
    ratios = alphas / (1 - alphas)
    torch.testing.assert_close(ratios.float(), compute_snr(scheduler, timesteps))  # which is in float32
    least = torch.stack([ratios, snr_gamma * torch.ones_like(ratios)], 1).min(1)[0]
    weights = least / {"epsilon": ratios, "v_prediction": ratios + 1, "sample": 1}[kind]
    return (F.mse_loss(predicted, target, reduction="none").mean(dim=[1, 2, 3]) * weights).mean()


def _predict(pipe: Any, x: Tensor, t: Tensor, captions: list[str], batch: dict[str, Tensor], kept: Tensor) -> Tensor:
    name, size = type(pipe).__name__, x.shape[0]
    with torch.no_grad():
        if name.startswith("PixArt"):
            text, mask, *_ = pipe.encode_prompt(captions, False, device="cpu", max_sequence_length=T5_TOKENS)
        elif "XL" in name:
            text, _, pooled, _ = pipe.encode_prompt(captions, device="cpu", do_classifier_free_guidance=False)
            text, pooled = text * kept[:, None, None], pooled * kept[:, None]
        elif "Diffusion3" in name:
            asked = {"do_classifier_free_guidance": False, "max_sequence_length": T5_TOKENS}
            text, _, pooled, _ = pipe.encode_prompt(captions, captions, captions, device="cpu", **asked)
        elif name.startswith("Flux"):
            text, pooled, ids = pipe.encode_prompt(captions, captions, device="cpu", max_sequence_length=T5_TOKENS)
        else:
            text, _ = pipe.encode_prompt(captions, "cpu", 1, False)
    if name.startswith("PixArt"):
        sizes = {"resolution": None, "aspect_ratio": None}
        if "Alpha" in name:
            sizes = {"resolution": torch.tensor([[24.0, 16.0]]), "aspect_ratio": torch.tensor([[24 / 16]])}
            sizes = {key: value.double().repeat(size, 1) for key, value in sizes.items()}
        return pipe.transformer(
            x, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=t, added_cond_kwargs=sizes
        ).sample.chunk(2, dim=1)[0]
    if "Diffusion3" in name:
        return pipe.transformer(
            hidden_states=x, timestep=t, encoder_hidden_states=text, pooled_projections=pooled, return_dict=False
        )[0]
    if name.startswith("Flux"):
        channels, rows, columns = x.shape[1], x.shape[2], x.shape[3]
        predicted = pipe.transformer(
            hidden_states=pipe._pack_latents(x, size, channels, rows, columns), timestep=t / 1000,
            guidance=torch.full([size], 3.5, dtype=x.dtype), pooled_projections=pooled, encoder_hidden_states=text,
            txt_ids=ids, return_dict=False,
            img_ids=pipe._prepare_latent_image_ids(size, rows // 2, columns // 2, "cpu", x.dtype),
        )[0]  # fmt: skip
        scale = pipe.vae_scale_factor
        return pipe._unpack_latents(predicted, rows * scale, columns * scale, scale)
    more: dict[str, Any] = {}
    if "XL" in name:
        sizes = pipe._get_add_time_ids((24, 16), (0, 0), (24, 16), x.dtype, 8).repeat(size, 1)
        more = {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": sizes}}
    if "ControlNet" in name:
        down, middle = pipe.controlnet(x, t, text, batch["conditioning_pixel_values"], return_dict=False, **more)
        more |= {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
    return pipe.unet(x, t, text, **more).sample


def _clip(suffix: str, width: int, projection: int, kind: Any = CLIPTextModel, most_tokens: int = 7) -> dict[str, Any]:
    config = CLIPTextConfig(
        vocab_size=10, hidden_size=width, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=most_tokens, projection_dim=projection, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return {f"text_encoder{suffix}": kind(config), f"tokenizer{suffix}": _letters()}


def _t5(suffix: str) -> dict[str, Any]:
    config = T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return {f"text_encoder{suffix}": T5EncoderModel(config), f"tokenizer{suffix}": _letters()}


def _letters() -> Any:
    words = ["<|startoftext|>", "<|endoftext|>", *(letter + "</w>" for letter in "abcdefgh")]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=7)
