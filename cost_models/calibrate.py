"""The machine at hand as a roofline, from a few timed kernels: seconds, not minutes.

    matrix product 1024      ->  peak per type                    convolution, attention  ->  their part of it
    copy of 64 MiB           ->  bandwidth                        add of one number       ->  launch
    matrix product 64, 128   ->  ramp

The peak of float32 is what the fastest of products, convolutions and attention reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from cost_models.roofline import Roofline
from cost_models.timing import device_bytes, now

_REPEATS = 7  # of which the fastest counts: on a busy core a quarter of all were 20 % slower than the best of seven
_LAUNCHES = 200  # in one timing: of a single one, a tenth is reading the clock
_SMALL_PRODUCTS = 20  # in one timing, as they take little more than a launch


@dataclass(frozen=True)
class _Sizes:
    """Of what is timed; `product` and `small_products` are rows and columns of square matrices."""

    product: int
    small_products: tuple[int, int]
    num_copied: int
    images: tuple[int, int, int, int]
    heads: tuple[int, int, int, int]


# A GPU's are those of a U-Net at 512 x 512: large enough to fill one, a fraction of a second in all.
_GPU = _Sizes(8192, (512, 1024), 2**28, images=(16, 320, 64, 64), heads=(16, 10, 1024, 64))
# A core's take milliseconds. The copy is of 64 MiB: of 4 MiB it measured the caches, 100 GB/s where memory gave 1.5.
_CPU = _Sizes(1024, (64, 128), 2**24, images=(2, 64, 32, 32), heads=(2, 4, 256, 64))


@cache
def measured(device: str | None = None) -> Roofline:
    """Time kernels on `device`: the first GPU, or where there is none the CPU with torch's number of threads."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = where.type == "cuda"
    sizes = _GPU if gpu else _CPU
    launch = _seconds(lambda x: x + 1, torch.zeros(1, device=where), batch=_LAUNCHES)
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if gpu else (torch.float32, torch.float64)
    rates = {dtype: _product_rate(sizes.product, dtype, where) for dtype in types}
    if not gpu:  # half precision: as float32, on most CPUs it is slower
        rates |= dict.fromkeys((torch.float16, torch.bfloat16), rates[torch.float32])
    product = rates[torch.float32]
    convolution, attention = _convolution_rate(sizes.images, where), _attention_rate(sizes.heads, where)
    peak = max(product, convolution, attention)
    return Roofline(
        peak_flops={dtype: rate * peak / product for dtype, rate in rates.items()},
        bandwidth=_copy_rate(sizes.num_copied, where),
        matrix_efficiency=product / peak,
        memory_efficiency=1.0,
        launch_seconds=launch,
        convolution_efficiency=convolution / peak,
        attention_efficiency=attention / peak,
        ramp_seconds=_ramp(sizes.small_products, product, launch, where),
        memory_bytes=device_bytes(where),
    )


def _product_rate(size: int, dtype: torch.dtype, where: torch.device) -> float:
    x = torch.ones(size, size, dtype=dtype, device=where)
    return float(2 * size**3 / _seconds(lambda x: x @ x, x))


def _copy_rate(num_floats: int, where: torch.device) -> float:
    x = torch.ones(num_floats, device=where)
    return 2 * x.nbytes / _seconds(lambda x: -x, x)


def _convolution_rate(shape: tuple[int, int, int, int], where: torch.device) -> float:
    """Of 3 x 3 kernels that keep the number of channels; `shape` is batch, channels, height, width."""
    x, channels = torch.ones(shape, device=where), shape[1]
    weight = torch.ones(channels, channels, 3, 3, device=where)
    return 2 * x.numel() * weight[0].numel() / _seconds(lambda x: F.conv2d(x, weight, padding=1), x)


def _attention_rate(shape: tuple[int, int, int, int], where: torch.device) -> float:
    """`shape` is batch, heads, length, width of a head."""
    x = torch.ones(shape, device=where)
    return 4 * x.numel() * shape[2] / _seconds(lambda x: F.scaled_dot_product_attention(x, x, x), x)


def _ramp(sizes: tuple[int, int], peak: float, launch: float, where: torch.device) -> float:
    """What a small product takes beyond its FLOPs and the launch; the mean of two sizes."""
    lost = []
    for size in sizes:
        x = torch.ones(size, size, device=where)
        taken = _seconds(lambda x: x @ x, x, batch=_SMALL_PRODUCTS)
        lost.append(max(0.0, taken - launch - 2 * size**3 / peak))
    return sum(lost) / len(lost)


def _seconds(run: Callable[[Tensor], Tensor], x: Tensor, batch: int = 1) -> float:
    """The shortest of a few timings of `batch` calls, per call: what the machine can do when left alone."""
    found = []
    with torch.no_grad():
        for _ in range(_REPEATS):
            started = now(x.device)
            for _ in range(batch):
                run(x)
            found.append((now(x.device) - started) / batch)
    return min(found)
