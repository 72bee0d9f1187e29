"""Modules that no rule was written for: what is not known of them is gathered, and the prediction is exact."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.row_programs import row_programs


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


class Swin(nn.Module):
    """Attention in shifted windows of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        windows = x.roll((-1, -1), (2, 3)).reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        q, k, v = self.qkv(windows.reshape(-1, 16, c)).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v).reshape(b, h // 4, w // 4, 4, 4, c)
        return x + out.permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w).roll((1, 1), (2, 3))


class Written(nn.Module):
    """Torch's own attention, with a norm by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        t = tokens(self.norm(x))
        return x + self.attention(t, t, t, need_weights=False)[0].transpose(1, 2).unflatten(2, x.shape[2:])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(tokens(x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.permute(0, 2, 3, 1).flatten(0, 1))[0]  # type: ignore[no-any-return]


class Strides(nn.Module):
    """Views that only fit memory in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.contiguous(memory_format=torch.channels_last)).flip(2)
        return x + y.permute(0, 2, 3, 1).view(x.shape[0], -1, 8).transpose(1, 2).reshape(x.shape)


class Of(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator, no-any-return]


def rotated(x: Tensor) -> Tensor:
    t = tokens(x)
    z = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    angles = torch.arange(t.shape[1], dtype=x.dtype)[:, None] * torch.ones(4, dtype=x.dtype)
    z = z * torch.polar(torch.ones_like(angles), angles)
    return (z @ z.transpose(1, 2)).abs().softmax(-1) @ t


def grouped(x: Tensor) -> Tensor:
    q, k = tokens(x).unflatten(-1, (4, 2)), tokens(x)[..., :4].unflatten(-1, (2, 2))
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, k)), enable_gqa=True)


def padded(mode: str) -> Of:
    """Rows around the rows, for a convolution with another number of rows, of which all are read."""
    return Of(lambda x: x * F.conv2d(F.pad(x, [1, 2, 1, 1], mode), x.new_ones(8, 8, 4, 4)).mean((2, 3), keepdim=True))


def padded_video(x: Tensor) -> Tensor:
    """Of 4 frames, with the rows between other dimensions that are padded."""
    frames = F.pad(x.unflatten(1, (2, 4)), [1, 1, 2, 1, 1, 1], "reflect")
    return x * F.conv3d(frames, x.new_ones(1, 2, 2, 5, 3)).mean((2, 3)).mean(-1)[..., None, None]


def among_others(x: Tensor) -> Tensor:
    """Rows written between what belongs to none."""
    joint = x.new_zeros(len(x), x.shape[2] * x.shape[3] + 5, 8)
    joint[0, :3] = joint[1, -2:] = torch.arange(8.0, dtype=x.dtype)
    joint[:, 3:-2] = tokens(x)
    return (joint * joint.cos())[:, 3:-2]


def longer(x: Tensor) -> Tensor:
    """Tokens between others, all of one value."""
    joint = F.pad(tokens(x), [0, 0, 1, 2], value=0.5)
    return torch.cat([joint * joint.cos(), F.pad(tokens(x), [0, 0, 1, 0])], 1)[:, 1:]


MODULES = {
    "windows": Swin,
    "multi-head": Written,
    "encoder": Encoder,
    "recurrent": Recurrent,
    "strides": Strides,
    "complex rotary": lambda: Of(rotated),
    "grouped queries": lambda: Of(grouped),
    "frequencies": lambda: Of(lambda x: x + torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[-2:])),
    "causal": lambda: Of(lambda x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x), is_causal=True)),
    "one operand, thrice": lambda: Of(lambda x: F.scaled_dot_product_attention(x, x, x) + x.cummax(2).values),
    "triangle": lambda: Of(lambda x: x + torch.tril(x @ x.transpose(2, 3)).sum(-1, keepdim=True)),
    "sampled": lambda: Of(lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)),
    "padded with zeros": lambda: padded("constant"),
    "padded by reflection": lambda: padded("reflect"),
    "padded by the border": lambda: padded("replicate"),
    "among others": lambda: Of(among_others),
    "longer": lambda: Of(longer),
    "padded video": lambda: Of(padded_video),
    "none of the rows": lambda: Of(lambda x: x + x[:, :, 17:9].sum()),
    "median": lambda: Of(lambda x: torch.where(x > x.median(2, keepdim=True).values, x, x.new_zeros(x.shape))),
}


@pytest.mark.parametrize("name", MODULES)
def test_exact(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name]().double().eval(), torch.randn(2, 8, 20, 8, dtype=torch.float64)
    programs = row_programs(module, {"x": x}, 1, sample={"x": 2})
    count = programs.rows.units.count
    with torch.no_grad():
        wanted = module(x)
    for bounds in ((0.4,), (0.2, 0.5)):
        for found in programs.cut([0, *(round(b * count) for b in bounds), count]).predict(x=x):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()))


def test_what_follows_a_gather_is_cut() -> None:
    """As the rows are where as many come out; in proportion where what was around them is gone."""
    kernel, x = torch.randn(8, 8, 3, 3, dtype=torch.float64), torch.randn(2, 8, 20, 8, dtype=torch.float64)
    framed = Of(lambda x: F.conv2d(F.pad(x, [1, 1, 1, 1], value=0.5), kernel).sin())
    joint = Of(lambda x: F.pad(x, [0, 0, 1, 1]).softmax(2).sin())
    for module, parts in ((framed, ["rows"]), (joint, ["whole", "rows", "whole"])):
        rows = row_programs(module, {"x": x}, 1, sample={"x": 2}).rows
        assert [part.kind for part in rows.states["sin"].parts] == parts


def test_classes_of_rows_are_rows() -> None:
    """As where tokens are classes, and their embedding is a product."""
    x = torch.randn(2, 8, 20, 8, dtype=torch.float64)
    module = Of(lambda x: F.one_hot(x.abs().long().clamp(max=3), 4).to(x.dtype).cumsum(-1)[..., 1].sin())
    programs = row_programs(module, {"x": x}, 1, sample={"x": 2})
    assert not programs.rows.notes
    for found in programs.cut([0, 5, 20]).predict(x=x):
        torch.testing.assert_close(found, module(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 2])
def test_repeats_up_to_a_given_size(dim: int) -> None:
    """Which is no patch's along the rows."""
    x = torch.randn(2, 8, 20, 8, dtype=torch.float64)
    module = Of(lambda x: x.repeat_interleave(2, dim, output_size=2 * x.shape[dim]).sin())
    programs = row_programs(module, {"x": x}, 1, sample={"x": 2})
    assert bool(programs.rows.notes) == (dim == 2)
    for found in programs.cut([0, 5, 20]).predict(x=x):
        torch.testing.assert_close(found, module(x), rtol=1e-10, atol=1e-10)
