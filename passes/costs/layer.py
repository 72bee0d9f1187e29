"""Frozen components as layers: how long one takes on any number of samples, from a few for which that is known.

    points ((1, 0.002), (4, 0.002), (16, 0.008))       1 to 4 samples 2 ms, 10 samples 5 ms, 16 samples 8 ms, 32: 16 ms

More samples never take less time: every filler relies on that, and measurements are made so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

Points = tuple[tuple[int, float], ...]
"""(samples, seconds) of a frozen layer, both rising; what is not known lies on lines through these."""


def layer_points(seconds: Mapping[int, float]) -> Points:
    """Of seconds by sample count; where more samples took less time, the longer time holds."""
    sizes = sorted(seconds)
    return tuple(zip(sizes, accumulate((seconds[n] for n in sizes), max), strict=True))


@lru_cache(maxsize=1 << 10)
def layer_seconds(points: Points, most: int | None, batch_size: int) -> list[float]:
    """Of 0 to `batch_size` samples. Fewer than the first point's take as long as these; beyond the last, the last line
    goes on (a single point: in proportion). More than `most` samples run one part after the other."""
    sizes, times = zip(*points, strict=True)
    whole, last = min(most or batch_size, batch_size), sizes[-1]
    (n0, t0), (n1, t1) = ((0, 0.0), *points)[-2:]
    found = [0.0, *np.interp(np.arange(1, min(whole, last) + 1), sizes, times).tolist()]
    found += [t0 + (t1 - t0) * (n - n0) / (n1 - n0) for n in range(last + 1, whole + 1)]
    found += [n // whole * found[whole] + found[n % whole] for n in range(whole + 1, batch_size + 1)]
    return found


@dataclass(frozen=True)
class FrozenComponent:
    """A frozen module as layers that run one after the other.

    `depends` are the positions of the components whose results it reads, all before its own. `ranks` are those that
    have room for its weights; None: all. Where `whole` its samples can't be taken apart: every layer runs once, on all.
    More than `most` samples, as memory may demand, run one part after the other.
    """

    name: str
    layers: tuple[Points, ...]
    depends: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    whole: bool = False
    most: int | None = None
