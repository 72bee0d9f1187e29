"""Denoisers to sample with: tiny diffusers backbones, a VAE's two halves, all with weights that hide nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from fxpipe.models.backbones import example_inputs
from tests.tiny_backbones import CONFIGS, backbone

diffusers.utils.logging.set_verbosity_error()  # of every `.to(dtype)`


@dataclass(frozen=True)
class Case:
    """A model, keyword arguments of one call, and its row dimensions (None: a backbone's own)."""

    model: nn.Module
    example: Mapping[str, Any]
    sample: Mapping[str, int] | None = None


class Decoder(nn.Module):
    """Latents to an image."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.decode(z, return_dict=False)[0]  # type: ignore[no-any-return, operator]


class Encoder(nn.Module):
    """An image to the moments of its latents; its downsampling pads below and to the right alone."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, image: Tensor) -> Tensor:
        return self.vae.quant_conv(self.vae.encoder(image))  # type: ignore[no-any-return, operator]


_ONE = {"num_layers": 1}
_ONE_OF_BOTH = {"num_layers": 1, "num_single_layers": 1}
_FEW: dict[str, dict[str, int]] = {
    "DiTTransformer2DModel": _ONE, "PixArtTransformer2DModel": _ONE, "SanaTransformer2DModel": _ONE,
    "CogView3PlusTransformer2DModel": _ONE, "CogView4Transformer2DModel": _ONE, "FluxTransformer2DModel": _ONE_OF_BOTH,
    "Flux2Transformer2DModel": _ONE_OF_BOTH, "ChromaTransformer2DModel": _ONE_OF_BOTH,
    "BriaTransformer2DModel": _ONE_OF_BOTH, "OvisImageTransformer2DModel": _ONE_OF_BOTH,
    "HunyuanVideoTransformer3DModel": _ONE_OF_BOTH, "SD3Transformer2DModel": {"num_layers": 2},
    "AuraFlowTransformer2DModel": {"num_mmdit_layers": 1, "num_single_dit_layers": 1},
    "HunyuanDiT2DModel": {"num_layers": 4},  # the first half has skips to the second
}  # fmt: skip


def _vae() -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    )  # fmt: skip


def revealed(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In eval; layers that begin at zero, and would hide what is wrong before them, no longer do."""
    generator = torch.Generator().manual_seed(1)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def _backbone(key: str, dtype: torch.dtype, changes: Mapping[str, Any]) -> Case:
    model = revealed(backbone(key, dtype, changes), dtype)
    return Case(model, {name: value for name, value in example_inputs(model, 2).items() if name != "target"})


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=dtype)


def _half(half: Callable[[nn.Module], nn.Module], name: str, *shape: int) -> Case:
    torch.manual_seed(0)
    return Case(revealed(half(_vae())), {name: noise(*shape)}, {name: 2})


def case(key: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Case:
    """One of KEYS, a backbone with `changes` of its config."""
    if key == "AutoencoderKL/decoder":
        return _half(Decoder, "z", 2, 4, 10, 6)
    if key == "AutoencoderKL/encoder":
        return _half(Encoder, "image", 2, 3, 40, 24)
    return _backbone(key, dtype, changes)


def small(key: str, dtype: torch.dtype = torch.float64) -> Case:
    """The same with as few layers as show all that it does to rows."""
    return case(key, dtype, **_FEW.get(key, {}))


KEYS = (*CONFIGS, "AutoencoderKL/decoder", "AutoencoderKL/encoder")
