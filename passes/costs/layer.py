"""Frozen components as layers: how long one takes on any number of samples, from a few for which that is known.

    points ((1, 0.002), (4, 0.002), (16, 0.008))       1 to 4 samples 2 ms, 10 samples 5 ms, 16 samples 8 ms, 32: 16 ms

More samples never take less time: every filler relies on that, and measurements are made so.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Layer:
    """Seconds of a frozen layer, known at `points` of (samples, seconds).

    In between they are joined by straight lines. Fewer samples than the first point take as long as it; beyond the
    last, the last line goes on (a single point: in proportion). More samples never take less time. More than `most`
    samples, as memory may demand, run one part after the other.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    most: int | None = None

    def __post_init__(self) -> None:
        sizes, times = [n for n, _ in self.points], [t for _, t in self.points]
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise CompileError(f"layer {self.name}: sample counts {sizes} must be positive and rising")
        if self.most is not None and self.most < 1:
            raise CompileError(f"layer {self.name}: most={self.most} samples at once; give at least one")
        if not all(0 <= t < inf for t in times) or any(a > b for a, b in pairwise(times)):
            raise CompileError(
                f"layer {self.name}: seconds {times} must be finite, and not fall as samples are added; "
                "Layer.measured evens out noise"
            )

    @staticmethod
    def measured(name: str, seconds: Mapping[int, float], most: int | None = None) -> "Layer":
        """A layer from seconds by sample count; where more samples took less time, the longer time holds."""
        sizes = sorted(seconds)
        return Layer(name, tuple(zip(sizes, accumulate((seconds[n] for n in sizes), max), strict=True)), most)

    def seconds(self, num_samples: int) -> float:
        """Seconds of one run on `num_samples` samples; zero on none."""
        if num_samples == 0:
            return 0.0
        if self.most is not None and num_samples > self.most:
            times, rest = divmod(num_samples, self.most)
            return times * self.seconds(self.most) + self.seconds(rest)
        if len(self.points) == 1:
            size, time = self.points[0]
            return time * max(1.0, num_samples / size)
        after = max(1, min(bisect_left(self.points, (num_samples, -inf)), len(self.points) - 1))
        (n0, t0), (n1, t1) = self.points[after - 1], self.points[after]
        return t0 + (t1 - t0) * max(0, num_samples - n0) / (n1 - n0)

    def table(self, batch_size: int) -> list[float]:
        """`seconds` of 0 to `batch_size` samples."""
        if self.most is not None and batch_size > self.most:
            return [*self.table(self.most), *map(self.seconds, range(self.most + 1, batch_size + 1))]
        last = self.points[-1][0]
        sizes, times = zip(*self.points, strict=True)
        found: list[float] = np.interp(np.arange(min(batch_size, last) + 1), sizes, times).tolist()
        return [0.0, *found[1:], *map(self.seconds, range(last + 1, batch_size + 1))]


@dataclass(frozen=True)
class FrozenComponent:
    """A frozen module as layers that run one after the other.

    `depends` are the positions of the components whose results it reads, all before its own. `ranks` are those that
    have room for its weights; None: all. Where `whole` its samples can't be taken apart: every layer runs once, on all.
    """

    name: str
    layers: tuple[Layer, ...]
    depends: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    whole: bool = False
