"""A device as ceilings and a launch time: a kernel takes as long as its FLOPs or its bytes, whichever is longer.

    work = max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))
    seconds = work + ramp + launch              the rate reached: work / (work + ramp) of the full one

Method: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. Small kernels reach less: half the full rate where
the work takes as long as the ramp, the n_1/2 of Hockney and Jesshope, "Parallel Computers 2", 1988, section 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fxpipe.costs import OperationKind
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


@dataclass(frozen=True, kw_only=True)
class Roofline(CostModel):
    """Seconds from FLOPs and bytes.

    `peak_flops` is FLOP/s, one number or one per dtype; `bandwidth` is bytes/s of the device's memory, `memory_bytes`
    its size where known. The efficiencies are the parts of the two that large kernels reach; convolutions and attention
    reach that of matrix products where theirs is left out. Per kernel, `launch_seconds` pass before it starts and
    `ramp_seconds` while it fills and drains the device; views are no kernels and cost nothing.

    `compute_dtype` costs a graph as mixed precision would run it: products of wider types are done in it, and all
    tensors of wider floating types are of its size.
    """

    peak_flops: float | Mapping[torch.dtype, float]
    bandwidth: float
    matrix_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    convolution_efficiency: float | None = None
    attention_efficiency: float | None = None
    ramp_seconds: float = 0.0
    memory_bytes: int | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        peaks = [self.peak_flops] if isinstance(self.peak_flops, (int, float)) else list(self.peak_flops.values())
        if not peaks or min(*peaks, self.bandwidth) <= 0:
            raise CompileError(f"peak_flops {self.peak_flops} and bandwidth {self.bandwidth} must be positive")
        for name in (field.name for field in fields(self) if field.name.endswith("_efficiency")):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise CompileError(f"{name} is a part of the peak, above 0 and up to 1; got {value}")
        for name in ("launch_seconds", "ramp_seconds"):
            if getattr(self, name) < 0:
                raise CompileError(f"{name} must not be negative; got {getattr(self, name)}")
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise CompileError(f"compute_dtype must be a floating type; got {self.compute_dtype}")

    def as_dict(self) -> dict[str, Any]:
        """Numbers and texts alone, for JSON."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.peak_flops, Mapping):
            given["peak_flops"] = {str(dtype): peak for dtype, peak in self.peak_flops.items()}
        return given | {"compute_dtype": self.compute_dtype and str(self.compute_dtype)}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Roofline:
        """What `as_dict` has given."""
        peaks, computed = given["peak_flops"], given["compute_dtype"]
        if isinstance(peaks, Mapping):
            peaks = {_dtype(name): peak for name, peak in peaks.items()}
        return Roofline(**{**given, "peak_flops": peaks, "compute_dtype": computed and _dtype(computed)})

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        """Of every node, whatever graph it is of."""
        computed = [self._computed(dtype) for dtype, _ in table.groups]
        of_groups = [
            (self._peak(dtype) * self._efficiency(kind), scale)
            for (dtype, scale), (_, kind) in zip(computed, table.groups, strict=True)
        ]
        rate, scale = np.array(of_groups, dtype=np.float64).reshape(-1, 2)[table.group].T
        counts = table.counts(num_samples)
        return NodeSeconds(
            self._kernels(counts.forward_flops, (counts.bytes_read + counts.bytes_written) * scale, rate),
            self._kernels(counts.backward_input_flops, counts.backward_input_bytes * scale, rate),
            self._kernels(counts.backward_weight_flops, counts.backward_weight_bytes * scale, rate),
        )

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        """As of a kernel without FLOPs; there are as many of these as gradients, so no table is made of each."""
        num_bytes = np.array(bytes_read + bytes_written, dtype=np.float64)
        return float(self._kernels(np.zeros(()), num_bytes, np.ones(())))

    def chain_seconds(self, moved: Sequence[tuple[int, int]]) -> float:
        """The largest moves its bytes; what the others read is in the cache still, and they cost their launch."""
        if not moved:
            return 0.0
        return self.moving_seconds(*max(moved, key=sum)) + (len(moved) - 1) * self.launch_seconds

    def _kernels(self, flops: Floats, num_bytes: Floats, rate: Floats) -> Floats:
        """Seconds of kernels; `rate` is the FLOP/s that a large one of each kind reaches."""
        work = np.maximum(flops / rate, num_bytes / (self.bandwidth * self.memory_efficiency))
        return np.where((flops > 0) | (num_bytes > 0), work + self.ramp_seconds + self.launch_seconds, 0.0)

    def _computed(self, dtype: torch.dtype | None) -> tuple[torch.dtype | None, float]:
        """The type that is computed in, and what becomes of a byte of the graph."""
        narrow = self.compute_dtype
        if narrow is None or (dtype is not None and (not dtype.is_floating_point or dtype.itemsize <= narrow.itemsize)):
            return dtype, 1.0
        return narrow, 1.0 if dtype is None else narrow.itemsize / dtype.itemsize

    def _efficiency(self, kind: OperationKind | None) -> float:
        given = {"convolution": self.convolution_efficiency, "attention": self.attention_efficiency}.get(kind or "")
        return self.matrix_efficiency if given is None else given

    def _peak(self, dtype: torch.dtype | None) -> float:
        """The peak for a dtype; the lowest one where the table does not know it."""
        if isinstance(self.peak_flops, (int, float)):
            return self.peak_flops
        lowest = min(self.peak_flops.values())
        return lowest if dtype is None else self.peak_flops.get(dtype, lowest)
