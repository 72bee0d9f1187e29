"""Families of video pipelines, as data: how captions are read, how latents lie, and how the denoiser is called.

family        encoder   padding of a caption            latents          the denoiser's call
Wan           masked    zeros                           [B, C, f, h, w]  transformer(x, t, text)
CogVideoX     all       read as it is                   [B, f, C, h, w]  transformer(x, t, text, rotary factors)
LTXVideo      all       masked in the denoiser          [B, C, f, h, w]  transformer(tokens, t, text, mask, sizes ...)
HunyuanVideo  Llama by a template, masked; CLIP pooled  [B, C, f, h, w]  transformer(x, t, text, mask, pooled, guidance)
AnimateDiff   CLIP, for every frame                     [B, C, f, h, w]  unet(x, t, text); the VAE frame by frame

Pixels are [B, C, F, H, W] in [-1, 1], as `pipe.video_processor.preprocess_video` makes them. How many frames and pixels
a latent stands for, and a channel's mean, deviation and factor, are read from the pipeline.
"""

import inspect
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxpipe.errors import CompileError
from fxpipe.models.pipeline_steps.families import StableDiffusion
from fxpipe.models.pipeline_steps.noise import Times
from fxpipe.models.pipeline_steps.parts import video_size
from fxpipe.models.pipeline_steps.step import Batch, PipelineStep


class VideoStep(PipelineStep):
    """What a family of video pipelines is described by; the class's values are those of most."""

    main = "transformer"
    encoder_masked: ClassVar[bool] = False  # the text encoder is told what is padding
    padding_zeroed: ClassVar[bool] = False  # what it makes of padding is set to zeros
    frames_first: ClassVar[bool] = False  # latents are [B, f, C, h, w]
    packed: ClassVar[bool] = False  # it takes a row of tokens, each a patch of frames, rows and columns

    def arguments(self, noisy: Tensor, timesteps: Tensor, text: Batch) -> dict[str, Any]:
        """Further arguments of the denoiser, or others; `noisy` [B, C, f, h, w], or as `frames_first` says."""
        return {}

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        length = max_sequence_length or inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
        masked = cls.encoder_masked or cls.padding_zeroed or len(cls.embeds) > 1
        names = ("input_ids", "attention_mask")[: 1 + masked]
        return dict.fromkeys(names, length) if pipe.text_encoder is not None else {}

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        encoder: Any = self.text_encoder
        mask = tokens.get("attention_mask")
        states = encoder(tokens["input_ids"], attention_mask=mask if self.encoder_masked else None)[0]
        if self.padding_zeroed and mask is not None:
            states = states * mask.unsqueeze(-1).to(states.dtype)
        return {name: mask if name.endswith("mask") and mask is not None else states for name in self.embeds}

    def latents(self, batch: Batch) -> Tensor:
        found = super().latents(batch)
        return found.transpose(1, 2).contiguous() if self.frames_first and "latents" not in batch else found

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        given = {"timestep": timesteps, "encoder_hidden_states": text["prompt_embeds"]}
        patch = self.patch
        predicted: Tensor = self.denoiser(
            hidden_states=_pack(noisy, patch) if self.packed else noisy,
            **given | self.arguments(noisy, timesteps, text),
        ).sample
        return _unpack(predicted, noisy.shape, patch) if self.packed else predicted

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, rows and columns of latents in a token."""
        config = self.denoiser.config
        size = config.patch_size
        frames, rows, columns = (config.get("patch_size_t") or 1, size, size) if isinstance(size, int) else size
        return frames, rows, columns

    @property
    def latent_channels(self) -> int:
        frames, rows, columns = self.patch if self.packed else (1, 1, 1)
        return int(self.denoiser.config.in_channels) // (frames * rows * columns)

    def measure(self, pipe: Any) -> None:
        _measure(self, pipe)
        if self.frames_first:
            channels, frames, *sides = self.shapes["latents"]
            self.shapes["latents"] = (frames, channels, *sides)


class Wan(VideoStep):
    """Of its two denoisers, where it has them, one is trained, at the times at which the pipeline calls it."""

    encoder_masked = True
    padding_zeroed = True

    @classmethod
    def denoiser_name(cls, pipe: Any, train: Sequence[str] | None = None) -> str:
        names = ("transformer", "transformer_2")
        here = [name for name in names if getattr(pipe, name, None) is not None]
        asked = here if len(here) == 1 else [name for name in here if name in (train or here)]
        if len(asked) != 1:
            raise CompileError(
                f"{type(pipe).__name__} has {' and '.join(here) or 'no transformer'}, a denoiser for times of much "
                "noise and one for times of little: train one in a step, as train=['transformer']"
            )
        return asked[0]

    def times(self, pipe: Any) -> Times | None:
        if pipe.config.boundary_ratio is None:
            return None
        boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
        return (boundary, float("inf")) if self.main == "transformer" else (0.0, boundary)

    def measure(self, pipe: Any) -> None:
        super().measure(pipe)
        self.time_per_token = bool(pipe.config.expand_timesteps)

    def arguments(self, noisy: Tensor, timesteps: Tensor, text: Batch) -> dict[str, Any]:
        if not self.time_per_token:
            return {}
        frames, rows, columns = (size // side for size, side in zip(noisy.shape[2:], self.patch, strict=True))
        return {"timestep": timesteps[:, None].expand(-1, frames * rows * columns)}


class CogVideoX(VideoStep):
    """Where its scheduler says v_prediction, as published ones do, the loss is that of diffusers' script: errors of the
    sample that a prediction means, weighed by 1 / (1 - alpha), are errors of the velocity. Where a token is several
    frames, the first one is repeated until they are whole."""

    frames_first = True

    def measure(self, pipe: Any) -> None:
        super().measure(pipe)
        self._rotary = type(pipe)._prepare_rotary_positional_embeddings

    def latents(self, batch: Batch) -> Tensor:
        found = super().latents(batch)
        missing = -found.shape[1] % self.patch[0]
        return torch.cat([found[:, :1].expand(-1, missing, -1, -1, -1), found], 1) if missing else found

    def arguments(self, noisy: Tensor, timesteps: Tensor, text: Batch) -> dict[str, Any]:
        if not self.denoiser.config.use_rotary_positional_embeddings:
            return {}
        read = SimpleNamespace(vae_scale_factor_spatial=self.vae_scale, transformer=self.denoiser)
        height, width = (side * self.vae_scale for side in noisy.shape[-2:])
        return {"image_rotary_emb": self._rotary(read, height, width, noisy.shape[1], noisy.device)}


class LTXVideo(VideoStep):
    """`frame_rate` is that of the videos."""

    embeds = ("prompt_embeds", "prompt_attention_mask")
    packed = True
    frame_rate: float = 25
    frames_per_latent: int

    def arguments(self, noisy: Tensor, timesteps: Tensor, text: Batch) -> dict[str, Any]:
        frames, height, width = noisy.shape[2:]
        scales = (self.frames_per_latent / self.frame_rate, self.vae_scale, self.vae_scale)
        return {
            "encoder_attention_mask": text["prompt_attention_mask"], "rope_interpolation_scale": scales,
            "num_frames": frames, "height": height, "width": width,
        }  # fmt: skip


class HunyuanVideo(VideoStep):
    """`guidance` is what a model that was distilled with guidance is told. Captions are read by Llama's last states but
    two, without the template's own tokens, and by CLIP."""

    embeds = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")
    guidance: float = 1.0

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        found = super().token_lengths(pipe, max_sequence_length)
        longer = {name: length + _template(pipe)["crop_start"] for name, length in found.items()}
        return longer | ({"input_ids_2": 77} if longer else {})

    @classmethod
    def template(cls, pipe: Any) -> str:
        return str(_template(pipe)["template"])

    def measure(self, pipe: Any) -> None:
        super().measure(pipe)
        self.crop = int(_template(pipe)["crop_start"])

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        llama: Any = self.text_encoder
        clip: Any = self.text_encoder_2
        mask = tokens["attention_mask"]
        states = llama(tokens["input_ids"], attention_mask=mask, output_hidden_states=True).hidden_states[-3]
        made = states[:, self.crop :], mask[:, self.crop :], clip(tokens["input_ids_2"]).pooler_output
        return dict(zip(self.embeds, made, strict=True))

    def arguments(self, noisy: Tensor, timesteps: Tensor, text: Batch) -> dict[str, Any]:
        told = noisy.new_full((noisy.shape[0],), 1000 * self.guidance)
        return {
            "encoder_attention_mask": text["prompt_attention_mask"], "pooled_projections": text["pooled_prompt_embeds"],
            "guidance": told if self.denoiser.config.guidance_embeds else None,
        }  # fmt: skip


