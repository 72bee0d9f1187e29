"""How each family of pipelines reads captions and calls its denoiser: what differs between training steps.

family           captions                                    the denoiser's call
StableDiffusion  CLIP                                        unet(x, t, text)
StableDiffusionXL two CLIPs' last states but one, pooled     unet(x, t, text, pooled and sizes)
PixArt           T5 and its mask                             transformer(x, t, text, mask), half of what it predicts
StableDiffusion3 two CLIPs beside each other, then T5        transformer(x, t, text, pooled)
Flux             T5; CLIP's pooled                           transformer of 2x2 patches in a row, t / 1000, guidance
Unconditional    none                                        unet(x, t), of pixels
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.errors import CompileError
from fxpipe.models.pipeline_steps.step import Batch, PipelineStep
from fxpipe.models.pipeline_steps.tokens import clip_length


class StableDiffusion(PipelineStep):
    """Also with a ControlNet, which is then trained: `conditioning_pixel_values` [B, 3, H, W] in [0, 1]."""

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        return _clip_lengths(pipe, "")

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        encoder: Any = self.text_encoder
        return {"prompt_embeds": encoder(tokens["input_ids"])[0]}

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        given = {"encoder_hidden_states": text["prompt_embeds"], **self.added(noisy, text, batch)}
        residuals: dict[str, Any] = {}
        if "controlnet" in self._modules:
            control: Any = self.controlnet
            image = batch["conditioning_pixel_values"].to(control.dtype)
            down, middle = control(noisy, timesteps, controlnet_cond=image, return_dict=False, **given)
            residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
        predicted: Tensor = self.denoiser(noisy, timesteps, **given, **residuals).sample
        return predicted

    def added(self, noisy: Tensor, text: Batch, batch: Batch) -> dict[str, Any]:
        """Further arguments of U-Net and ControlNet."""
        return {}

    @property
    def extras(self) -> tuple[str, ...]:
        return ("conditioning_pixel_values",) if "controlnet" in self._modules else ()


class StableDiffusionXL(StableDiffusion):
    """A batch may have `time_ids` [B, 6], height and width before cropping, top and left of the crop, height and width
    after; left out, images are neither scaled nor cropped. The `pooled_prompt_embeds` are the last encoder's."""

    embeds: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    optional: ClassVar[tuple[str, ...]] = ("time_ids",)

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        return _clip_lengths(pipe, "", "_2")

    @classmethod
    def zeros_when_dropped(cls, pipe: Any) -> bool:
        return bool(pipe.config.force_zeros_for_empty_prompt)

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        made = [_encoded(self, name, ids) for name, ids in tokens.items()]
        return {"prompt_embeds": torch.cat([states for states, _ in made], -1), "pooled_prompt_embeds": made[-1][1]}

    def added(self, noisy: Tensor, text: Batch, batch: Batch) -> dict[str, Any]:
        height, width = (side * self.vae_scale for side in noisy.shape[-2:])
        sizes = torch.tensor([height, width, 0, 0, height, width], dtype=noisy.dtype, device=noisy.device)
        times = batch["time_ids"] if "time_ids" in batch else sizes.expand(noisy.shape[0], -1)
        return {"added_cond_kwargs": {"text_embeds": text["pooled_prompt_embeds"], "time_ids": times.to(noisy.dtype)}}


class PixArt(PipelineStep):
    """Alpha and Sigma. What it predicts of the variance is not trained."""

    main = "transformer"
    embeds: ClassVar[tuple[str, ...]] = ("prompt_embeds", "prompt_attention_mask")

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        length = max_sequence_length or (120 if "Alpha" in type(pipe).__name__ else 300)
        return dict.fromkeys(("input_ids", "attention_mask"), length) if pipe.text_encoder is not None else {}

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        encoder: Any = self.text_encoder
        mask = tokens["attention_mask"]
        return {"prompt_embeds": encoder(tokens["input_ids"], attention_mask=mask)[0], "prompt_attention_mask": mask}

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if self.denoiser.use_additional_conditions:
            height, width = (side * self.vae_scale for side in noisy.shape[-2:])
            for name, values in (("resolution", [height, width]), ("aspect_ratio", [height / width])):
                sizes[name] = torch.tensor(values, dtype=noisy.dtype, device=noisy.device).expand(noisy.shape[0], -1)
        predicted: Tensor = self.denoiser(
            noisy, encoder_hidden_states=text["prompt_embeds"], timestep=timesteps,
            encoder_attention_mask=text["prompt_attention_mask"], added_cond_kwargs=sizes,
        ).sample  # fmt: skip
        return predicted[:, : noisy.shape[1]]


