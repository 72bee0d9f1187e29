"""The training step of a diffusers pipeline, built: an `nn.Module` whose forward returns the loss of a batch.

    StableDiffusionPipeline    ->    VAE and CLIP, frozen    ->    noise, times    ->    unet    ->    weighted mse
                                     pixel_values, input_ids       scheduler's config

step        what all families do      families, videos    how each reads captions and calls its denoiser
noise       DDPM and its kin, flow matching; targets and weights      parts, tokens    a pipeline's modules, tokenizers
example_batch    random values to compile with
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import CompileError
from fxpipe.models.pipeline_steps.families import (
    Flux,
    PixArt,
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
    Unconditional,
)
from fxpipe.models.pipeline_steps.step import PipelineStep
from fxpipe.models.pipeline_steps.tokens import tokenized
from fxpipe.models.pipeline_steps.videos import AnimateDiff, CogVideoX, HunyuanVideo, LTXVideo, Wan

FAMILIES: dict[type[PipelineStep], tuple[str, ...]] = {
    StableDiffusion: (
        "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionControlNetPipeline",
        "StableDiffusionControlNetImg2ImgPipeline",
    ),
    StableDiffusionXL: (
        "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLControlNetImg2ImgPipeline",
    ),
    PixArt: ("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
    StableDiffusion3: ("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"),
    Flux: ("FluxPipeline", "FluxImg2ImgPipeline"),
    Unconditional: ("DDPMPipeline", "DDIMPipeline"),
    Wan: ("WanPipeline",),
    CogVideoX: ("CogVideoXPipeline",),
    LTXVideo: ("LTXPipeline",),
    HunyuanVideo: ("HunyuanVideoPipeline",),
    AnimateDiff: ("AnimateDiffPipeline",),
}  # fmt: skip
"""Steps, and the pipelines they train; a class that inherits from one of these is trained as it."""


def training_step(
    pipe: Any,
    *,
    snr_gamma: float | None = None,
    caption_dropout: float = 0.0,
    train: Sequence[str] | None = None,
    max_sequence_length: int | None = None,
) -> PipelineStep:
    """The training step of a pipeline: its modules, frozen or trained, in an `nn.Module` that takes a batch.

    Times are uniform and what is predicted is as the scheduler's config says; with a flow-matching scheduler times are
    logit-normal and a velocity is predicted.

    Args:
        pipe: a diffusers pipeline. Its VAE and text encoders are frozen, with a ControlNet its U-Net too; modules with
            adapters train these.
        snr_gamma: weigh losses by Min-SNR (Hang et al., 2023) with this gamma; 5 is usual.
        caption_dropout: the probability of training on the empty caption instead of a sample's, for classifier-free
            guidance.
        train: names of the components to train, instead of that: `["unet", "text_encoder"]`.
        max_sequence_length: tokens of a caption for T5; as many as the pipeline's call takes where left out.

    Raises:
        CompileError: the pipeline is of a family that is not known, or nothing of it would be trained.
    """
    return _family(pipe)(
        pipe, snr_gamma=snr_gamma, caption_dropout=caption_dropout, train=train, max_sequence_length=max_sequence_length
    )


def tokenize(pipe: Any, captions: Sequence[str], max_sequence_length: int | None = None) -> dict[str, Tensor]:
    """A batch's tokens [captions, tokens] by the names that the pipeline's training step takes."""
    if isinstance(captions, str):  # whose letters are no captions
        raise CompileError(f"captions is {captions!r}, a text; give a list, with a text for every image")
    family = _family(pipe)
    return tokenized(pipe, captions, family.token_lengths(pipe, max_sequence_length), family.template(pipe))


def _family(pipe: Any) -> type[PipelineStep]:
    names = {kind.__name__ for kind in type(pipe).__mro__}
    for family, pipelines in FAMILIES.items():
        if names & {*pipelines}:
            return family
    known = ", ".join(name for pipelines in FAMILIES.values() for name in pipelines)
    parts = {name: part for name, part in getattr(pipe, "components", {}).items() if isinstance(part, nn.Module)}
    listed = ", ".join(f"{name}: {type(part).__name__}" for name, part in parts.items())
    raise CompileError(
        f"no training step is known for {type(pipe).__name__} ({listed}): which of these read conditions, how latents "
        "are made, and what its denoiser is called with are not described. Describe them in a subclass of "
        "fxpipe.PipelineStep (encode, latents, predict), or write an nn.Module whose forward returns the loss, and "
        f"compile that. Known are {known}"
    )
