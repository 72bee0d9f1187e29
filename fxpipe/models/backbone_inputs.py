"""What the arguments of diffusers' models mean: a table from names to tensors, in terms of the config's own keys.

UNet2DConditionModel.config: in_channels 4, sample_size 64, cross_attention_dim 1024
sample                 ->  noise [batch, 4, 64, 64]
timestep               ->  integers [batch] below 1000
encoder_hidden_states  ->  noise [batch, 77, 1024]
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.inputs import signature_of

# Where the config is silent: tokens along each side of an image, frames of a video, tokens of a text.
_SIDE_TOKENS, _FRAMES, _TEXT_TOKENS = 16, 4, 77

# Axes of the model's sample, by class name; B batch, C channels, F frames, H W space, L signal length, N tokens.
# The first match decides.
_LAYOUTS = (
    (r"CogVideoX|ConsisID|UNetSpatioTemporal", "BFCHW"),
    (r"Kandinsky[56]", "BFHWC"),
    (r"LTX2?Video|QwenImageTransformer|AceStep", "BNC"),
    (r"1D|StableAudio", "BCL"),
    (r"3D|UNetMotion|I2VGen|ZImage", "BCFHW"),
    (r"PriorTransformer", "BC"),
)
# Models whose time runs over [0, 1); all others count training steps 0..999.
_UNIT_TIME = r"Flux|AuraFlow|Lumina|StableCascade|StableAudio|QwenImage|Chroma|OvisImage|LongCat|PRX|Bria"
_FLOAT_TIME = r"HunyuanDiT|HunyuanImage"  # they embed time in the dtype of `timestep`
_TEXT_WIDTHS = (
    "joint_attention_dim", "text_embed_dim", "text_dim", "in_text_dim", "caption_channels", "cap_feat_dim",
    "context_in_dim", "encoder_hid_dim", "encoder_hidden_size", "cross_attention_input_dim", "cross_attention_dim",
    "embedding_dim",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What the table's rules read: the config, and the sizes of one batch. Lengths of latents, not of pixels."""

    config: Mapping[str, Any]
    arguments: Mapping[str, inspect.Parameter]
    names: str  # class names of the model and its bases
    axes: dict[str, int]  # extents by the letters of _LAYOUTS
    patch: tuple[int, int, int]  # frames, height, width
    layout: str
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def of(cls, model: nn.Module, batch_size: int, dtype: torch.dtype) -> "Sizes":
        config: Mapping[str, Any] = model.config  # type: ignore[assignment]
        arguments = signature_of(model).parameters
        names = " ".join(c.__name__ for c in type(model).__mro__)
        layout = next((layout for pattern, layout in _LAYOUTS if re.search(pattern, names)), "BCHW")
        layout = "BNC" if "img_ids" in arguments else layout
        patch = _patch(config) if layout != "BNC" else (1, 1, 1)
        axes = {"B": batch_size, **_extents(config, patch, layout)}
        return cls(config, arguments, names, axes, patch, layout, dtype, torch.Generator().manual_seed(0))

    def get(self, *keys: str) -> Any:
        """The config's first entry among `keys` that is set."""
        return next((self.config[k] for k in keys if self.config.get(k) is not None), None)

    def needs(self, name: str) -> bool:
        """Whether the forward has no default for `name`."""
        return name in self.arguments and self.arguments[name].default is inspect.Parameter.empty

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=self.dtype, device="cpu")

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device="cpu")

    def latent(self, channels: int | None) -> Tensor | None:
        """Noise in the sample's layout, with `channels` of its own."""
        return None if channels is None else self.noise(*(channels if a == "C" else self.axes[a] for a in self.layout))

    def vectors(self, *keys: str, tokens: int | None = None) -> Tensor | None:
        """Noise [batch, width] or [batch, tokens, width]; the width is under the first of `keys` that is set."""
        width = self.get(*keys)
        width = max(width) if isinstance(width, Sequence) else width
        return None if width is None else self.noise(self.axes["B"], *([] if tokens is None else [tokens]), width)

    def mask(self, tokens: int) -> Tensor:
        """All tokens of a text are read."""
        return torch.ones(self.axes["B"], tokens, dtype=torch.bool)

    @property
    def text_tokens(self) -> int:
        return int(self.get("max_text_seq_length", "text_len", "max_sequence_length", "num_embeddings") or _TEXT_TOKENS)


