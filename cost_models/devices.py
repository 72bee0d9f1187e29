"""Devices by name, as rooflines; every number with its source.

Peaks are dense: without structured sparsity. float32 is the TF32 peak where there is one: torch's convolutions use it
by default, its matrix products under `torch.set_float32_matmul_precision("high")`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import torch

from cost_models.calibrate import measured
from cost_models.roofline import Roofline
from fxpipe.cluster.links import canonical_device
from fxpipe.errors import CompileError

# Fitted: an A100-80GB at bfloat16 has DiffusionPipe's (Tian et al., MLSys 2024) shares of Stable Diffusion 2.1's frozen
# part, 38, 41, 43 and 44 % at batches of 8, 16, 32, 64, within a percentage point; `benchmarks/calibration.py` prints
# them. The fit leaves open which of them to raise; it was held near what is published: attention's 0.35 near
# FlashAttention's 30 to 50 % forward and 25 to 35 % backward on an A100 (Dao, "FlashAttention-2", 2023, section 1),
# memory's 0.85 near what copies reach on GPUs (Deakin et al., "BabelStream", IJCSE 17, 2018). Launch and ramp are those
# of an eager step under autocast, where an operator is often two kernels, the operator's and a cast's.
_CONVOLUTION, _MATRIX, _ATTENTION, _MEMORY = 0.65, 0.5, 0.35, 0.85
_LAUNCH_SECONDS, _RAMP_SECONDS = 10e-6, 20e-6
# On other GPUs they are assumed: carried over by what a kernel does beside products, such as a softmax. Tensor cores
# are taken to reach this part of their peak at most, as an A100's do in the best matrix products (Dao, section 1: 80 to
# 90 %), and the rest of a kernel's time to be that of its other work, which costs 16 times as much on an A100 (Dao,
# section 3.1) and 3.4 times on an H20, so that an H20 reaches more of its peak. H20 and L20 suggested it: HunyuanVideo
# takes as much of their peaks (`benchmarks/sampling_published.py`). The ratio at half precision stands for all types,
# and no GPU is taken to reach less than an A100.
_PRODUCTS_ALONE, _A100_RATIO = 0.9, 312 / 19.5


def _reached(efficiency: float, ratio: float) -> float:
    """An A100's efficiency on a GPU whose tensor cores compute so many times as fast as the rest of it."""
    other = 1 / efficiency - 1 / _PRODUCTS_ALONE
    return 1 / (1 / _PRODUCTS_ALONE + other * min(ratio / _A100_RATIO, 1.0))


def _gpu(
    *, half: float, single: float, vector: float, double: float, bandwidth: float, gigabytes: int, brain: bool = True
) -> Roofline:
    """Tera-FLOP/s of half (and bfloat16, where the device has it), single, without tensor cores, and double precision;
    GB/s; GB."""
    halves = (torch.float16, torch.bfloat16) if brain else (torch.float16,)
    peaks = {**dict.fromkeys(halves, half * 1e12), torch.float32: single * 1e12, torch.float64: double * 1e12}
    if not brain:
        peaks[torch.bfloat16] = single * 1e12
    return Roofline(
        peak_flops=peaks,
        bandwidth=bandwidth * 1e9,
        matrix_efficiency=_reached(_MATRIX, half / vector),
        memory_efficiency=_MEMORY,
        launch_seconds=_LAUNCH_SECONDS,
        convolution_efficiency=_reached(_CONVOLUTION, half / vector),
        attention_efficiency=_reached(_ATTENTION, half / vector),
        ramp_seconds=_RAMP_SECONDS,
        memory_bytes=gigabytes * 10**9,
    )


