"""Cascaded diffusion: a base U-Net and the U-Nets that enlarge its images, trained side by side on the same ranks.

    fxpipe compile examples/cascade.py:lsun --world-size 2 --schedule bidirectional --dump out/
    fxpipe compile examples/cascade.py:imagenet --world-size 4

Each U-Net has a loss of its own; the step's is their sum. Those that enlarge are conditioned on a noisy small image, by
channels, as in CDM (Ho et al., "Cascaded Diffusion Models for High Fidelity Image Generation", JMLR 2022). Sizes are
small to run; `width` and `size` make them real.
"""

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.nn import functional as F


class Cascade(nn.Module):
    """U-Nets for `size`, 2 `size`, 4 `size` ...: each predicts the noise of its own images."""

    signal: Tensor

    def __init__(self, num_unets: int, size: int = 8, width: int = 16) -> None:
        super().__init__()
        self.sizes = [size * 2**i for i in range(num_unets)]
        self.unets = nn.ModuleList(_unet(size, width, conditioned=i > 0) for i, size in enumerate(self.sizes))
        self.register_buffer("signal", torch.linspace(0.99, 0.01, 1000))

    def forward(self, **images: Tensor) -> Tensor:
        """`images_0` and so on, [batch, 3, size, size] in [-1, 1]."""
        losses = []
        for i, unet in enumerate(self.unets):
            clean = images[f"images_{i}"]
            noise = torch.randn_like(clean)
            times = torch.randint(0, 1000, (clean.shape[0],), device=clean.device)
            noisy = self._diffused(clean, noise, times)
            if i > 0:
                small = images[f"images_{i - 1}"]
                blurred = self._diffused(small, torch.randn_like(small), times // 4)
                noisy = torch.cat([noisy, F.interpolate(blurred, scale_factor=2.0)], dim=1)
            losses.append(F.mse_loss(unet(noisy, times).sample, noise))
        return torch.stack(losses).sum()

    def _diffused(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        signal = self.signal.to(images.dtype)[times].view(-1, 1, 1, 1)
        return signal.sqrt() * images + (1 - signal).sqrt() * noise

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        """Random images at every size."""
        like = next(self.parameters())
        if like.is_meta:
            return {f"images_{i}": torch.empty(batch_size, 3, s, s, device="meta") for i, s in enumerate(self.sizes)}
        generator = torch.Generator().manual_seed(0)
        largest = torch.rand(batch_size, 3, self.sizes[-1], self.sizes[-1], generator=generator, dtype=like.dtype)
        return {f"images_{i}": F.adaptive_avg_pool2d(largest * 2 - 1, s) for i, s in enumerate(self.sizes)}


def _unet(size: int, width: int, conditioned: bool) -> UNet2DModel:
    return UNet2DModel(
        sample_size=size,
        in_channels=6 if conditioned else 3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )


def lsun() -> Cascade:
    """Two U-Nets, as for LSUN: a base and one enlargement."""
    torch.manual_seed(0)
    return Cascade(2)


def imagenet() -> Cascade:
    """Three U-Nets, as for ImageNet."""
    torch.manual_seed(0)
    return Cascade(3)
