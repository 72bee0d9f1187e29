"""A Stable Diffusion pipeline small enough for a laptop's CPU, with all its parts, random weights and a tokenizer that
spells: nothing is downloaded."""

import string

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

NUM_TOKENS = 32


def pipe() -> StableDiffusionPipeline:
    """Images of 32 x 32 pixels; the same weights in every process."""
    torch.manual_seed(0)
    letters = string.ascii_lowercase + string.digits
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=NUM_TOKENS)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=NUM_TOKENS, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        sample_size=32, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        mid_block_add_attention=False,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
    )
    return StableDiffusionPipeline(
        vae.eval(), text_encoder.eval(), tokenizer, unet.eval(), scheduler, None, None, requires_safety_checker=False
    )