def _template(pipe: Any) -> Any:
    return sys.modules[type(pipe).__module__].DEFAULT_PROMPT_TEMPLATE


class AnimateDiff(StableDiffusion):
    """After `pipe.unet.freeze_unet2d_params()` its motion modules alone are trained."""

    def drawn(self, pixels: Tensor) -> Tensor:
        frames = pixels.shape[2]
        images = super().drawn(pixels.transpose(1, 2).flatten(0, 1))
        return images.view(-1, frames, *images.shape[1:]).transpose(1, 2)

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        every = text["prompt_embeds"].repeat_interleave(noisy.shape[2], 0)
        predicted: Tensor = self.denoiser(noisy, timesteps, encoder_hidden_states=every).sample
        return predicted

    def measure(self, pipe: Any) -> None:
        _measure(self, pipe)


def _measure(step: Any, pipe: Any) -> None:
    (frames, *sides), (step.frames_per_latent, step.vae_scale) = video_size(pipe, step.denoiser)
    step.image_size = tuple(sides)
    smaller = ((frames - 1) // step.frames_per_latent + 1, *(side // step.vae_scale for side in sides))
    step.shapes = {"pixel_values": (3, frames, *sides), "latents": (step.latent_channels, *smaller)}


def _pack(x: Tensor, patch: Sequence[int]) -> Tensor:
    """[B, C, f, h, w]  ->  [B, tokens, C * a patch's]."""
    (batch, channels, frames, height, width), (a, b, c) = x.shape, patch
    apart = x.reshape(batch, channels, frames // a, a, height // b, b, width // c, c).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return apart.flatten(4, 7).flatten(1, 3)


def _unpack(tokens: Tensor, shape: Sequence[int], patch: Sequence[int]) -> Tensor:
    (batch, channels, frames, height, width), (a, b, c) = shape, patch
    apart = tokens.reshape(batch, frames // a, height // b, width // c, channels, a, b, c)
    return apart.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(batch, channels, frames, height, width)
