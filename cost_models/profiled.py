"""Seconds as measured: blocks, and layers of frozen components, timed at a few batch sizes, interpolated between.

    block 3       1: 2.1 ms, 4: 6.5 ms     ->   2 samples: 3.6 ms, shared out to its nodes as another model would
    vae 5         1: 0.9 ms, 4: 3.1 ms          so that blocks cut elsewhere have a time too

A profile holds for one graph, device and torch; `fxpipe.profiling` makes it from real stage graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cost_models.timing import device_name
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Key:
    """What a profile holds for: a captured graph by its fingerprint, a device by its name, a version of torch."""

    fingerprint: str
    device: str
    torch: str


@dataclass(frozen=True)
class Entry:
    """Expected seconds of a block, or of a frozen component's layer, at each of `samples`, ascending; no backward:
    zeros. `input_seconds` and `weight_seconds` are those of its two parts, gradients of activations and of weights, run
    apart, which takes longer by some percent; none where it is not cut in two.
    """

    name: str
    nodes: tuple[str, ...]
    samples: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    input_seconds: tuple[float, ...] = ()
    weight_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of adding tensors, counting what is read and written, and of drawing, by operation."""

    moving: float
    drawing: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Profile(CostModel):
    """A cost model from measurements; `base` shares them out to nodes, and tells what was not measured.

    `speeds` are of what rank programs do between stages, `memory_bytes` is that of the device that was timed.
    """

    base: CostModel
    key: Key
    entries: tuple[Entry, ...] = ()
    speeds: Speeds | None = None
    memory_bytes: int | None = None

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        """Those of each entry in the proportions of the base; the base's for nodes in no entry.

        Raises:
            CompileError: the table is of another graph, or torch of another version, than the profile.
        """
        require_key(self.key, Key(table.fingerprint, self.key.device, torch.__version__))
        base, entry_of = self.base.seconds(table, num_samples), self._entry_of(table)

        def measured(name: str) -> Floats:
            lists = [(entry.samples, getattr(entry, name)) for entry in self.entries]
            return np.array([interpolated(*of_entry, num_samples) if of_entry[1] else np.inf for of_entry in lists])

        backward, size = measured("backward_seconds"), len(self.entries) + 1
        part, whole = (np.bincount(entry_of, b, size)[:-1] for b in (base.backward_input, base.backward))
        in_base = np.divide(part, whole, out=np.ones(len(backward)), where=whole > 0)
        cut = measured("input_seconds")
        of_input: Floats = np.where(np.isinf(cut), backward * in_base, np.minimum(cut, backward))
        rest = backward - of_input
        weights = measured("weight_seconds")
        of_weight: Floats = np.where(np.isinf(cut + weights), rest, np.maximum(weights, rest))
        return NodeSeconds(
            _shared_out(base.forward, entry_of, measured("forward_seconds")),
            _shared_out(base.backward_input, entry_of, of_input),
            _shared_out(base.backward_weight, entry_of, of_weight),
            _shared_out(base.backward, entry_of, backward),
        )

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        """As measured."""
        if self.speeds is None:
            return self.base.moving_seconds(bytes_read, bytes_written)
        return (bytes_read + bytes_written) / self.speeds.moving

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        """As measured; the base's where an operation was not timed."""
        speed = dict(self.speeds.drawing).get(target) if self.speeds else None
        return num_bytes / speed if speed else self.base.drawing_seconds(target, num_bytes)

    def _entry_of(self, table: CostTable) -> NDArray[np.intp]:
        """The number of every node's entry; as many as there are entries where it has none."""
        found = np.full(len(table), len(self.entries), dtype=np.intp)
        for number, entry in enumerate(self.entries):
            try:
                found[table.positions(entry.nodes)] = number
            except KeyError as unknown:
                raise CompileError(f"the profile times {unknown}, which the graph does not have") from None
        return found


def _shared_out(weights: Floats, entry_of: NDArray[np.intp], totals: Floats) -> Floats:
    """Every entry's total over its nodes by weight, equally where all weigh nothing; other nodes keep their weight."""
    size = len(totals) + 1
    sums, sizes = np.bincount(entry_of, weights, size), np.bincount(entry_of, minlength=size)
    parts = np.divide(weights, sums[entry_of], out=1 / sizes[entry_of], where=sums[entry_of] > 0)
    return np.where(entry_of < len(totals), np.append(totals, 0.0)[entry_of] * parts, weights)


def key_of(table: CostTable, device: torch.device) -> Key:
    """The key of a captured graph's costs on `device`."""
    return Key(table.fingerprint, device_name(device), torch.__version__)


def require_key(profile: Key, wanted: Key) -> None:
    """Raise CompileError unless a profile of one key holds for the other; names what differs."""
    for name, word in (("fingerprint", "graph"), ("device", "device"), ("torch", "torch version")):
        found, needed = getattr(profile, name), getattr(wanted, name)
        if found != needed:
            raise CompileError(f"the profile is of another {word}, {found}; here it is {needed}: profile again")


def interpolated(samples: Sequence[int], seconds: Sequence[float], num_samples: int) -> float:
    """Piecewise linear; beyond the ends along the nearest piece, never below zero, and for more samples than were timed
    never below the time of these, whichever piece noise has made fall; from one point: proportional."""
    if len(samples) == 1:
        return seconds[0] * num_samples / samples[0]
    inside = [i for i in range(1, len(samples) - 1) if samples[i] < num_samples]
    at = max(inside, default=0)
    slope = (seconds[at + 1] - seconds[at]) / (samples[at + 1] - samples[at])
    return max(seconds[-1] if num_samples > samples[-1] else 0.0, seconds[at] + slope * (num_samples - samples[at]))
