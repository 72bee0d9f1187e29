"""A device as ceilings and a launch time: a kernel takes as long as its FLOPs or its bytes, whichever is longer.

    work = max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))
    seconds = work + ramp + launch              the rate reached: work / (work + ramp) of the full one

Method: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. Small kernels reach less: half the full rate where
the work takes as long as the ramp, the n_1/2 of Hockney and Jesshope, "Parallel Computers 2", 1988, section 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import fx

from fxpipe.costs import Kind, NodeCost, evaluate
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable, PartSeconds, SecondsAt
from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Roofline:
    """Seconds from FLOPs and bytes; implements `fxpipe.costs.CostModel` and `fxpipe.costs.table.TableCostModel`.

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

    def forward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds of the forward on `num_samples` samples."""
        num_bytes = evaluate(cost.bytes_read, num_samples) + evaluate(cost.bytes_written, num_samples)
        return self._seconds(evaluate(cost.forward_flops, num_samples), num_bytes, cost)

    def backward_input_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds to compute the gradients of the activations."""
        flops, num_bytes = cost.backward_input_flops, cost.backward_input_bytes
        return self._seconds(evaluate(flops, num_samples), evaluate(num_bytes, num_samples), cost)

    def backward_weight_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds to compute the gradients of the parameters."""
        flops, num_bytes = cost.backward_weight_flops, cost.backward_weight_bytes
        return self._seconds(evaluate(flops, num_samples), evaluate(num_bytes, num_samples), cost)

    def backward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds of both parts of the backward, one after the other."""
        return self.backward_input_seconds(cost, num_samples) + self.backward_weight_seconds(cost, num_samples)

    def of_table(self, graph: fx.Graph, table: CostTable) -> SecondsAt:
        """The seconds of all nodes of a table at once: those of the methods above."""
        computed = [self._computed(dtype) for dtype, _ in table.groups]
        kinds = [kind for _, kind in table.groups]
        rates = [self._peak(dtype) * self._efficiency(kind) for (dtype, _), kind in zip(computed, kinds, strict=True)]
        rate, scale = (np.array(of)[table.group] for of in (rates, [scale for _, scale in computed]))

        def seconds(flops: Floats, num_bytes: Floats) -> Floats:
            work = np.maximum(flops / rate, num_bytes * scale / (self.bandwidth * self.memory_efficiency))
            return np.where((flops > 0) | (num_bytes > 0), work + self.ramp_seconds + self.launch_seconds, 0.0)

        def at(num_samples: int) -> PartSeconds:
            counts = table.counts(num_samples)
            return PartSeconds(
                seconds(counts["forward_flops"], counts["bytes_read"] + counts["bytes_written"]),
                seconds(counts["backward_input_flops"], counts["backward_input_bytes"]),
                seconds(counts["backward_weight_flops"], counts["backward_weight_bytes"]),
            )

        return at

    def _seconds(self, flops: int, num_bytes: int, cost: NodeCost) -> float:
        if flops == 0 and num_bytes == 0:
            return 0.0
        dtype, scale = self._computed(cost.dtype)
        rate = self._peak(dtype) * self._efficiency(cost.kind)
        work = max(flops / rate, num_bytes * scale / (self.bandwidth * self.memory_efficiency))
        return work + self.ramp_seconds + self.launch_seconds

    def _computed(self, dtype: torch.dtype | None) -> tuple[torch.dtype | None, float]:
        """The type that is computed in, and what becomes of a byte of the graph."""
        narrow = self.compute_dtype
        if narrow is None or (dtype is not None and (not dtype.is_floating_point or dtype.itemsize <= narrow.itemsize)):
            return dtype, 1.0
        return narrow, 1.0 if dtype is None else narrow.itemsize / dtype.itemsize

    def _efficiency(self, kind: Kind | None) -> float:
        given = {"convolution": self.convolution_efficiency, "attention": self.attention_efficiency}.get(kind or "")
        return self.matrix_efficiency if given is None else given

    def _peak(self, dtype: torch.dtype | None) -> float:
        """The peak for a dtype; the lowest one where the table does not know it."""
        if isinstance(self.peak_flops, (int, float)):
            return self.peak_flops
        lowest = min(self.peak_flops.values())
        return lowest if dtype is None else self.peak_flops.get(dtype, lowest)