class StableDiffusion3(PipelineStep):
    """Without a third encoder its states are zeros, as the pipeline has them."""

    main = "transformer"
    embeds: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    t5_tokens: ClassVar[int] = 256

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        third = {"input_ids_3": max_sequence_length or cls.t5_tokens} if pipe.text_encoder_3 is not None else {}
        return _clip_lengths(pipe, "", "_2") | third

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        made = [_encoded(self, name, tokens[name]) for name in ("input_ids", "input_ids_2")]
        clip, pooled = (torch.cat(values, -1) for values in zip(*made, strict=True))
        width = self.denoiser.config.joint_attention_dim
        if "input_ids_3" in tokens:
            third: Any = self.text_encoder_3
            last = third(tokens["input_ids_3"])[0]
        else:
            last = clip.new_zeros(clip.shape[0], self.t5_tokens, width)
        clip = F.pad(clip, (0, last.shape[-1] - clip.shape[-1]))
        return {"prompt_embeds": torch.cat([clip, last], -2), "pooled_prompt_embeds": pooled}

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        predicted: Tensor = self.denoiser(
            hidden_states=noisy, timestep=timesteps, encoder_hidden_states=text["prompt_embeds"],
            pooled_projections=text["pooled_prompt_embeds"],
        ).sample  # fmt: skip
        return predicted


class Flux(PipelineStep):
    """`guidance` is what a model that was distilled with guidance is told."""

    main = "transformer"
    embeds: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    guidance: float = 3.5

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        second = {"input_ids_2": max_sequence_length or 512} if pipe.text_encoder_2 is not None else {}
        return _clip_lengths(pipe, "") | second

    @property
    def latent_channels(self) -> int:
        return int(self.denoiser.config.in_channels) // 4

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        clip: Any = self.text_encoder
        t5: Any = self.text_encoder_2
        pooled = clip(tokens["input_ids"]).pooler_output
        return {"prompt_embeds": t5(tokens["input_ids_2"])[0], "pooled_prompt_embeds": pooled}

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        size, channels, height, width = noisy.shape
        rows, columns = height // 2, width // 2
        packed = noisy.reshape(size, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
        sides = (torch.arange(side, dtype=noisy.dtype, device=noisy.device) for side in (rows, columns))
        grid = torch.meshgrid(*sides, indexing="ij")
        places = torch.stack([torch.zeros_like(grid[0]), *grid], -1).flatten(0, 1)
        guidance = torch.full((size,), self.guidance, dtype=noisy.dtype, device=noisy.device)
        predicted: Tensor = self.denoiser(
            hidden_states=packed.reshape(size, rows * columns, 4 * channels), timestep=timesteps / 1000,
            guidance=guidance if self.denoiser.config.guidance_embeds else None, img_ids=places,
            encoder_hidden_states=text["prompt_embeds"], pooled_projections=text["pooled_prompt_embeds"],
            txt_ids=noisy.new_zeros(text["prompt_embeds"].shape[1], 3),
        ).sample  # fmt: skip
        unpacked = predicted.reshape(size, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return unpacked.reshape(noisy.shape)


class Unconditional(PipelineStep):
    """Of pixels; `class_labels` [B] where the U-Net takes them."""

    embeds: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        return {}

    @property
    def images(self) -> str:
        return "pixel_values"

    @property
    def extras(self) -> tuple[str, ...]:
        return ("class_labels",) if self.denoiser.config.get("num_class_embeds") else ()

    def latents(self, batch: Batch) -> Tensor:
        return batch[self._inputs(batch)[0]].to(self.denoiser.dtype)

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        labels = {name: batch[name] for name in self.extras}
        predicted: Tensor = self.denoiser(noisy, timesteps, **labels).sample
        return predicted


def _encoded(step: PipelineStep, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A CLIP's last states but one, and what it returns first: the projected state of the caption's end."""
    encoder: Any = step.get_submodule(name.replace("input_ids", "text_encoder"))
    made = encoder(ids, output_hidden_states=True)
    return made.hidden_states[-2], made[0]


def _clip_lengths(pipe: Any, *suffixes: str) -> dict[str, int]:
    """All of a family's encoders, or none.

    Raises:
        CompileError: some are missing.
    """
    here = [suffix for suffix in suffixes if getattr(pipe, f"text_encoder{suffix}") is not None]
    if here and len(here) < len(suffixes):
        names = " and ".join(f"text_encoder{suffix}" for suffix in suffixes)
        raise CompileError(f"{type(pipe).__name__} has some of {names}: load all, or none and pass embeddings")
    return {f"input_ids{suffix}": clip_length(pipe, suffix) for suffix in here}
