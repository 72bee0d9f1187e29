"""What the forward and backward of any run of blocks take in memory, at any number of samples, from the capture alone.

    blocks [4, 8), 9 samples     forward: most 80 MB, keeps 52 MB, returns h_7 of 4 MB
                                 backward: most 61 MB beside that, gives a gradient of h_3 of 4 MB, of weights 12 MB

Kernels of a unit are put together once (`unit_trace`); a number of samples then is a few sums over arrays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxpipe.capture import Capture
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged
from fxpipe.remembered import remembered
from passes.batch import BatchPlan
from passes.costs.call_bytes import BackwardBytes, ForwardBytes, UnitKey
from passes.costs.call_trace import Kernel
from passes.costs.frozen_layers import FrozenLayers
from passes.costs.local import owners_reading, with_local
from passes.costs.operations import Operations
from passes.costs.unit_trace import Tracer, UnitTrace

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Liveness:
    """A graph's kernels in order: the storages born at and let go after each."""

    born: Ints
    born_at: Ints
    gone: Ints
    gone_at: Ints
    length: int

    def most(self, sizes: Ints) -> int:
        """The most during it, beside what was there before."""
        if not self.length:
            return 0
        plus = np.bincount(self.born_at, sizes[self.born], self.length)
        minus = np.bincount(self.gone_at, sizes[self.gone], self.length)
        after = np.cumsum(plus - minus)
        return max(0, int((after + minus).max()))


def liveness(kernels: Sequence[Kernel], counted: set[int], stay: set[int]) -> Liveness:
    """Of kernels; `counted` storages matter, of which `stay` are still there at the end."""
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, kernel in enumerate(kernels):
        for storage in kernel.makes:
            if storage in counted:
                born.setdefault(storage, place)
                last[storage] = place
        for storage in kernel.reads:
            if storage in counted:
                last[storage] = place
    gone = {storage: place for storage, place in last.items() if storage not in stay}
    return Liveness(_ints(born), _ints(born.values()), _ints(gone), _ints(gone.values()), len(kernels))


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


@dataclass(eq=False)
class UnitBytes:
    """A unit's calls as functions of the number of samples."""

    trace: UnitTrace

    @cached_property
    def _lines(self) -> tuple[Ints, Ints]:
        lines = np.array(self.trace.lines, dtype=np.int64).reshape(-1, 2)
        return lines[:, 0], lines[:, 1]

    def sizes(self, num_samples: int) -> Ints:
        constant, each = self._lines
        return constant + each * num_samples

    @cached_property
    def new(self) -> set[int]:
        return {storage for storage, owner in enumerate(self.trace.owner) if owner == "new"}

    @cached_property
    def made_forward(self) -> set[int]:
        return {storage for kernel in self.trace.forward for storage in kernel.makes}

    @cached_property
    def saved(self) -> set[int]:
        """What the backward reads of what the forward made or was given."""
        made = {storage for kernel in self.trace.backward for storage in kernel.makes}
        read = {storage for kernel in self.trace.backward for storage in kernel.reads}
        return {s for s in read - made if self.trace.owner[s] != "state" and not self._is_tangent(s)}

    def _is_tangent(self, storage: int) -> bool:
        return self.trace.argument.get(storage, "").startswith("grad of ")

    @cached_property
    def _names(self) -> dict[int, str]:
        """Names of storages that others hold too: values read or returned."""
        found = dict(self.trace.argument)
        for name, storage in self.trace.returned.items():
            found.setdefault(storage, name)
        return found

    # -- forward

    @cached_property
    def _forward(self) -> Liveness:
        stay = self.saved | set(self.trace.returned.values())
        return liveness(self.trace.forward, self.new, stay)

    @remembered
    def forward(self, num_samples: int) -> ForwardBytes:
        sizes = self.sizes(num_samples)
        named = {s for s in self.saved if s in self._names}
        alone = [s for s in self.saved if s not in named]
        returned = {name: (self._names[s], int(sizes[s])) for name, s in self.trace.returned.items()}
        kept = frozenset(self._names[s] for s in named)
        return ForwardBytes(self._forward.most(sizes), int(sizes[alone].sum()), returned, kept)

    # -- backward

    @cached_property
    def _late(self) -> tuple[list[Kernel], list[Kernel], set[int]]:
        """Kernels for gradients of values, those for weights' alone, and what the latter take of before."""
        wanted, first = set(self.trace.input_gradients.values()), []
        for kernel in reversed(self.trace.backward):
            if not wanted.isdisjoint(kernel.makes):
                wanted.update(kernel.reads)
                first.append(kernel)
        chosen, again = set(map(id, first)), self.trace.again
        rest = [kernel for kernel in self.trace.backward if id(kernel) not in chosen]
        late = _needed([k for k in rest if again.isdisjoint(k.makes)], set(self.trace.weight_gradients))
        made_late = {storage for kernel in late for storage in kernel.makes}
        kept = {storage for kernel in late for storage in kernel.reads} - made_late
        kept |= set(self.trace.weight_gradients) - made_late
        first = first[::-1] + _needed([k for k in rest if not again.isdisjoint(k.makes)], kept)
        return first, late, {s for s in kept if self.trace.owner[s] != "state"}

    @remembered
    def _graph(self, part: str, given_up: frozenset[str]) -> Liveness:
        first, late, kept = self._late
        free = {s for s in self.saved if s not in self._names or self._names[s] in given_up}
        made_saved = free & (self.made_forward | set(self.trace.argument))
        kernels = self.trace.backward
        stay = {*self.trace.input_gradients.values(), *self.trace.weight_gradients}
        if part == "I":
            kernels, stay = first, set(self.trace.input_gradients.values()) | kept
        if part == "W":
            kernels, stay, made_saved = late, set(self.trace.weight_gradients), made_saved & kept
            made_saved |= {s for s in kept if s in self.new}
        return liveness(kernels, (self.new - self.saved) | made_saved, stay)

    @remembered
    def backward(self, num_samples: int, part: str, given_up: frozenset[str]) -> BackwardBytes:
        sizes, (_, _, kept) = self.sizes(num_samples), self._late if part != "B" else ([], [], set())
        most = self._graph(part, given_up).most(sizes)
        weights = int(sizes[self.trace.weight_gradients].sum())
        if part == "W":
            return BackwardBytes(most, weight_gradients=weights)
        gradients = {
            name: (self.trace.argument.get(s, f"grad {s}"), int(sizes[s]))
            for name, s in self.trace.input_gradients.items()
        }
        if part == "B":
            return BackwardBytes(most, gradients, weights)
        named = frozenset(self._names[s] for s in kept if s in self._names)
        saved = [s for s in kept if s in self.saved and s not in self._names]
        ends = set(self.trace.input_gradients.values())
        made = [s for s in kept if s in self.new and s not in self.saved and s not in ends]
        return BackwardBytes(most, gradients, 0, int(sizes[made].sum()), int(sizes[saved].sum()), named)


