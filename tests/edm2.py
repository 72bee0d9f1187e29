"""A small U-Net of EDM2 (Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", CVPR 2024,
arXiv 2312.02696): magnitude-preserving operations, weights that every forward in training normalises, its loss."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def normalize(x: Tensor, dim: list[int] | int | None = None, eps: float = 1e-4) -> Tensor:
    dim = list(range(1, x.ndim)) if dim is None else dim
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return x / torch.add(eps, norm, alpha=math.sqrt(norm.numel() / x.numel()))


def resample(x: Tensor, mode: str) -> Tensor:
    box = torch.full((x.shape[1], 1, 2, 2), 0.25, dtype=x.dtype, device=x.device)
    if mode == "down":
        return F.conv2d(x, box, groups=x.shape[1], stride=2)
    return F.conv_transpose2d(x, 4 * box, groups=x.shape[1], stride=2) if mode == "up" else x


def mp_silu(x: Tensor) -> Tensor:
    return F.silu(x) / 0.596


def mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    return a.lerp(b, t) / math.sqrt((1 - t) ** 2 + t**2)


def mp_cat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    both = math.sqrt((a.shape[1] + b.shape[1]) / ((1 - t) ** 2 + t**2))
    return torch.cat([both / math.sqrt(a.shape[1]) * (1 - t) * a, both / math.sqrt(b.shape[1]) * t * b], 1)


class MPFourier(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 2 * math.pi * torch.randn(channels))
        self.register_buffer("phases", 2 * math.pi * torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return (x.ger(self.freqs) + self.phases).cos() * math.sqrt(2)


class MPConv(nn.Module):
    def __init__(self, channels: int, out: int, *kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, channels, *kernel))

    def forward(self, x: Tensor, gain: Any = 1.0) -> Tensor:
        w = self.weight.to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.weight.copy_(normalize(w))
        w = normalize(w) * (gain / math.sqrt(w[0].numel()))
        return x @ w.t() if w.ndim == 2 else F.conv2d(x, w, padding=(w.shape[-1] // 2,))


class Block(nn.Module):
    def __init__(self, channels: int, out: int, emb: int, mode: str = "keep", enc: bool = True, heads: int = 0) -> None:
        super().__init__()
        self.mode, self.enc, self.heads = mode, enc, heads
        self.emb_gain = nn.Parameter(torch.full([], 0.3))
        self.conv_res0 = MPConv(out if enc else channels, out, 3, 3)
        self.emb_linear, self.conv_res1 = MPConv(emb, out), MPConv(out, out, 3, 3)
        self.conv_skip = MPConv(channels, out, 1, 1) if channels != out else None
        self.attn_qkv, self.attn_proj = (MPConv(out, 3 * out, 1, 1), MPConv(out, out, 1, 1)) if heads else (None, None)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        x = resample(x, self.mode)
        if self.enc:
            x = normalize(x if self.conv_skip is None else self.conv_skip(x), dim=1)
        y = self.conv_res0(mp_silu(x))
        c = self.emb_linear(emb, gain=self.emb_gain) + 1
        y = self.conv_res1(mp_silu(y * c.unsqueeze(2).unsqueeze(3)))
        if not self.enc and self.conv_skip is not None:
            x = self.conv_skip(x)
        x = mp_sum(x, y, t=0.3)
        if self.attn_qkv is not None and self.attn_proj is not None:
            y = self.attn_qkv(x)
            y = y.reshape(y.shape[0], self.heads, -1, 3, y.shape[2] * y.shape[3])
            q, k, v = normalize(y, dim=2).unbind(3)
            w = torch.einsum("nhcq,nhck->nhqk", q, k / math.sqrt(q.shape[2])).softmax(dim=3)
            y = self.attn_proj(torch.einsum("nhqk,nhck->nhcq", w, v).reshape(*x.shape))
            x = mp_sum(x, y, t=0.3)
        return x.clip_(-256, 256)


class EDM2(nn.Module):
    """U-Net, preconditioning and loss: images [B, 2, 8, 8], labels [B, 3] -> the loss."""

    def __init__(self, channels: int = 4, sigma_data: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        one, two, emb = channels, 2 * channels, 2 * channels
        self.sigma_data = sigma_data
        self.emb_fourier, self.emb_noise, self.emb_label = MPFourier(one), MPConv(one, emb), MPConv(3, emb)
        self.enc = nn.ModuleList(
            [MPConv(3, one, 3, 3), Block(one, one, emb), Block(one, one, emb, "down"), Block(one, two, emb, heads=2)]
        )
        of_dec = dict(enc=False)
        self.dec = nn.ModuleList(
            [
                Block(two, two, emb, heads=2, **of_dec), Block(two, two, emb, **of_dec),
                Block(two + two, two, emb, heads=2, **of_dec), Block(two + one, two, emb, **of_dec),
                Block(two, two, emb, "up", **of_dec),
                Block(two + one, one, emb, **of_dec), Block(one + one, one, emb, **of_dec),
            ]
        )  # fmt: skip
        self.out_conv, self.out_gain = MPConv(one, 2, 3, 3), nn.Parameter(torch.full([], 0.5))
        self.logvar_fourier, self.logvar_linear = MPFourier(8), MPConv(8, 1)
        self.double()

    def unet(self, x: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        emb = self.emb_noise(self.emb_fourier(noise))
        emb = mp_silu(mp_sum(emb, self.emb_label(labels * math.sqrt(labels.shape[1]))))
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        skips = []
        for place, block in enumerate(self.enc):
            x = block(x, emb) if place else block(x)
            skips.append(x)
        for place, block in enumerate(self.dec):
            x = block(x if place in (0, 1, 4) else mp_cat(x, skips.pop()), emb)
        return self.out_conv(x, gain=self.out_gain)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        sigma = (torch.randn([images.shape[0], 1, 1, 1], dtype=images.dtype) - 0.4).exp()
        of_data = self.sigma_data
        weight = (sigma**2 + of_data**2) / (sigma * of_data) ** 2
        x = images + torch.randn_like(images) * sigma
        c_skip = of_data**2 / (sigma**2 + of_data**2)
        c_out = sigma * of_data / (sigma**2 + of_data**2).sqrt()
        c_in, c_noise = 1 / (of_data**2 + sigma**2).sqrt(), sigma.flatten().log() / 4
        denoised = c_skip * x + c_out * self.unet(c_in * x, c_noise, labels)
        logvar = self.logvar_linear(self.logvar_fourier(c_noise)).reshape(-1, 1, 1, 1)
        return ((weight / logvar.exp()) * (denoised - images) ** 2 + logvar).mean()


def batch(number: int) -> dict[str, Tensor]:
    """Four samples."""
    draw = torch.Generator().manual_seed(number)
    labels = F.one_hot(torch.randint(3, (4,), generator=draw), 3).double()
    return {"images": torch.randn(4, 2, 8, 8, generator=draw, dtype=torch.float64), "labels": labels}
