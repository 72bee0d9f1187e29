"""The modules of a pipeline: which there are, which of them a step trains, and how large an image they work on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CompileError
from fxpipe.models.pipelines import uncompiled

_NAMES = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "controlnet", "unet", "transformer")


def parts_of(pipe: Any) -> dict[str, nn.Module]:
    """What a training step may run of a pipeline, by its names.

    Raises:
        CompileError: it has several ControlNets.
    """
    found = {name: uncompiled(getattr(pipe, name, None)) for name in _NAMES}
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


def latent_scale(vae: Any) -> tuple[Tensor, Tensor]:
    """Shift and factor, [1, C or 1, 1, 1]: a denoiser's latents are (encoded - shift) * factor."""
    mean, deviation = (vae.config.get(name) for name in ("latents_mean", "latents_std"))
    shifts = mean or [vae.config.get("shift_factor") or 0.0]
    factors = [vae.config.scaling_factor / one for one in deviation or [1.0]]
    return _channels(shifts, vae), _channels(factors, vae)


def _channels(values: Iterable[float], vae: Any) -> Tensor:
    kind = torch.promote_types(vae.dtype, torch.float32)
    return torch.tensor(list(values), dtype=kind, device=vae.device).view(1, -1, 1, 1)
