"""Small random networks over [B, C, H, W], of layers that treat rows in every way: what any denoiser may be made of."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

C = 4  # channels between layers


class Layer(nn.Module):
    """A function of x and the net's text [B, 3, C], with weights of its own."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module, **tensors: Tensor) -> None:
        super().__init__()
        self.function, self.of = function, nn.ModuleList(modules)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.function(self, x, text)


def plain(module: nn.Module) -> Layer:
    return Layer(lambda m, x, text: m.of[0](x), module)


def function(of_x: Callable[[Tensor], Tensor]) -> Layer:
    return Layer(lambda m, x, text: of_x(x))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, C // 2)).transpose(1, 2)


def attention(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    q, k, v = m.of[0](tokens).chunk(3, -1)
    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)
    return x + out.transpose(1, 2).reshape(x.shape)


def joint_attention(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    both = torch.cat([text, x.flatten(2).transpose(1, 2)], 1)
    q, k, v = m.of[0](both).chunk(3, -1)
    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)
    image = out[:, text.shape[1] :] + out[:, : text.shape[1]].mean(1, keepdim=True)
    return x + image.transpose(1, 2).reshape(x.shape)


def written_attention(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    q, k, v = m.of[0](x.flatten(2).transpose(1, 2)).chunk(3, -1)
    weights = torch.baddbmm(m.bias[None, None, None].squeeze(0), q, k.transpose(1, 2)).softmax(-1)  # type: ignore[index]
    return x + (weights @ v).transpose(1, 2).reshape(x.shape)


def linear_attention(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    q, k, v = m.of[0](x.flatten(2).transpose(1, 2)).chunk(3, -1)
    return x + (q @ (k.sigmoid().transpose(1, 2) @ v) / x[0, 0].numel()).transpose(1, 2).reshape(x.shape)


def cross_attention(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    q, (k, v) = m.of[0](tokens), m.of[1](text).chunk(2, -1)
    return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def column_attention(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    rows = x.permute(0, 2, 3, 1).flatten(0, 1)
    q, k, v = m.of[0](rows).chunk(3, -1)
    out = F.scaled_dot_product_attention(q, k, v)
    return x + out.unflatten(0, (x.shape[0], x.shape[2])).permute(0, 3, 1, 2)


def patchified(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    tokens = (
        x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    )
    tokens = m.of[0](tokens).reshape(batch, height // 2, width // 2, 2, 2, channels)
    return torch.einsum("nhwpqc->nchpwq", tokens).reshape(x.shape)


def neighbours(x: Tensor) -> Tensor:
    around = (
        F.unfold(x, (3, 5), dilation=(2, 1), padding=(2, 2)).unflatten(1, (x.shape[1], -1)).unflatten(3, x.shape[2:])
    )
    return (around * (x[:, :, None] * around).mean(1, keepdim=True).softmax(2)).sum(2)


def gated(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    return x * m.of[0](x.mean((2, 3))).sigmoid()[:, :, None, None] + text.mean(1)[:, :, None, None]


def layer_normed(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    return m.of[0](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def response_normed(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    norm = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
    return x + x * norm / (norm.mean(1, keepdim=True) + 1e-6)


def placed(m: Layer, x: Tensor, text: Tensor) -> Tensor:
    height = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    return x + (height * 0.1).sin() + m.table


def conv(kernel: int, **options: object) -> Callable[[int, int], Layer]:
    return lambda height, width: plain(nn.Conv2d(C, C, kernel, **options))  # type: ignore[arg-type]


def of(make: Callable[[], Layer]) -> Callable[[int, int], Layer]:
    return lambda height, width: make()


def qkv(body: Callable[..., Tensor], **tensors: Tensor) -> Callable[[int, int], Layer]:
    return lambda height, width: Layer(body, nn.Linear(C, 3 * C), **tensors)


LAYERS: dict[str, Callable[[int, int], Layer]] = {
    "conv3": conv(3, padding=1),
    "conv1": conv(1),
    "conv5": conv(5, padding=2, groups=2),
    "conv2 same": conv(2, padding="same"),
    "conv3 valid": conv(3),
    "conv3 dilated": conv(3, dilation=2, padding=2),
    "conv3 stride 2": conv(3, stride=2, padding=1),
    "conv4 stride 2": conv(4, stride=2, padding=1),
    "conv3 stride 3": conv(3, stride=3),
    "conv3 wide padding": conv(3, padding=3),
    "conv3 circular": conv(3, padding=1, padding_mode="circular"),
    "conv3 reflect": conv(3, padding=1, padding_mode="reflect"),
    "conv3 replicate": conv(3, padding=1, padding_mode="replicate"),
    "conv5 reflect stride 2": conv(5, padding=2, padding_mode="reflect", stride=2),
    "conv3 asymmetric": of(lambda: Layer(lambda m, x, t: m.of[0](F.pad(x, (0, 1, 0, 1))), nn.Conv2d(C, C, 3, 2))),
    "transposed 2": of(lambda: plain(nn.ConvTranspose2d(C, C, 2, 2))),
    "transposed 3": of(lambda: plain(nn.ConvTranspose2d(C, C, 3, 2, 1, 1))),
    "transposed 4": of(lambda: plain(nn.ConvTranspose2d(C, C, 4, 2, 1))),
    "transposed valid": of(lambda: plain(nn.ConvTranspose2d(C, C, 3, 1))),
    "average": of(lambda: plain(nn.AvgPool2d(2))),
    "average padded": of(lambda: plain(nn.AvgPool2d(3, 1, 1))),
    "average uncounted": of(lambda: plain(nn.AvgPool2d(3, 1, 1, count_include_pad=False))),
    "maximum": of(lambda: plain(nn.MaxPool2d(3, 2, 1))),
    "adaptive": of(lambda: plain(nn.AdaptiveAvgPool2d(4))),
    "nearest 2": of(lambda: function(lambda x: F.interpolate(x, scale_factor=2.0))),
    "nearest size": of(lambda: function(lambda x: F.interpolate(x, size=(2 * x.shape[2] - 1, 2 * x.shape[3] - 1)))),
    "nearest 1.5": of(lambda: function(lambda x: F.interpolate(x, scale_factor=1.5))),
    "bilinear": of(lambda: function(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"))),
    "bilinear 4, 3": of(lambda: function(lambda x: F.interpolate(x, scale_factor=(4.0, 3.0), mode="bilinear"))),
    "bilinear half": of(lambda: function(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"))),
    "bilinear third": of(lambda: function(lambda x: F.interpolate(x, (x.shape[2] // 3, 7), mode="bilinear"))),
    "bilinear 13 to 15": of(
        lambda: function(lambda x: F.interpolate(F.pad(x, (0, 13 - x.shape[3])), (2 * x.shape[2], 15), mode="bilinear"))
    ),
    "bilinear 2.05": of(lambda: function(lambda x: F.interpolate(x, scale_factor=2.05, mode="bilinear"))),
    "bilinear 3": of(lambda: function(lambda x: F.interpolate(x, scale_factor=3.0, mode="bilinear"))),
    "bilinear 1.5": of(lambda: function(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"))),
    "bilinear corners": of(
        lambda: function(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True))
    ),
    "neighbours": of(lambda: function(neighbours)),
    "unfolded": of(lambda: function(lambda x: F.unfold(x, 2, stride=2).unflatten(2, (x.shape[2] // 2, -1))[:, :C])),
    "pixel shuffle": of(lambda: Layer(lambda m, x, t: F.pixel_shuffle(m.of[0](x), 2), nn.Conv2d(C, 4 * C, 1))),
    "pixel unshuffle": of(lambda: Layer(lambda m, x, t: m.of[0](F.pixel_unshuffle(x, 2)), nn.Conv2d(4 * C, C, 1))),
    "group norm": of(lambda: plain(nn.GroupNorm(2, C))),
    "instance norm": of(lambda: plain(nn.InstanceNorm2d(C, affine=True))),
    "batch norm": of(lambda: plain(nn.BatchNorm2d(C))),
    "layer norm": of(lambda: Layer(layer_normed, nn.LayerNorm(C))),
    "response norm": of(lambda: Layer(response_normed)),
    "whole norm": lambda height, width: plain(nn.LayerNorm([C, height, width])),
    "centred": of(lambda: function(lambda x: (x - x.mean((1, 2, 3), keepdim=True)))),
    "scaled": of(lambda: function(lambda x: x / (1 + x.std((2, 3), keepdim=True)))),
    "attention": qkv(attention),
    "joint attention": qkv(joint_attention),
    "written attention": qkv(written_attention, bias=torch.zeros(1)),
    "linear attention": qkv(linear_attention),
    "column attention": qkv(column_attention),
    "cross attention": of(lambda: Layer(cross_attention, nn.Linear(C, C), nn.Linear(C, 2 * C))),
    "patchified": of(lambda: Layer(patchified, nn.Linear(4 * C, 4 * C))),
    "gated": of(lambda: Layer(gated, nn.Linear(C, C))),
    "placed": lambda height, width: Layer(placed, table=torch.randn(1, C, height, width)),
    "mixer": lambda height, width: Layer(
        lambda m, x, t: x + m.of[0](x.flatten(2)).reshape(x.shape), nn.Linear(height * width, height * width)
    ),
    "flip": of(lambda: function(lambda x: x.flip(2))),
    "roll": of(lambda: function(lambda x: x.roll((1, 1), (2, 3)))),
    "cumulative": of(lambda: function(lambda x: x.cumsum(2) / x.shape[2])),
    "softmax": of(lambda: function(lambda x: x * x.softmax(2))),
    "crop end": of(lambda: function(lambda x: x[:, :, :-1])),
    "crop": of(lambda: function(lambda x: x[:, :, 1:-1])),
    "every second": of(lambda: function(lambda x: x[:, :, ::2] + x[:, :, 1::2])),
    "first row": of(lambda: function(lambda x: x + x[:, :, :1])),
    "picked": of(lambda: function(lambda x: x + x[:, :, 2, None])),
    "transpose": of(lambda: function(lambda x: x.transpose(2, 3))),
    "repeated": of(lambda: function(lambda x: x.repeat_interleave(2, 2))),
    "halves": of(lambda: function(lambda x: torch.cat(x.chunk(2, 2)[::-1], 2))),
    "frames": of(lambda: function(lambda x: torch.cat([x, -x], 2).unflatten(2, (2, x.shape[2])).mean(2))),
    "gathered rows": of(lambda: function(lambda x: x[:, :, torch.arange(x.shape[2]) // 2])),
    "triangle": of(lambda: function(lambda x: x + 0.1 * x @ (x.transpose(2, 3) @ x))),
    "max over rows": of(lambda: function(lambda x: x - x.amax((2, 3), keepdim=True))),
    "overwritten": of(lambda: function(lambda x: torch.cat([x[:, :2] * 2, x[:, 2:].tanh()], 1))),
    "silu": of(lambda: plain(nn.SiLU())),
}  # fmt: skip


class RowNet(nn.Module):
    """Layers by name, those that fit. "save" keeps the value there, "add" adds the first kept one of its shape."""

    def __init__(self, names: Sequence[str], height: int, width: int) -> None:
        super().__init__()
        self.layers, self.names = nn.ModuleList(), list[str]()
        x, text = self.example(height, width).values()
        for name in names:
            if name in ("save", "add"):
                self.names.append(name)
                continue
            layer = LAYERS[name](x.shape[2], x.shape[3]).double().eval()
            try:
                with torch.no_grad():
                    y = layer(x, text)
            except (RuntimeError, ValueError):  # too few rows for it
                continue
            if min(y.shape[2:]) > 2 and max(y.shape[2:]) < 50 and y.shape[1] == C:
                x = y
                self.layers.append(layer)
                self.names.append(name)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        kept: list[Tensor] = []
        layers = iter(self.layers)
        for name in self.names:
            if name == "save":
                kept.append(x)
            elif name == "add":
                x = x + next((k for k in kept if k.shape == x.shape), torch.zeros_like(x))
            else:
                x = next(layers)(x, text)
        return x

    @staticmethod
    def example(height: int, width: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = {"x": (2, C, height, width), "text": (2, 3, C)}
        return {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