DEVICES: Mapping[str, Roofline] = {
    # NVIDIA A100 data sheet, 2021, SXM: 312, 156 (TF32), 19.5, 19.5 (tensor cores); HBM2e, 2,039 GB/s.
    "A100-80GB": _gpu(half=312, single=156, vector=19.5, double=19.5, bandwidth=2039, gigabytes=80),
    # NVIDIA A100 data sheet, 2020, SXM 40 GB: the same peaks; HBM2, 1,555 GB/s.
    "A100-40GB": _gpu(half=312, single=156, vector=19.5, double=19.5, bandwidth=1555, gigabytes=40),
    # NVIDIA H100 data sheet, 2022, SXM: 1,979 and 989 (TF32) with sparsity, half without; 67, 67; 3,350 GB/s.
    "H100": _gpu(half=989.4, single=494.7, vector=67, double=67, bandwidth=3350, gigabytes=80),
    # NVIDIA H200 data sheet, 2024, SXM: the peaks of the H100; HBM3e, 4,800 GB/s, 141 GB.
    "H200": _gpu(half=989.4, single=494.7, vector=67, double=67, bandwidth=4800, gigabytes=141),
    # H20, an H100 with fewer multiprocessors, as its sellers state it, 2023: 148, 74 (TF32), 44, 1; HBM3, 4,000 GB/s.
    "H20": _gpu(half=148, single=74, vector=44, double=1, bandwidth=4000, gigabytes=96),
    # NVIDIA HGX B200 data sheet, 2024, an eighth of it: 4,500 and 2,250 (TF32) with sparsity; 75, 37; 8,000 GB/s,
    # 180 GB.
    "B200": _gpu(half=2250, single=1125, vector=75, double=37, bandwidth=8000, gigabytes=180),
    # NVIDIA V100 data sheet, 2018, SXM2: 125 (tensor cores, float16 only), 15.7, 7.8; 900 GB/s.
    "V100-32GB": _gpu(half=125, single=15.7, vector=15.7, double=7.8, bandwidth=900, gigabytes=32, brain=False),
    "V100-16GB": _gpu(half=125, single=15.7, vector=15.7, double=7.8, bandwidth=900, gigabytes=16, brain=False),
    # NVIDIA A40 data sheet, 2020: 149.7, 74.8 (TF32), 37.4; 696 GB/s. Double precision of this and the devices below,
    # where no other is named, is 1/64 of float32 without tensor cores (GA102, 2021, and Ada, 2022, white papers).
    "A40": _gpu(half=149.7, single=74.8, vector=37.4, double=0.58, bandwidth=696, gigabytes=48),
    # NVIDIA A10 data sheet, 2021: 125, 62.5 (TF32), 31.2; 600 GB/s. A10G data sheet, 2021: 70, 35, 31.5; 600 GB/s.
    "A10": _gpu(half=125, single=62.5, vector=31.2, double=0.49, bandwidth=600, gigabytes=24),
    "A10G": _gpu(half=70, single=35, vector=31.5, double=0.49, bandwidth=600, gigabytes=24),
    # NVIDIA T4 data sheet, 2019: 65 (tensor cores, float16 only), 8.1, 300 GB/s; 1/32 (Turing white paper, 2018).
    "T4": _gpu(half=65, single=8.1, vector=8.1, double=0.25, bandwidth=300, gigabytes=16, brain=False),
    # NVIDIA L40 data sheet, 2022: 181.05, 90.5 (TF32), 90.5; 864 GB/s. L40S data sheet, 2023: 362.05, 183, 91.6; 864.
    "L40": _gpu(half=181.05, single=90.5, vector=90.5, double=1.41, bandwidth=864, gigabytes=48),
    "L40S": _gpu(half=362.05, single=183, vector=91.6, double=1.43, bandwidth=864, gigabytes=48),
    # NVIDIA L20 product brief, 2023: 119.5, 59.8 (TF32 and float32), 864 GB/s, 48 GB.
    "L20": _gpu(half=119.5, single=59.8, vector=59.8, double=0.93, bandwidth=864, gigabytes=48),
    # NVIDIA L4 data sheet, 2023: 242 and 120 (TF32) with sparsity; 30.3, 300 GB/s.
    "L4": _gpu(half=121, single=60, vector=30.3, double=0.47, bandwidth=300, gigabytes=24),
    # NVIDIA RTX A6000 data sheet, 2020: 309.7 with sparsity, TF32 half of it, 38.7; 768 GB/s.
    "RTX-A6000": _gpu(half=154.8, single=77.4, vector=38.7, double=0.60, bandwidth=768, gigabytes=48),
    # NVIDIA RTX 6000 Ada data sheet, 2022: 1,457 of float8 with sparsity, a quarter and an eighth; 91.1, 960 GB/s.
    "RTX-6000-Ada": _gpu(half=364.2, single=182.1, vector=91.1, double=1.42, bandwidth=960, gigabytes=48),
    # NVIDIA GA102 white paper, 2021, appendix A, RTX 3090: 71 (float32 accumulation), 35.6 (TF32), 35.6; 936 GB/s.
    "RTX-3090": _gpu(half=71, single=35.6, vector=35.6, double=0.56, bandwidth=936, gigabytes=24),
    # NVIDIA Ada GPU architecture white paper, 2022, appendix A, RTX 4090: 165.2 (float32 accumulation), 82.6 (TF32),
    # 1.29; 1,008 GB/s, 24 GB.
    "RTX-4090": _gpu(half=165.2, single=82.6, vector=82.6, double=1.29, bandwidth=1008, gigabytes=24),
    # NVIDIA RTX Blackwell white paper, 2025, appendix A, RTX 5090: 209.5 (float32 accumulation), 104.8 (TF32), 1.64;
    # 1,792 GB/s, 32 GB.
    "RTX-5090": _gpu(half=209.5, single=104.8, vector=104.8, double=1.64, bandwidth=1792, gigabytes=32),
    # One core with AVX2: 3 GHz * 8 float32 lanes * 2 FMA ports * 2 FLOPs = 96 GFLOP/s; half that in float64. 10 GB/s is
    # a core's share of two channels of DDR4-2666 (42.7 GB/s by JESD79-4) on a quad core. No half-precision units: as
    # float32. Efficiencies and launch are assumed; "measured" calibrates the machine at hand.
    "CPU": Roofline(
        peak_flops={torch.float32: 96e9, torch.float64: 48e9, torch.bfloat16: 96e9, torch.float16: 96e9},
        bandwidth=10e9,
        matrix_efficiency=0.7,
        memory_efficiency=0.8,
        launch_seconds=5e-6,
    ),
}

