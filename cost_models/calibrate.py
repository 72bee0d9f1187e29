"""The machine at hand as a roofline, from a few timed kernels: seconds, not minutes.

    matrix product 1024      ->  peak per type                    convolution, attention  ->  their part of it
    copy of 64 MiB           ->  bandwidth                        add of one number       ->  launch
    matrix product 64, 128   ->  ramp

The peak is what the largest matrix product reaches, so the efficiency of products is 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from cost_models.roofline import Roofline

_REPEATS = 7


@cache
def measured(device: str | None = None) -> Roofline:
    """Time kernels on `device`: the first GPU, or where there is none the CPU with torch's number of threads."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = where.type == "cuda"
    launch = _seconds(lambda x: x + 1, torch.zeros(1, device=where), batch=200)
    size = 8192 if gpu else 1024
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if gpu else (torch.float32, torch.float64)
    peaks = {dtype: _product_rate(size, dtype, where) for dtype in types}
    if not gpu:  # half precision: as float32, on most CPUs it is slower
        peaks |= dict.fromkeys((torch.float16, torch.bfloat16), peaks[torch.float32])
    peak = peaks[torch.float32]
    return Roofline(
        peak_flops=peaks,
        bandwidth=_copy_rate(2**28 if gpu else 2**24, where),
        matrix_efficiency=1.0,
        memory_efficiency=1.0,
        launch_seconds=launch,
        convolution_efficiency=min(1.0, _convolution_rate(gpu, where) / peak),
        attention_efficiency=min(1.0, _attention_rate(gpu, where) / peak),
        ramp_seconds=_ramp(peak, launch, gpu, where),
        memory_bytes=torch.cuda.get_device_properties(where).total_memory if gpu else None,
    )


def _product_rate(size: int, dtype: torch.dtype, where: torch.device) -> float:
    x = torch.ones(size, size, dtype=dtype, device=where)
    return float(2 * size**3 / _seconds(lambda x: x @ x, x))


def _copy_rate(num_floats: int, where: torch.device) -> float:
    x = torch.ones(num_floats, device=where)
    return 8 * num_floats / _seconds(lambda x: -x, x)


def _convolution_rate(gpu: bool, where: torch.device) -> float:
    batch, channels, size = (16, 320, 64) if gpu else (2, 64, 32)
    x = torch.ones(batch, channels, size, size, device=where)
    weight = torch.ones(channels, channels, 3, 3, device=where)
    return 2 * x.numel() * channels * 9 / _seconds(lambda x: F.conv2d(x, weight, padding=1), x)


def _attention_rate(gpu: bool, where: torch.device) -> float:
    batch, heads, length = (16, 10, 1024) if gpu else (2, 4, 256)
    x = torch.ones(batch, heads, length, 64, device=where)
    return 4 * x.numel() * length / _seconds(lambda x: F.scaled_dot_product_attention(x, x, x), x)


def _ramp(peak: float, launch: float, gpu: bool, where: torch.device) -> float:
    """What a small product takes beyond its FLOPs and the launch; the mean of two sizes."""
    lost = []
    for size in (512, 1024) if gpu else (64, 128):
        x = torch.ones(size, size, device=where)
        lost.append(max(0.0, _seconds(lambda x: x @ x, x, batch=20) - launch - 2 * size**3 / peak))
    return sum(lost) / len(lost)


def _seconds(run: Callable[[Tensor], Tensor], x: Tensor, batch: int = 1) -> float:
    """The shortest of a few timings of `batch` calls, per call: what the machine can do when left alone."""
    found = []
    with torch.no_grad():
        for _ in range(_REPEATS):
            _wait(x.device)
            started = time.perf_counter()
            for _ in range(batch):
                run(x)
            _wait(x.device)
            found.append((time.perf_counter() - started) / batch)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
