"""How long the results of a patch's operations live, whatever their sizes.

x = conv(h)        x lives until its last reader, which may read it through a view
y = view(x)        y holds nothing of its own
z = gather(y)      what has come is there until the whole is made of it
"""

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from fxpipe.capture import private

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lives:
    """Of a graph's operations in order; `owners` has the captured one that each stands for, or is written for."""

    owners: Mapping[fx.Node, str]

    def held_bytes(
        self, names: Collection[str], sizes: Mapping[fx.Node, int], apart: Mapping[str, int],
        inside: Mapping[fx.Node, int] = MappingProxyType({}),
    ) -> tuple[int, int]:  # fmt: skip
        """Of the operations of these captured ones alone: bytes of the model's tensors that they read, and the most
        that they hold at once, their results and what is `inside` them; the ones `apart` are done elsewhere, and hold
        so many there."""
        own = [owner in names for owner in self.owners.values()]
        weights = {tensor for reader, tensor in self._weights if own[reader]}
        apart = {name: size for name, size in apart.items() if name in names}
        return sum(map(sizes.__getitem__, weights)), self._most(np.array(own, bool), sizes, apart, inside)

    def _most(
        self, own: npt.NDArray[np.bool_], sizes: Mapping[fx.Node, int], apart: Mapping[str, int],
        inside: Mapping[fx.Node, int],
    ) -> int:  # fmt: skip
        of_all = np.fromiter(map(sizes.__getitem__, self.owners), np.int64, len(own))
        makers = own & (self._bases == np.arange(len(own)))
        made, gone = np.where(makers, of_all, 0), np.zeros_like(of_all)
        readers, bases = self._reads
        last = np.zeros_like(of_all)
        np.maximum.at(last, bases[own[readers]], readers[own[readers]])
        np.add.at(gone, last[makers], of_all[makers])
        before = (made - gone).cumsum() + gone - made
        most = before + made * self._times
        for node, size in inside.items():
            most[self._numbers[node]] += size
        for name, size in apart.items():
            first, *rest = self._places[name]
            most[first], most[rest] = before[first] + size, 0
        return int(most[own].max(initial=0))

    @cached_property
    def readers(self) -> frozenset[fx.Node]:
        """Those that read what comes of others."""
        return frozenset(reader for node in self.owners if "exchange" in node.meta for reader in node.users)

    @cached_property
    def _numbers(self) -> dict[fx.Node, int]:
        return {node: place for place, node in enumerate(self.owners)}

    @cached_property
    def _bases(self) -> Ints:
        """Of every operation the one whose memory its result is, its own or what it is a view of; -1 of an input's."""
        found, views = list[int](), dict[object, bool]({operator.getitem: True})
        for place, node in enumerate(self.owners):
            target, operands = node.target, node.all_input_nodes
            if target not in views:
                views[target] = isinstance(target, torch._ops.OpOverload) and private.may_alias(target)
            if views[target] and operands:
                base = self._numbers.get(operands[0])
                found.append(-1 if base is None else found[base])
            else:
                found.append(place)
        return np.array(found, np.int64)

    @cached_property
    def _reads(self) -> tuple[Ints, Ints]:
        """Every place that needs a base, and that: as its own result's, or to read."""

        def needed(place: int, node: fx.Node) -> Iterator[int]:
            yield place
            yield from (self._numbers[operand] for operand in node.all_input_nodes if operand in self._numbers)

        pairs = [(place, one) for place, node in enumerate(self.owners) for one in needed(place, node)]
        readers, read = np.array(pairs, np.int64).reshape(-1, 2).T
        bases = self._bases[read]
        return readers[bases >= 0], bases[bases >= 0]

    @cached_property
    def _weights(self) -> list[tuple[int, fx.Node]]:
        """Every place that reads one of the model's tensors, and that."""
        given = ((place, tensor) for place, node in enumerate(self.owners) for tensor in node.all_input_nodes)
        kinds = ("input", "read")
        return [(p, one) for p, one in given if one.op == "placeholder" and one.meta["kind"] not in kinds]

    @cached_property
    def _times(self) -> Ints:
        """How often what an operation makes is there while it is made."""
        exchanges = (node.meta.get("exchange") for node in self.owners)
        return np.array([1 if one is None or one.kind == "ring" else 2 for one in exchanges], np.int64)

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for place, owner in enumerate(self.owners.values()):
            found.setdefault(owner, []).append(place)
        return found