MEASURED = "measured"


def device(name: str = "A100-80GB") -> Roofline:
    """The device of that name, spelled freely; `H100@bfloat16` costs a float32 graph as bfloat16.

    "measured" is the machine at hand, calibrated now, in seconds; with the numbers of `told`, as it was then.

    Raises:
        CompileError: there is none; lists them.
    """
    if name.lower().startswith(MEASURED) and "{" in name:
        return _told(name)
    wanted, _, precision = name.partition("@")
    key = MEASURED if wanted.strip().lower() == MEASURED else canonical_device(wanted)
    if key is None:
        known = ", ".join((*DEVICES, MEASURED))
        raise CompileError(f"unknown device {wanted!r}; known are {known}, or make a Roofline of your own")
    found = measured() if key == MEASURED else DEVICES[key]
    return replace(found, compute_dtype=_dtype(precision)) if "@" in name else found


def told(name: str, found: Roofline) -> str:
    """A name that tells `device` all of a measured device, in any process: "measured {"peak_flops": ...}"."""
    return f"{name.partition(' {')[0]} {json.dumps(found.as_dict())}"


def _told(name: str) -> Roofline:
    try:
        return Roofline.from_dict(json.loads(name[name.index("{") :]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CompileError(f"{name!r} does not tell a measured device: {error}; measure it again") from None


def _dtype(name: str) -> torch.dtype:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise CompileError(f"unknown precision {name!r} after '@'; choose one of {', '.join(dtypes)}")
    return dtypes[name]