def _patch(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Extents of one token: (frames, height, width); 1 where a model has none."""
    patch = config.get("patch_size") or 1
    frames = config.get("patch_size_t") or 1
    if isinstance(patch, int):
        return (frames, patch, patch)
    return (frames, *patch)[-3:]


def _extents(config: Mapping[str, Any], patch: tuple[int, int, int], layout: str) -> dict[str, int]:
    """Extents of the sample's axes but the batch, by letter: the config's, else what can be halved and patched."""
    size = config.get("sample_size")
    widths = config.get("block_out_channels")
    levels = len(widths) if isinstance(widths, Sequence) else 0
    side = _SIDE_TOKENS if levels == 0 else 8 * 2 ** (levels - 1)
    height, width = (size, size) if isinstance(size, int) else tuple(size or (side * patch[1], side * patch[2]))[-2:]
    if config.get("sample_height"):
        height, width = config["sample_height"], config["sample_width"]
    frames = config.get("sample_frames") or config.get("video_length") or config.get("num_frames") or _FRAMES * patch[0]
    if "temporal_compression_ratio" in config:
        frames = (frames - 1) // config["temporal_compression_ratio"] + 1
    frames = math.ceil(frames / patch[0]) * patch[0]
    channels = next((config[k] for k in ("in_channels", "in_visual_dim", "embedding_dim") if config.get(k)), 1)
    frames = frames if "F" in layout or "num_frames" in config else 1
    return {"C": channels, "F": frames, "H": height, "W": width, "L": height, "N": frames * height * width}


def _time(s: Sizes) -> Tensor | None:
    if "num_embeds_ada_norm" in s.config and s.get("num_embeds_ada_norm") is None and not s.needs("timestep"):
        return None  # a Transformer2DModel that is conditioned on no time ignores it
    batch = s.axes["B"]
    if re.search(_UNIT_TIME, s.names):
        return s.uniform(batch)
    steps = s.integers(1000, batch)
    return steps.to(s.dtype) if re.search(_FLOAT_TIME, s.names) else steps


def _labels(s: Sizes) -> Tensor | None:
    kind, batch = s.get("class_embed_type"), s.axes["B"]
    if kind == "timestep":
        return s.integers(1000, batch)
    if kind == "identity":
        return s.noise(batch, s.get("time_embedding_dim") or 4 * s.config["block_out_channels"][0])
    if kind is not None:
        return s.vectors("projection_class_embeddings_input_dim")
    classes = s.get("num_class_embeds")
    if s.get("norm_type") == "ada_norm_zero":
        classes = s.get("num_embeds_ada_norm")
    return None if classes is None else s.integers(classes, batch)


def _text(s: Sizes) -> Tensor | None:
    if s.get("encoder_hid_dim_type") == "text_image_proj":
        return s.vectors("encoder_hid_dim", tokens=s.text_tokens)
    return s.vectors(*_TEXT_WIDTHS, tokens=s.text_tokens)


def _text_mask(s: Sizes) -> Tensor | None:
    """Left out where a model can do without; Kandinsky 3 has a default that it cannot do with."""
    return s.mask(s.text_tokens) if s.needs("encoder_attention_mask") or "Kandinsky3" in s.names else None


def _added_conditions(s: Sizes) -> dict[str, Tensor | None] | None:
    """SDXL's text and size embeddings, image embeddings of unCLIP-like U-Nets, PixArt's resolution and aspect ratio."""
    batch, kind, hidden = s.axes["B"], s.get("addition_embed_type"), s.get("encoder_hid_dim_type")
    if kind == "text_time":
        width = s.config["projection_class_embeddings_input_dim"] - 6 * s.config["addition_time_embed_dim"]
        return {"text_embeds": s.noise(batch, width), "time_ids": s.integers(1000, batch, 6)}
    if kind in ("image", "text_image") or hidden in ("image_proj", "text_image_proj"):
        if kind != "text_image" and hidden != "text_image_proj":
            return {"image_embeds": s.vectors("encoder_hid_dim")}
        return {"text_embeds": s.vectors("cross_attention_dim"), "image_embeds": s.vectors("cross_attention_dim")}
    extra = s.get("use_additional_conditions")
    if extra or (extra is None and s.get("sample_size") == 128 and s.get("norm_type") == "ada_norm_single"):
        return {"resolution": s.uniform(batch, 2) * 1024, "aspect_ratio": s.uniform(batch, 1)}
    return None


def _token_grid(s: Sizes) -> tuple[int, int, int]:
    return (s.axes["F"] // s.patch[0], s.axes["H"] // s.patch[1], s.axes["W"] // s.patch[2])


def _image_ids(s: Sizes) -> Tensor:
    """Positions [tokens, axes] of a packed image: the last two rotary axes count rows and columns, the rest are 0."""
    rows, columns = torch.meshgrid(torch.arange(s.axes["H"]), torch.arange(s.axes["W"]), indexing="ij")
    rest = [torch.zeros_like(rows)] * (len(s.get("axes_dims_rope") or (0, 0, 0)) - 2)
    return torch.stack([*rest, rows, columns], dim=-1).flatten(0, 1).to(s.dtype)


def _rotary(s: Sizes) -> Any:
    """Rotary factors, for models that do not make their own: (cos, sin) by token, or Lumina's complex grid."""
    head = s.get("attention_head_dim") or (s.get("hidden_size") or 0) // s.config["num_attention_heads"]
    frames, rows, columns = _token_grid(s)
    if s.needs("image_rotary_emb"):
        angles = torch.rand(rows, columns, head // 2, generator=s.generator, device="cpu")
        return torch.polar(torch.ones_like(angles), angles)
    angles = s.uniform(frames * rows * columns, head)
    return (angles.cos(), angles.sin()) if s.get("use_rotary_positional_embeddings") else None


# What each argument's name means. A rule returns None where the config does not ask for the argument.
ARGUMENTS: dict[str, Callable[[Sizes], Any]] = {
    "sample": lambda s: s.latent(s.axes["C"]),
    "hidden_states": lambda s: s.latent(s.axes["C"]),
    "input_ids": lambda s: s.integers(s.config["codebook_size"], s.axes["B"], s.axes["H"], s.axes["W"]),
    "timestep": _time,
    "timestep_ratio": _time,
    "timestep_cond": lambda s: s.vectors("time_cond_proj_dim"),
    "encoder_hidden_states": lambda s: None if "UNetMotion" in s.names else _text(s),  # per frame there: batch * frames
    "encoder_hidden_states_t5": lambda s: s.vectors("cross_attention_dim_t5", tokens=s.get("text_len_t5")),
    "encoder_hidden_states_image": lambda s: s.vectors("image_dim", tokens=257),
    "encoder_attention_mask": _text_mask,
    "encoder_mask": lambda s: s.mask(s.text_tokens),
    "encoder_hidden_states_mask": lambda s: s.mask(s.text_tokens),
    "text_embedding_mask": lambda s: s.mask(s.config["text_len"]),
    "text_embedding_mask_t5": lambda s: s.mask(s.config["text_len_t5"]),
    "cross_attention_kwargs": lambda s: {} if "LuminaNextDiT" in s.names else None,  # which unpacks it, set or not
    "class_labels": _labels,
    "added_cond_kwargs": _added_conditions,
    "added_time_ids": lambda s: s.uniform(
        s.axes["B"], s.config["projection_class_embeddings_input_dim"] // s.config["addition_time_embed_dim"]
    ),
    "pooled_projections": lambda s: s.vectors("pooled_projection_dim", "in_text_dim2"),
    "pooled_text_emb": lambda s: s.vectors("cond_embed_dim"),
    "micro_conds": lambda s: s.uniform(
        s.axes["B"], s.config["micro_cond_embed_dim"] // s.config["micro_cond_encode_dim"]
    ),
    "proj_embedding": lambda s: s.vectors("embedding_proj_dim", "embedding_dim"),
    "guidance": lambda s: s.uniform(s.axes["B"]) if s.get("guidance_embeds") else None,
    "img_ids": _image_ids,
    "txt_ids": lambda s: torch.zeros(s.text_tokens, len(s.get("axes_dims_rope") or (0, 0, 0)), dtype=s.dtype),
    "img_shapes": lambda s: [[(1, s.axes["H"], s.axes["W"])]],
    "image_rotary_emb": _rotary,
    "image_meta_size": lambda s: (
        s.uniform(s.axes["B"], 6) * 1024 if s.get("use_style_cond_and_image_meta_size") else None
    ),
    "style": lambda s: s.integers(1, s.axes["B"]) if s.get("use_style_cond_and_image_meta_size") else None,
    "original_size": lambda s: s.uniform(s.axes["B"], 2) * 1024,
    "target_size": lambda s: s.uniform(s.axes["B"], 2) * 1024,
    "crop_coords": lambda s: torch.zeros(s.axes["B"], 2, dtype=s.dtype),
    "num_frames": lambda s: s.axes["F"],
    "height": lambda s: s.axes["H"],
    "width": lambda s: s.axes["W"],
    "fps": lambda s: s.integers(30, s.axes["B"]) + 1 if s.needs("fps") else None,
    "ofs": lambda s: s.uniform(1) if s.get("ofs_embed_dim") else None,
    "image_latents": lambda s: s.latent(s.axes["C"]),
    "image_embeddings": lambda s: s.vectors("cross_attention_dim"),
    "global_hidden_states": lambda s: s.vectors("global_states_input_dim", tokens=1),
    "clip_text_pooled": lambda s: s.vectors("clip_text_pooled_in_channels", tokens=1),
    "clip_text": lambda s: s.vectors("clip_text_in_channels", tokens=s.text_tokens),
    "clip_img": lambda s: s.vectors("clip_image_in_channels", tokens=1),
    "effnet": lambda s: s.latent(s.get("effnet_in_channels")),
    "visual_rope_pos": lambda s: [torch.arange(n) for n in _token_grid(s)],
    "text_rope_pos": lambda s: torch.arange(s.text_tokens),
}
