"""The training step of a diffusers pipeline: what all families have in common."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxpipe.errors import CompileError
from fxpipe.models.pipeline_steps.example_batch import example_batch
from fxpipe.models.pipeline_steps.noise import Noised, Times, noise_of
from fxpipe.models.pipeline_steps.parts import freeze, image_size, latent_scale, parts_of
from fxpipe.models.pipeline_steps.tokens import tokenized

Batch = Mapping[str, Tensor]


class PipelineStep(nn.Module):
    """Encode, add noise, predict, weigh: the loss of a batch, by the pipeline's own modules, under its names.

    A batch has, by name, what `inputs` says:

        pixel_values [B, C, H, W] in [-1, 1]       or latents [B, C, h, w], scaled as the denoiser takes them
        pixel_values [B, C, F, H, W] of a video    or latents [B, C, f, h, w]
        input_ids, input_ids_2, ... [B, tokens]    as `fxpipe.tokenize(pipe, captions)` makes them; or what the
                                                   pipeline's own call takes: prompt_embeds, ...

    Drawn in every step, in this order: the VAE's posterior, noise, times, which captions are dropped.

    A family says by `encode` how captions are read and by `predict` how its denoiser is called: subclass one to change
    either, or `latents`; `noise` is a module, to be replaced. What it takes is as for `fxpipe.training_step`.

    Args:
        pipe: frozen, and in eval mode, are its VAE and whatever else is not trained: `requires_grad_(False)`.

    Raises:
        CompileError: nothing would be trained, or the parts do not fit each other.
    """

    main: str = "unet"
    embeds: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        pipe: Any,
        *,
        snr_gamma: float | None = None,
        caption_dropout: float = 0.0,
        train: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> None:
        super().__init__()
        self.main = self.denoiser_name(pipe, train)
        parts = parts_of(pipe, self.main)
        for name, part in parts.items():
            self.add_module(name, part)
        weight = next(self.denoiser.parameters())
        kind = torch.promote_types(weight.dtype, torch.float32)
        self.noise = noise_of(pipe.scheduler, kind, snr_gamma, self.times(pipe))
        self.noise.to(weight.device)
        self.measure(pipe)
        if "vae" in parts:
            for name, values in zip(("latent_shift", "latent_factor"), latent_scale(pipe.vae), strict=True):
                self.register_buffer(name, values, persistent=False)
        if not 0.0 <= caption_dropout < 1.0:
            raise CompileError(f"caption_dropout={caption_dropout} must be from 0 to below 1; 0.1 is usual")
        self.lengths, self.caption_dropout = self.token_lengths(pipe, max_sequence_length), float(caption_dropout)
        self.drops_to_zeros = self.zeros_when_dropped(pipe)
        if self.caption_dropout and not self.drops_to_zeros:
            for name, tokens in tokenized(pipe, [""], self.lengths, self.template(pipe)).items():
                self.register_buffer(f"empty_{name}", tokens.to(weight.device), persistent=False)
        self._check_channels(pipe)
        self.trained = freeze(parts, "controlnet" if "controlnet" in parts else self.main, train)
        self.frozen = tuple(name for name in parts if name not in self.trained)
        self.train()

    def forward(self, **batch: Tensor) -> Tensor:
        """The loss, a scalar."""
        self._check(batch)
        noised: Noised = self.noise(self.latents(batch))
        return noised.loss(self.predict(noised.noisy, noised.timesteps, self.text(batch), batch))

    def latents(self, batch: Batch) -> Tensor:
        """What the denoiser learns to make, [B, C, h, w] of its type: drawn of the VAE's posterior and scaled."""
        if "latents" in batch:
            return batch["latents"].to(self.denoiser.dtype)
        drawn = self.drawn(batch["pixel_values"])
        shift, factor = (self.get_buffer(f"latent_{n}").view(-1, *[1] * (drawn.ndim - 2)) for n in ("shift", "factor"))
        return ((drawn - shift) * factor).to(self.denoiser.dtype)

    def drawn(self, pixels: Tensor) -> Tensor:
        """Of the VAE's posterior."""
        vae: Any = self.vae
        drawn: Tensor = vae.encode(pixels.to(vae.dtype)).latent_dist.sample()
        return drawn

    def text(self, batch: Batch) -> dict[str, Tensor]:
        """The captions, encoded, some of them dropped."""
        if not self._has_tokens(batch):
            return self._cast({name: batch[name] for name in self.embeds})
        tokens = {name: batch[name] for name in self.lengths}
        if not self.caption_dropout:
            return self._cast(self.encode(tokens))
        ids = tokens[next(iter(self.lengths))]
        dropped = torch.rand((ids.shape[0],), device=ids.device) < self.caption_dropout
        if self.drops_to_zeros:
            encoded = self._cast(self.encode(tokens))
            return {name: value.masked_fill(_wide(dropped, value), 0.0) for name, value in encoded.items()}
        empty = {name: self.get_buffer(f"empty_{name}") for name in tokens}
        kept = {name: torch.where(dropped[:, None], empty[name], given) for name, given in tokens.items()}
        return self._cast(self.encode(kept))

    def encode(self, tokens: Batch) -> dict[str, Tensor]:
        """What the denoiser is told of captions, by the names of `embeds`, of their tokens."""
        raise NotImplementedError

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Batch, batch: Batch) -> Tensor:
        """The denoiser's prediction, of the shape of `noisy` [B, C, h, w]; `timesteps` [B], `text` as of `encode`."""
        raise NotImplementedError

    @classmethod
    def token_lengths(cls, pipe: Any, max_sequence_length: int | None = None) -> dict[str, int]:
        """Tokens of a caption by input, of the text encoders that the pipeline has; none where it has none.

        `max_sequence_length` is T5's, as in the pipeline's call.
        """
        raise NotImplementedError

    @classmethod
    def template(cls, pipe: Any) -> str:
        """What captions are put into for the first text encoder."""
        return "{}"

    @classmethod
    def zeros_when_dropped(cls, pipe: Any) -> bool:
        """Whether a dropped caption's embeddings are zeros instead of those of the empty caption."""
        return False

    @classmethod
    def denoiser_name(cls, pipe: Any, train: Sequence[str] | None = None) -> str:
        """Which component predicts."""
        return cls.main

    def times(self, pipe: Any) -> Times | None:
        """From which times to below which the denoiser is called, where that is not at all times."""
        return None

    def measure(self, pipe: Any) -> None:
        """Set the sizes of examples: height and width of images, pixels of a latent's side, shapes by input."""
        self.image_size, self.vae_scale = image_size(pipe, self.denoiser)
        height, width = self.image_size
        reader: Any = self.vae if "vae" in self._modules else self.denoiser
        self.shapes = {
            "pixel_values": (reader.config.in_channels, height, width), "conditioning_pixel_values": (3, height, width),
            "latents": (self.latent_channels, height // self.vae_scale, width // self.vae_scale),
        }  # fmt: skip

    @property
    def images(self) -> str:
        """The input that has the images."""
        return "pixel_values" if "vae" in self._modules else "latents"

    @property
    def extras(self) -> tuple[str, ...]:
        """Further inputs that a batch has."""
        return ()

    @property
    def denoiser(self) -> Any:
        return getattr(self, self.main)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what a batch has."""
        return self._inputs(())

    def train(self, mode: bool = True) -> "PipelineStep":
        """What is frozen stays in eval mode."""
        super().train(mode)
        for name in self.frozen:
            self.get_submodule(name).eval()
        return self

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """A batch of random values at the pipeline's own size of images, the same on every call.

        Raises:
            CompileError: the size of an input is not known.
        """
        return example_batch(self, batch_size)

    @property
    def latent_channels(self) -> int:
        return int(self.denoiser.config.in_channels)

    def _inputs(self, given: Collection[str]) -> tuple[str, ...]:
        """Names of what a batch with the `given` ones has, in all."""
        images = "latents" if "latents" in given else self.images
        text = self.lengths if self._has_tokens(given) else self.embeds
        return (images, *text, *self.extras)

    def _has_tokens(self, given: Collection[str]) -> bool:
        return bool(self.lengths) and not {*self.embeds} & {*given}

    def _check(self, batch: Batch) -> None:
        needed = {*self._inputs(batch)}
        lacks, unread = sorted(needed - {*batch}), sorted({*batch} - needed - {*self.optional})
        if lacks or unread:
            wrong = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(unread)}, unread"] * bool(unread)
            others = ("latents", *self.embeds, *self.optional)
            raise CompileError(
                f"the batch {', and '.join(wrong)}: {type(self).__name__} takes {', '.join(self.inputs)}; "
                f"it may have {', '.join(name for name in others if name not in self.inputs)}"
            )
        if self.caption_dropout and not self._has_tokens(batch):
            raise CompileError(
                f"caption_dropout={self.caption_dropout} drops captions before they are encoded, and this batch has "
                "them encoded: drop some where that is done, or pass tokens (fxpipe.tokenize)"
            )

    def _check_channels(self, pipe: Any) -> None:
        """A denoiser of more than latents is told more than this step knows."""
        if "vae" not in self._modules:
            return
        made = pipe.vae.config.get("latent_channels") or pipe.vae.config.z_dim
        if made != self.latent_channels:
            raise CompileError(
                f"the {self.main} of {type(pipe).__name__} takes {self.latent_channels} channels, its VAE makes "
                f"{made}: what the others are is not known here, as with masks of images "
                "that are filled in; write an nn.Module whose forward returns the loss, and compile that"
            )

    def _cast(self, text: Batch) -> dict[str, Tensor]:
        return {n: v.to(self.denoiser.dtype) if v.is_floating_point() else v for n, v in text.items()}


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))
