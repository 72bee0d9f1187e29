"""A small Stable Diffusion pipeline, as one would load it for one device: sampled from on several.

    python examples/text_to_image.py
    fxpipe sample examples/text_to_image.py:pipe --world-size 4 --steps 10 --out images.png
    torchrun --nproc-per-node 2 -m fxpipe sample examples/text_to_image.py:pipe --world-size 2

Weights are random and prompts are embedded by hand, so that nothing needs to be downloaded: the images are noise, but
the same noise on any number of ranks. A real pipeline is `StableDiffusionPipeline.from_pretrained(...)`, called with
`prompt=`.
"""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

import fxpipe


def pipe() -> tuple[StableDiffusionPipeline, dict[str, Any]]:
    """The pipeline, and the arguments of a call."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(
        sample_size=64, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    made = StableDiffusionPipeline(
        vae.eval(), None, None, unet.eval(), scheduler, None, None, requires_safety_checker=False
    )
    made.set_progress_bar_config(disable=True)
    prompts = {"prompt_embeds": torch.randn(2, 8, 32), "negative_prompt_embeds": torch.zeros(2, 8, 32)}
    return made, {**prompts, "height": 32, "width": 32}


def served() -> tuple[StableDiffusionPipeline, Callable[[list[str]], dict[str, Any]]]:
    """The pipeline for examples/serve.py, and what embeds prompts: by hand, too."""

    def embed(prompts: list[str]) -> dict[str, Any]:
        draws = [torch.Generator().manual_seed(crc32(prompt.encode())) for prompt in prompts]
        embedded = torch.stack([torch.randn(8, 32, generator=draw) for draw in draws])
        return {"prompt_embeds": embedded, "negative_prompt_embeds": torch.zeros_like(embedded)}

    return pipe()[0], embed


def main() -> None:
    """Four ranks in this process against one device."""
    one, call = pipe()
    sampler = fxpipe.compile_sampler(one, world_size=4, example=call)
    print(sampler)
    print(sampler.simulate())
    print(sampler.verify())

    def images(made: Any) -> torch.Tensor:
        found: torch.Tensor = made(
            **call, num_inference_steps=10, output_type="pt", generator=torch.Generator().manual_seed(1)
        ).images
        return found

    difference = float((images(sampler.pipeline()) - images(one)).abs().max())
    print(f"two images after 10 steps: {difference:.1e} off one device's, in values from 0 to 1")


if __name__ == "__main__":
    main()
