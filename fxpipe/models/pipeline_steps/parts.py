"""The modules of a pipeline: which there are, which of them a step trains, and how large an image they work on."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.private import uncompiled
from fxpipe.errors import CompileError

_NAMES = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "controlnet")
_SPACE_SCALES = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
_SIDES = ("height", "width")
_TIME_SCALES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")


def parts_of(pipe: Any, main: str) -> dict[str, nn.Module]:
    """What a training step may run of a pipeline, by its names; `main` is that of the denoiser.

    Raises:
        CompileError: it has several ControlNets.
    """
    found = {name: uncompiled(getattr(pipe, name, None)) for name in (*_NAMES, main)}
    if hasattr(found["controlnet"], "nets"):
        raise CompileError(f"{type(pipe).__name__} has several ControlNets; make a pipeline with the one to train")
    return {name: part for name, part in found.items() if isinstance(part, nn.Module)}


def freeze(parts: Mapping[str, nn.Module], main: str, train: Sequence[str] | None) -> tuple[str, ...]:
    """Freeze all parts but those to `train`, and return these; left out, the `main` one and those that have adapters:
    some of their parameters require gradients, others do not.

    Raises:
        CompileError: one of them is no part that can be trained, or has nothing to train.
    """
    may = [name for name in parts if name != "vae"]
    if unknown := sorted({*(train or ())} - {*may}):
        raise CompileError(f"train={list(train or ())} names {', '.join(unknown)}; give some of {', '.join(may)}")
    chosen = [name for name in may if name == main or _has_adapters(parts[name])] if train is None else train
    trained = tuple(name for name in may if name in chosen)
    for name in trained:
        if not any(p.requires_grad for p in parts[name].parameters()):
            raise CompileError(
                f"no parameter of {name} requires gradients, so nothing of it would be trained: call "
                f"pipe.{name}.requires_grad_(True), or give it adapters, pipe.{name}.add_adapter(...)"
            )
    if not trained:
        raise CompileError(f"train={list(train or ())} names nothing to train; give some of {', '.join(may)}")
    for name in parts.keys() - {*trained}:
        parts[name].requires_grad_(False)
    return trained


def _has_adapters(part: nn.Module) -> bool:
    return len({p.requires_grad for p in part.parameters()}) == 2


def image_size(pipe: Any, denoiser: Any) -> tuple[tuple[int, int], int]:
    """Height and width of the images that the pipeline makes unless told otherwise, and pixels of a latent's side."""
    scale = int(pipe.vae_scale_factor) if isinstance(getattr(pipe, "vae", None), nn.Module) else 1
    size = denoiser.config.get("sample_size") or getattr(pipe, "default_sample_size", 64)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return (height * scale, width * scale), scale


def video_size(pipe: Any, denoiser: Any) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Frames, height and width of the videos that the pipeline's call makes unless told otherwise, and how many frames
    and pixels of a side a latent stands for."""
    frames_per_latent, scale = (_first(pipe, names) for names in (_TIME_SCALES, _SPACE_SCALES))
    config, call = denoiser.config, inspect.signature(type(pipe).__call__).parameters
    frames = call["num_frames"].default or config["sample_frames"]
    sides = (
        call[side].default or scale * (config.get(f"sample_{side}") or config.get("sample_size") or 64)
        for side in _SIDES
    )
    height, width = sides
    return (frames, height, width), (frames_per_latent, scale)


def latent_scale(vae: Any) -> tuple[Tensor, Tensor]:
    """Shift and factor, [C or 1]: a denoiser's latents are (encoded - shift) * factor.

    Means and deviations of channels are in a VAE's config or, of LTX, among its buffers.
    """
    buffers = dict(vae.named_buffers(recurse=False))
    mean, deviation = (vae.config.get(name) or buffers.get(name) for name in ("latents_mean", "latents_std"))
    shift = [vae.config.get("shift_factor") or 0.0] if mean is None else mean
    kind = torch.promote_types(vae.dtype, torch.float32)
    shift, deviation = (
        torch.as_tensor(values, dtype=torch.float64) for values in (shift, [1.0] if deviation is None else deviation)
    )
    factor = vae.config.get("scaling_factor", 1.0) / deviation
    return shift.to(vae.device, kind), factor.to(vae.device, kind)


def _first(pipe: Any, names: Sequence[str]) -> int:
    return next((int(getattr(pipe, name)) for name in names if hasattr(pipe, name)), 1)
