"""Bare diffusers models at the smallest configs that keep every kind of block; keys: class name, "/", a variant."""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import nn

_CROSS = {"cross_attention_dim": 8, "norm_num_groups": 4}
_UNET = {"block_out_channels": (8, 16), "layers_per_block": 1}
_SD = {
    **_UNET, **_CROSS, "sample_size": 8, "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
# One level, for what differs in the conditions alone.
_CONDITIONS = {
    **_SD, "block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",),
}  # fmt: skip
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_DIT = {**_HEADS, "num_layers": 4, "sample_size": 8, "in_channels": 4, "patch_size": 2}
_UNET2D = {
    **_UNET, "norm_num_groups": 4, "sample_size": 8, "attention_head_dim": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
_PACKED = {
    "in_channels": 8, **_HEADS, "num_layers": 2, "num_single_layers": 4, "joint_attention_dim": 8,
    "axes_dims_rope": (2, 2, 4),
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "UNet2DModel": _UNET2D,
    "UNet2DModel/classes": {**_UNET2D, "num_class_embeds": 10},
    "UNet2DModel/identity": {**_UNET2D, "class_embed_type": "identity"},
    "UNet2DConditionModel": _SD,
    "UNet2DConditionModel/sdxl": {
        **_SD, "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 32, "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
    },
    "UNet2DConditionModel/classes": {**_CONDITIONS, "num_class_embeds": 10, "time_cond_proj_dim": 8},
    "UNet2DConditionModel/timestep": {**_CONDITIONS, "class_embed_type": "timestep"},
    "UNet2DConditionModel/projection": {
        **_CONDITIONS, "class_embed_type": "projection", "projection_class_embeddings_input_dim": 6,
    },
    "UNet2DConditionModel/image": {
        **_CONDITIONS, "addition_embed_type": "image", "encoder_hid_dim": 8, "encoder_hid_dim_type": "image_proj",
    },
    "UNet2DConditionModel/text_image": {
        **_CONDITIONS, "addition_embed_type": "text_image", "encoder_hid_dim": 8,
        "encoder_hid_dim_type": "text_image_proj",
    },
    "UNet1DModel": {
        "block_out_channels": (32, 32, 64), "extra_in_channels": 64, "sample_size": 64, "in_channels": 2,
    },
    "UNet3DConditionModel": {
        "block_out_channels": (8,), "layers_per_block": 1, **_CROSS, "sample_size": 8, "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock3D",), "up_block_types": ("CrossAttnUpBlock3D",),
    },
    "UNetSpatioTemporalConditionModel": {
        "block_out_channels": (32, 32), "layers_per_block": 1, "cross_attention_dim": 8, "sample_size": 8,
        "num_attention_heads": 2, "num_frames": 3, "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    },
    "I2VGenXLUNet": {
        **_UNET, **_CROSS, "sample_size": 8, "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    },
    "Kandinsky3UNet": {
        "time_embedding_dim": 16, "groups": 4, "attention_head_dim": 4, "layers_per_block": 2,
        "block_out_channels": (8, 16), "cross_attention_dim": 8, "encoder_hid_dim": 6,
    },
    "StableCascadeUNet": {
        "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 16,
        "block_out_channels": (8, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1), "down_blocks_repeat_mappers": (1, 1), "up_blocks_repeat_mappers": (1, 1),
        "clip_text_pooled_in_channels": 8, "clip_text_in_channels": 8, "clip_image_in_channels": 8,
        "effnet_in_channels": 3,
    },
    "UVit2DModel": {
        "hidden_size": 16, "cond_embed_dim": 8, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20,
        "encoder_hidden_size": 8, "vocab_size": 12, "codebook_size": 10, "in_channels": 16, "block_out_channels": 16,
        "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 16, "sample_size": 4,
    },
    "DiTTransformer2DModel": {**_DIT, "num_embeds_ada_norm": 10, "norm_num_groups": 4, "out_channels": 8},
    "PixArtTransformer2DModel": {
        **_DIT, "num_layers": 6, "cross_attention_dim": 16, "caption_channels": 8, "norm_num_groups": 4,
    },
    "PixArtTransformer2DModel/conditions": {
        **_DIT, "num_attention_heads": 3, "cross_attention_dim": 24, "caption_channels": 8, "norm_num_groups": 4,
        "use_additional_conditions": True,
    },
    "Transformer2DModel": {
        **_HEADS, "in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 8, "sample_size": 8, "num_layers": 2,
    },
    "Transformer2DModel/ada_norm_zero": {
        **_DIT, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10, "norm_elementwise_affine": False,
    },
    "SD3Transformer2DModel": {
        **_DIT, "num_layers": 6, "joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8,
        "out_channels": 4, "pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    },
    "FluxTransformer2DModel": {**_PACKED, "pooled_projection_dim": 8},
    "FluxTransformer2DModel/guidance": {**_PACKED, "pooled_projection_dim": 8, "guidance_embeds": True},
    "Flux2Transformer2DModel": {**_PACKED, "axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 8},
    "ChromaTransformer2DModel": {
        **_PACKED, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1,
    },
    "BriaTransformer2DModel": {**_PACKED, "axes_dims_rope": [2, 2, 4], "pooled_projection_dim": 8},
    "OvisImageTransformer2DModel": {**_PACKED, "out_channels": 8},
    "QwenImageTransformer2DModel": {
        **_HEADS, "in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": 8,
        "axes_dims_rope": (2, 2, 4),
    },
    "HunyuanDiT2DModel": {
        **_DIT, "num_layers": 8, "hidden_size": 16, "mlp_ratio": 2.0, "cross_attention_dim": 8,
        "cross_attention_dim_t5": 8, "pooled_projection_dim": 8, "text_len": 5, "text_len_t5": 4,
    },
    "AuraFlowTransformer2DModel": {
        **_HEADS, "sample_size": 8, "in_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 3,
        "joint_attention_dim": 8, "caption_projection_dim": 16, "pos_embed_max_size": 64,
    },
    "LuminaNextDiT2DModel": {
        "sample_size": 8, "in_channels": 4, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2,
        "num_kv_heads": 2, "multiple_of": 8, "cross_attention_dim": 8,
    },
    "SanaTransformer2DModel": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 3, "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8, "sample_size": 8,
    },
    "SanaVideoTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24,
        "caption_channels": 8, "sample_size": 8,
    },
    "PRXTransformer2DModel": {
        "in_channels": 4, "context_in_dim": 8, "hidden_size": 16, "num_heads": 2, "depth": 3, "axes_dim": [4, 4],
        "mlp_ratio": 2.0,
    },
    "CogView3PlusTransformer2DModel": {
        **_DIT, "out_channels": 4, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4,
        "pos_embed_max_size": 8,
    },
    "CogView4Transformer2DModel": {
        **_DIT, "out_channels": 4, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4,
        "pos_embed_max_size": 8, "rope_axes_dim": (8, 8),
    },
    "CogVideoXTransformer3DModel": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 8, "num_layers": 2,
        "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 8,
    },
    "CogVideoXTransformer3DModel/rotary": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 8, "num_layers": 2,
        "sample_width": 8, "sample_height": 8, "sample_frames": 13, "max_text_seq_length": 8,
        "use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 8,
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
        "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32,
    },
    "WanTransformer3DModel/image": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
        "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32, "image_dim": 8, "added_kv_proj_dim": 24,
    },
    "LTXVideoTransformer3DModel": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "num_layers": 2,
        "caption_channels": 8,
    },
    "HunyuanVideoTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 2, "num_single_layers": 2,
        "num_refiner_layers": 1, "text_embed_dim": 8, "pooled_projection_dim": 8, "rope_axes_dim": (2, 2, 4),
    },
    "AllegroTransformer3DModel": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 16, "sample_width": 8,
        "sample_height": 8, "sample_frames": 4, "caption_channels": 8,
    },
    "LatteTransformer3DModel": {
        **_DIT, "num_layers": 2, "cross_attention_dim": 16, "caption_channels": 8, "norm_type": "ada_norm_single",
        "video_length": 3, "num_embeds_ada_norm": 10, "norm_elementwise_affine": False, "out_channels": 8,
    },
    "StableAudioDiTModel": {
        "sample_size": 16, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "num_key_value_attention_heads": 2, "out_channels": 4, "cross_attention_dim": 8, "time_proj_dim": 8,
        "global_states_input_dim": 8, "cross_attention_input_dim": 8,
    },
    "PriorTransformer": {
        **_HEADS, "num_layers": 3, "embedding_dim": 16, "num_embeddings": 5, "additional_embeddings": 4,
    },
    "Kandinsky5Transformer3DModel": {
        "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 8, "model_dim": 16, "ff_dim": 16, "num_text_blocks": 1,
        "num_visual_blocks": 2, "axes_dims": (4, 2, 2),
    },
}  # fmt: skip


CONFIGS = {key: of for key, of in CONFIGS.items() if hasattr(diffusers, key.split("/")[0])}  # older ones have fewer

# Their shapes depend on the values of masks: sampled with a graph for every length, but no training step.
VALUE_DEPENDENT: dict[str, dict[str, Any]] = {
    "Lumina2Transformer2DModel": {
        "sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
        "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
        "axes_lens": (128, 128, 128), "cap_feat_dim": 8,
    },
    "MochiTransformer3DModel": {
        **_HEADS, "num_layers": 2, "pooled_projection_dim": 8, "in_channels": 4, "text_embed_dim": 8,
        "time_embed_dim": 4, "max_sequence_length": 8,
    },
}  # fmt: skip


def backbone(key: str, dtype: torch.dtype = torch.float32, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """The bare diffusers model of a key of CONFIGS, with `changes` of that."""
    torch.manual_seed(0)
    model = getattr(diffusers, key.split("/")[0])(**{**CONFIGS[key], **(changes or {})})
    return model if dtype is torch.float32 else model.to(dtype)  # diffusers logs a warning on every .to(dtype)
