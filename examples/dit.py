"""A bare diffusers transformer, without a training step and without inputs: fxpipe makes both.

    python examples/dit.py
    fxpipe compile examples/dit.py:model --world-size 4 --dump out/
    torchrun --nproc-per-node 4 examples/dit.py

The step is: predict, mean squared error against `target`; the example inputs come from the model's config.
"""

import torch
from diffusers import DiTTransformer2DModel


def model() -> DiTTransformer2DModel:
    """A class-conditional DiT (Peebles and Xie 2023) on latents [B, 4, 8, 8]; the same weights in every process."""
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        sample_size=8,
        in_channels=4,
        patch_size=2,
        num_layers=6,
        num_attention_heads=4,
        attention_head_dim=8,
        num_embeds_ada_norm=10,
    )


if __name__ == "__main__":
    from examples.try_out import try_out

    try_out(model().double(), world_size=4)
