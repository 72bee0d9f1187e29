"""Whole pipelines at the smallest configs, random and in float64, each with a call: `tiny("sdxl")` -> (pipe, call).

Every image is taller than wide, and no number of its latent rows is a power of two. Text comes as embeddings where a
tiny CLIP would not do. Keys: the family, "/", a variant.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tests.tiny_backbones import CONFIGS

Call = dict[str, Any]


def tiny(key: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Call]:
    """A new pipeline, equal every time, and keyword arguments of a call of 4 steps without its generator."""
    torch.manual_seed(0)
    pipe, call = PIPELINES[key](dtype)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            _perturb(part.to(dtype).eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"num_inference_steps": 4, **call}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def text(names: str, *shape: int, dtype: torch.dtype, batch: int = 1) -> Call:
    """An embedding per name, each its own."""
    return {name: noise(batch, *shape, seed=seed, dtype=dtype) for seed, name in enumerate(names.split(), 1)}


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    """Layers that start as zeros would hide what comes before them."""
    for parameter in module.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))


def _vae(latent_channels: int = 4, levels: int = 2) -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(4,) * levels, down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, norm_num_groups=2, layers_per_block=1, sample_size=16,
        latent_channels=latent_channels, shift_factor=0.1,
    )  # fmt: skip


def _clip() -> tuple[nn.Module, Any]:
    """A text encoder of width 8 over 7 tokens, and its tokenizer, whose words are the letters a to h."""
    words = ["<|startoftext|>", "<|endoftext|>", *(letter + "</w>" for letter in "abcdefgh")]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=7)
    config = CLIPTextConfig(
        vocab_size=len(words), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=7, projection_dim=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return CLIPTextModel(config), tokenizer


_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_UNET = {**CONFIGS["UNet2DConditionModel"], "sample_size": 12}
_SMALL = {
    "block_out_channels": (8,), "down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",),
    "mid_block_type": None,
}  # fmt: skip
_EMBEDS = "prompt_embeds negative_prompt_embeds"
_POOLED = "pooled_prompt_embeds negative_pooled_prompt_embeds"
_SIZE = {"height": 40, "width": 24}


def _stable_diffusion(**config: Any) -> tuple[Any, nn.Module]:
    encoder, tokenizer = _clip()
    unet = diffusers.UNet2DConditionModel(**{**_UNET, **config})
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    parts = {"vae": _vae(), "text_encoder": encoder, "tokenizer": tokenizer, "unet": unet, "scheduler": scheduler}
    return parts | _NO_CHECKER, unet


def _sd_small(dtype: torch.dtype) -> tuple[Any, Call]:
    parts, _ = _stable_diffusion(**_SMALL)
    return diffusers.StableDiffusionPipeline(**parts), {"prompt": "a b c", "negative_prompt": "d", **_SIZE}


def _sd_image(dtype: torch.dtype) -> tuple[Any, Call]:
    parts, _ = _stable_diffusion(**_SMALL)
    image = torch.rand(1, 3, 40, 24, dtype=dtype)
    return diffusers.StableDiffusionImg2ImgPipeline(**parts), {"prompt": "a d", "image": image, "strength": 0.75}


def _sd_inpaint(dtype: torch.dtype) -> tuple[Any, Call]:
    parts, _ = _stable_diffusion(in_channels=9, **_SMALL)
    image, mask = torch.rand(1, 3, 40, 24, dtype=dtype), torch.rand(1, 1, 40, 24).round()
    call = {"prompt": "a e", "image": image, "mask_image": mask, **_SIZE}
    return diffusers.StableDiffusionInpaintPipeline(**parts), call


def _sd_controlnet(dtype: torch.dtype) -> tuple[Any, Call]:
    parts, unet = _stable_diffusion()
    control = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 4))
    call = {"prompt": "f g", "image": torch.rand(1, 3, 40, 24, dtype=dtype), **_SIZE}
    return diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=control), call


def _sdxl(dtype: torch.dtype) -> tuple[Any, Call]:
    unet = diffusers.UNet2DConditionModel(**{**CONFIGS["UNet2DConditionModel/sdxl"], "sample_size": 12})
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=_vae(), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip
    return pipe, {**text(_EMBEDS, 7, 8, dtype=dtype), **text(_POOLED, 8, dtype=dtype), **_SIZE}


def _sd3(dtype: torch.dtype) -> tuple[Any, Call]:
    config = {**CONFIGS["SD3Transformer2DModel"], "num_layers": 2, "sample_size": 12, "pos_embed_max_size": 12}
    encoders = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")}
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(**config), vae=_vae(), **encoders,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    return pipe, {**text(_EMBEDS, 7, 8, dtype=dtype), **text(_POOLED, 8, dtype=dtype), **_SIZE}


def _flux(dtype: torch.dtype) -> tuple[Any, Call]:
    config = {**CONFIGS["FluxTransformer2DModel/guidance"], "num_single_layers": 2, "in_channels": 16}
    pipe = diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(**config), vae=_vae(), text_encoder=None, text_encoder_2=None,
        tokenizer=None, tokenizer_2=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    embeds = {"prompt_embeds": noise(1, 7, 8, dtype=dtype), "pooled_prompt_embeds": noise(1, 8, dtype=dtype)}
    return pipe, {**embeds, **_SIZE}


def _flux_guided(dtype: torch.dtype) -> tuple[Any, Call]:
    """True guidance: the denoiser is called twice a step."""
    pipe, call = _flux(dtype)
    negative = text(f"{_EMBEDS.split()[1]} x", 7, 8, dtype=dtype) | text(f"{_POOLED.split()[1]} x", 8, dtype=dtype)
    del negative["x"]
    return pipe, {**call, **negative, "true_cfg_scale": 3.0}


def _pixart(dtype: torch.dtype) -> tuple[Any, Call]:
    config = {**CONFIGS["PixArtTransformer2DModel"], "num_layers": 2, "out_channels": 8}
    pipe = diffusers.PixArtSigmaPipeline(
        transformer=diffusers.PixArtTransformer2DModel(**config), vae=_vae(), text_encoder=None, tokenizer=None,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip
    return pipe, {**_masked(dtype), **_SIZE, "use_resolution_binning": False}


def _masked(dtype: torch.dtype) -> Call:
    masks = {"prompt_attention_mask": torch.ones(1, 7), "negative_prompt_attention_mask": torch.ones(1, 7)}
    masks["negative_prompt_attention_mask"][:, 4:] = 0
    return {"negative_prompt": None, **text(_EMBEDS, 7, 8, dtype=dtype), **masks}


def _hunyuan(dtype: torch.dtype) -> tuple[Any, Call]:
    config = {**CONFIGS["HunyuanDiT2DModel"], "num_layers": 4}
    pipe = diffusers.HunyuanDiTPipeline(
        transformer=diffusers.HunyuanDiT2DModel(**config), vae=_vae(levels=4), text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, scheduler=diffusers.DDPMScheduler(clip_sample=False), **_NO_CHECKER,
    )  # fmt: skip
    second = text(" ".join(f"{name}_2" for name in _EMBEDS.split()), 4, 8, dtype=dtype)
    masks = {
        f"{n}prompt_attention_mask{i}": torch.ones(1, 4 if i else 5) for n in ("", "negative_") for i in ("", "_2")
    }
    size = {"height": 96, "width": 64, "use_resolution_binning": False}
    return pipe, {**text(_EMBEDS, 5, 8, dtype=dtype), **second, **masks, **size}


def _sana(dtype: torch.dtype) -> tuple[Any, Call]:
    vae = diffusers.AutoencoderDC(
        latent_channels=4, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
    )  # fmt: skip
    config = {**CONFIGS["SanaTransformer2DModel"], "num_layers": 2}
    pipe = diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(**config), vae=vae, text_encoder=None, tokenizer=None,
        scheduler=diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )  # fmt: skip
    return pipe, {**_masked(dtype), "height": 32, "width": 32, "use_resolution_binning": False}


def _dit(dtype: torch.dtype) -> tuple[Any, Call]:
    config = {**CONFIGS["DiTTransformer2DModel"], "num_layers": 2, "num_embeds_ada_norm": 1000, "sample_size": 10}
    transformer = diffusers.DiTTransformer2DModel(**config)
    return diffusers.DiTPipeline(transformer, _vae(), diffusers.DDIMScheduler(clip_sample=False)), {
        "class_labels": [3, 7]
    }


def _ddim(dtype: torch.dtype) -> tuple[Any, Call]:
    unet = diffusers.UNet2DModel(**{**CONFIGS["UNet2DModel"], "sample_size": (20, 12)})
    return diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler()), {"batch_size": 2, "eta": 0.5}


def _cogvideo(dtype: torch.dtype) -> tuple[Any, Call]:
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 2, up_block_types=("CogVideoXUpBlock3D",) * 2,
        block_out_channels=(4, 4), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        temporal_compression_ratio=2,
    )  # fmt: skip
    config = {
        **CONFIGS["CogVideoXTransformer3DModel"],
        "num_layers": 1,
        "use_rotary_positional_embeddings": True,
        "attention_head_dim": 16,
    }
    pipe = diffusers.CogVideoXPipeline(
        transformer=diffusers.CogVideoXTransformer3DModel(**config), vae=vae, text_encoder=None, tokenizer=None,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip
    return pipe, {**text(_EMBEDS, 8, 8, dtype=dtype), "height": 24, "width": 16, "num_frames": 5}


def _wan(dtype: torch.dtype) -> tuple[Any, Call]:
    """Two denoisers: the second has the steps of little noise."""
    config = {**CONFIGS["WanTransformer3DModel"], "num_layers": 1}
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], scale_factor_temporal=2,
        scale_factor_spatial=2, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    pipe = diffusers.WanPipeline(
        transformer=diffusers.WanTransformer3DModel(**config), vae=vae, text_encoder=None, tokenizer=None,
        transformer_2=diffusers.WanTransformer3DModel(**config), boundary_ratio=0.6,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    call = {"height": 48, "width": 32, "num_frames": 3, "latents": noise(1, 4, 2, 24, 16, dtype=dtype)}
    return pipe, {**text(_EMBEDS, 8, 8, dtype=dtype), **call}


def _z_image(dtype: torch.dtype) -> tuple[Any, Call]:
    """Samples come and go as lists; texts may have another length each."""
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=16, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=8,
        axes_dims=[4, 2, 2], axes_lens=[64, 64, 64],
    )  # fmt: skip
    pipe = diffusers.ZImagePipeline(
        transformer=transformer, vae=_vae(), text_encoder=None, tokenizer=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    embeds = {"prompt_embeds": [noise(7, 8, dtype=dtype)], "negative_prompt_embeds": [noise(5, 8, seed=1, dtype=dtype)]}
    return pipe, {**embeds, "height": 48, "width": 32}


PIPELINES: dict[str, Callable[[torch.dtype], tuple[Any, Call]]] = {
    "sd/small": _sd_small, "sd/image": _sd_image, "sd/inpaint": _sd_inpaint,
    "sd/controlnet": _sd_controlnet, "sdxl": _sdxl,
    "sd3": _sd3, "flux": _flux, "flux/guided": _flux_guided, "pixart": _pixart, "hunyuan": _hunyuan, "sana": _sana,
    "dit": _dit, "ddim": _ddim, "cogvideo": _cogvideo, "wan": _wan,
    **({"z_image": _z_image} if hasattr(diffusers, "ZImagePipeline") else {}),
}  # fmt: skip
