"""A device as two ceilings and a launch time: a kernel takes as long as its FLOPs or its bytes, whichever is longer.

Method: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxpipe.costs import NodeCost, evaluate
from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Roofline:
    """Seconds from FLOPs and bytes; implements `fxpipe.costs.CostModel`.

    `peak_flops` is FLOP/s, one number or one per dtype; `bandwidth` is bytes/s of the device's memory. The efficiencies
    are the reachable parts of the two; `launch_seconds` is added per kernel, so views cost nothing.
    """

    peak_flops: float | Mapping[torch.dtype, float]
    bandwidth: float
    matrix_efficiency: float
    memory_efficiency: float
    launch_seconds: float

    def __post_init__(self) -> None:
        peaks = [self.peak_flops] if isinstance(self.peak_flops, (int, float)) else list(self.peak_flops.values())
        if not peaks or min(*peaks, self.bandwidth) <= 0:
            raise CompileError(f"peak_flops {self.peak_flops} and bandwidth {self.bandwidth} must be positive")
        for name, value in (("matrix", self.matrix_efficiency), ("memory", self.memory_efficiency)):
            if not 0 < value <= 1:
                raise CompileError(f"{name}_efficiency is a part of the peak, above 0 and up to 1; got {value}")
        if self.launch_seconds < 0:
            raise CompileError(f"launch_seconds must not be negative; got {self.launch_seconds}")

    def forward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds of the forward on `num_samples` samples."""
        num_bytes = evaluate(cost.bytes_read, num_samples) + evaluate(cost.bytes_written, num_samples)
        return self._seconds(evaluate(cost.forward_flops, num_samples), num_bytes, cost.dtype)

    def backward_input_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds to compute the gradients of the activations."""
        flops, num_bytes = cost.backward_input_flops, cost.backward_input_bytes
        return self._seconds(evaluate(flops, num_samples), evaluate(num_bytes, num_samples), cost.dtype)

    def backward_weight_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds to compute the gradients of the parameters."""
        flops, num_bytes = cost.backward_weight_flops, cost.backward_weight_bytes
        return self._seconds(evaluate(flops, num_samples), evaluate(num_bytes, num_samples), cost.dtype)

    def backward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds of both parts of the backward, one after the other."""
        return self.backward_input_seconds(cost, num_samples) + self.backward_weight_seconds(cost, num_samples)

    def _seconds(self, flops: int, num_bytes: int, dtype: torch.dtype | None) -> float:
        if flops == 0 and num_bytes == 0:
            return 0.0
        compute = flops / (self._peak(dtype) * self.matrix_efficiency)
        return max(compute, num_bytes / (self.bandwidth * self.memory_efficiency)) + self.launch_seconds

    def _peak(self, dtype: torch.dtype | None) -> float:
        """The peak for a dtype; the lowest one where the table does not know it."""
        if isinstance(self.peak_flops, (int, float)):
            return self.peak_flops
        lowest = min(self.peak_flops.values())
        return lowest if dtype is None else self.peak_flops.get(dtype, lowest)


# NVIDIA A100 80 GB SXM data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf, 2021): dense tensor-core peaks
# and 2,039 GB/s of HBM2e. float32 is the TF32 peak: torch's convolutions use it by default, its matrix products under
# torch.set_float32_matmul_precision("high").
A100 = Roofline(
    peak_flops={torch.float16: 312e12, torch.bfloat16: 312e12, torch.float32: 156e12, torch.float64: 19.5e12},
    bandwidth=2039e9,
    matrix_efficiency=0.6,  # assumed, not measured: about what large products of half precision reach
    memory_efficiency=0.8,  # assumed, not measured: about what a copy kernel reaches
    launch_seconds=5e-6,  # assumed, not measured: the order of one eager CUDA kernel launch
)

# One core with AVX2: 3 GHz * 8 float32 lanes * 2 FMA ports * 2 FLOPs = 96 GFLOP/s; half that in float64. 10 GB/s is a
# core's share of two channels of DDR4-2666 (42.7 GB/s by JESD79-4) on a quad core. No half-precision units: as float32.
CPU = Roofline(
    peak_flops={torch.float32: 96e9, torch.float64: 48e9, torch.bfloat16: 96e9, torch.float16: 96e9},
    bandwidth=10e9,
    matrix_efficiency=0.7,  # assumed, not measured
    memory_efficiency=0.8,  # assumed, not measured
    launch_seconds=5e-6,  # assumed, not measured: the order of one eager operator's dispatch
)

DEVICES: Mapping[str, Roofline] = {"A100-80GB": A100, "CPU": CPU}


def device(name: str = "A100-80GB") -> Roofline:
    """The preset of that name.

    Raises:
        CompileError: there is none; lists them.
    """
    if name not in DEVICES:
        raise CompileError(f"unknown device {name!r}; known are {', '.join(DEVICES)}, or make a Roofline of your own")
    return DEVICES[name]