def _needed(kernels: Sequence[Kernel], wanted: set[int]) -> list[Kernel]:
    """The kernels that something wanted depends on."""
    found, wanted = [], set(wanted)
    for kernel in reversed(kernels):
        if not wanted.isdisjoint(kernel.makes):
            wanted.update(kernel.reads)
            found.append(kernel)
    return found[::-1]


class StageBytes:
    """The calls of any placement of a captured step; `of` gives those of one."""

    def __init__(
        self, capture: Capture, batch: BatchPlan, graph: BlockGraph, frozen: FrozenLayers, device: torch.device
    ) -> None:
        self.capture, self.graph, self.frozen = capture, graph, frozen
        self._operations = [Operations(capture, device, one_sample) for one_sample in (False, True)]
        self._whole = set(batch.whole_batch)
        self._given = [capture.nodes[name] for name in batch.whole_batch]
        self._owned = {name: name for name in graph.owners}
        self._readers: dict[fx.Node, set[str]] = {}
        self._known: dict[tuple[object, ...], UnitBytes] = {}

    def of(self, staged: Staged) -> "PlacedBytes":
        return PlacedBytes(self, staged)

    def unit(
        self, key: tuple[object, ...], num_samples: int, names: Sequence[str], runs: Sequence[Sequence[str]] = ()
    ) -> UnitBytes:
        """The unit of these nodes and the local ones they need, to be asked for so many samples; `key` is its own."""
        one_sample = num_samples == 1 and bool(self.capture.batch)
        key = *key, one_sample
        if key not in self._known:
            wanted, own = with_local(self.capture, names, self.graph.local, self._whole), set(names)
            nodes = [self.capture.nodes[name] for name in wanted]
            local = {node.name for node in nodes} - own
            returns = [n.name for n in nodes if n.name in own and self._is_read(n, own | local)]
            if self.capture.result.name in own:
                returns.append(self.capture.result.name)
            returns += [sink.name for sink in self.capture.outputs.values() if sink.name in own]
            self._known[key] = UnitBytes(Tracer(self._operations[one_sample], nodes, returns, runs, local).trace())
        return self._known[key]

    def _is_read(self, node: fx.Node, own: set[str]) -> bool:
        """Whether others read a value."""
        if node.name in self._whole or not isinstance(node.meta["val"], torch.Tensor):
            return False
        if node not in self._readers:
            self._readers[node] = owners_reading([node], self._owned, self._given)
        return not self._readers[node] <= own


@dataclass(frozen=True, eq=False)
class PlacedBytes:
    """The calls of one placement."""

    step: StageBytes
    staged: Staged

    @remembered
    def _unit(self, unit: UnitKey, num_samples: int) -> UnitBytes:
        graph = self.step.graph
        if unit[0] == "T":
            return self.step.unit(unit, num_samples, graph.components[unit[1]].nodes)
        blocks, runs = self.staged.blocks(unit[1]), self.staged.recomputed(unit[1])
        names = [name for block in blocks for name in graph.blocks[block].nodes]
        again = [[name for block in range(*run) for name in graph.blocks[block].nodes] for run in runs]
        return self.step.unit(("F", blocks, runs), num_samples, names, again)

    def forward(self, unit: UnitKey, num_samples: int) -> ForwardBytes:
        return self._unit(unit, num_samples).forward(num_samples)

    def backward(self, unit: UnitKey, num_samples: int, part: str, given_up: frozenset[str]) -> BackwardBytes:
        return self._unit(unit, num_samples).backward(num_samples, part, given_up)

    def layers(self, component: int, layers: tuple[int, int], num_samples: int) -> int:
        names = [name for layer in self.step.frozen.nodes[component][slice(*layers)] for name in layer]
        return self.step.unit(("T", component, layers), num_samples, names).forward(num_samples).most
