"""How long the results of a patch's operations live, whatever their sizes.

x = conv(h)        x lives until its last reader, which may read it through a view
y = view(x)        y holds nothing of its own
z = gather(y)      what has come is there until the whole is made of it
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from fxpipe.capture import private

Ints = npt.NDArray[np.int64]


class Exchanged(NamedTuple):
    """Of an exchange the captured operation and its place, where what has come is first read, and until where there is
    what is told, which packing copies where it is a view."""

    owner: str
    place: int
    read: int
    told_until: int
    is_view: bool


@dataclass(frozen=True, eq=False)
class Lives:
    """Of a graph's operations in order; `owners` has the captured one that each stands for, or is written for."""

    owners: Mapping[fx.Node, str]

    def held_bytes(
        self, names: Collection[str], sizes: Mapping[fx.Node, int], apart: Mapping[str, int],
        inside: Mapping[fx.Node, int] = MappingProxyType({}), known: Collection[str] = (),
        come: Iterable[str] = (), kept: Iterable[str] = (),
    ) -> tuple[int, int]:  # fmt: skip
        """Of the operations of these captured ones alone: bytes of the model's tensors that they read, and the most
        that they hold at once, their results and what is `inside` them; the ones `apart` are done elsewhere, and hold
        so many there. What is `known` before is counted elsewhere; values that `come` of others are there from the
        beginning, those `kept` to the end."""
        own = np.array([owner in names for owner in self.owners.values()], bool)
        weights = {tensor for reader, tensor in self._weights if own[reader]}
        if known:
            own = np.array([owner in names and owner not in known for owner in self.owners.values()], bool)
        apart = {name: size for name, size in apart.items() if name in names}
        most, last, nodes = self.levels(sizes, apart, inside, own), self._last_reads(own), [*self.owners]
        for place in (self._named[name] for name in come if name in self._named):
            if (base := self._bases[place]) >= 0:
                most[: last[base] + 1] += sizes[nodes[place]]
        for base in {int(self._bases[self._named[name]]) for name in kept if name in self._named}:
            if base >= 0 and own[base]:
                most[last[base] + 1 :] += sizes[nodes[base]]
        return sum(map(sizes.__getitem__, weights)), int(most[own].max(initial=0))

    def levels(
        self, sizes: Mapping[fx.Node, int], apart: Mapping[str, int], inside: Mapping[fx.Node, int],
        own: npt.NDArray[np.bool_] | None = None, of_before: bool = False,
    ) -> Ints:  # fmt: skip
        """Bytes at every operation, of its `own` ones, or of all; `of_before`: what others tell is there before the
        step, and no more of it is made than what is read, where that is."""
        count = len(self.owners)
        own = np.ones(count, bool) if own is None else own
        of_all = np.fromiter(map(sizes.__getitem__, self.owners), np.int64, count)
        makers = own & (self._bases == np.arange(count))
        made, gone = np.zeros_like(of_all), np.zeros_like(of_all)
        last = self._last_reads(own)
        np.add.at(made, (self._read_first if of_before else np.arange(count))[makers], of_all[makers])
        np.add.at(gone, last[makers], of_all[makers])
        before = (made - gone).cumsum() + gone - made
        most = before + made
        for place, node, told in [] if of_before else self._comes:
            most[place] += own[place] * (sizes[node] - (sizes[told] if told else 0))
        for node, size in inside.items():
            most[self._numbers[node]] += size
        for name, size in apart.items():
            first, *rest = self._places[name]
            most[first], most[rest] = before[first] + size, 0
        return most

    def _last_reads(self, own: npt.NDArray[np.bool_]) -> Ints:
        """Of every operation's result where one of its `own` reads it last."""
        readers, bases = self._reads
        last = np.zeros(len(own), np.int64)
        np.maximum.at(last, bases[own[readers]], readers[own[readers]])
        return last

    def place(self, owner: str) -> int:
        """Where what is done for a captured operation begins."""
        return self._places[owner][0]

    @cached_property
    def exchanges(self) -> list["Exchanged"]:
        last, found = self._last_reads(np.ones(len(self.owners), bool)), []
        for place, node in enumerate(self.owners):
            if "exchange" in node.meta:
                told = self._numbers.get(node.all_input_nodes[0], -1)
                base = self._bases[told] if told >= 0 else -1
                until = int(last[base]) if base >= 0 else len(last)
                found.append(Exchanged(self.owners[node], place, int(self._read_first[place]), until, base != told))
        return found

    @cached_property
    def _read_first(self) -> Ints:
        """Of every exchange where it is first read, of other operations their own places."""
        found = np.arange(len(self.owners))
        for place, node in enumerate(self.owners):
            if "exchange" in node.meta:
                found[place] = min((self._numbers[user] for user in node.users if user in self._numbers), default=place)
        return found

    @cached_property
    def readers(self) -> frozenset[fx.Node]:
        """Those that read what comes of others."""
        return frozenset(reader for node in self.exchanging for reader in node.users)

    @cached_property
    def exchanging(self) -> list[fx.Node]:
        return [node for node in self.owners if "exchange" in node.meta]

    @cached_property
    def _named(self) -> dict[str, int]:
        return {node.name: place for place, node in enumerate(self.owners)}

    @cached_property
    def _numbers(self) -> dict[fx.Node, int]:
        return {node: place for place, node in enumerate(self.owners)}

    @cached_property
    def _bases(self) -> Ints:
        """Of every operation the one whose memory its result is, its own or what it is a view of; -1 of an input's."""
        found = list[int]()
        for place, node in enumerate(self.owners):
            if _is_view(node.target) and node.all_input_nodes:
                base = self._numbers.get(node.all_input_nodes[0])
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
    def _comes(self) -> list[tuple[int, fx.Node, fx.Node | None]]:
        """Of every exchange whose parts are there while its result is made: its place, itself, and what is one's own of
        it, where that is a part."""
        kinds = {node: node.meta["exchange"].kind for node in self.owners if "exchange" in node.meta}
        of_rows = ("gather", "halo", "prediction")
        return [
            (self._numbers[node], node, node.all_input_nodes[0] if kind in of_rows else None)
            for node, kind in kinds.items()
            if kind != "ring"
        ]

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for place, owner in enumerate(self.owners.values()):
            found.setdefault(owner, []).append(place)
        return found


def shown(node: fx.Node) -> fx.Node:
    """The node whose memory a value is, which may be a view of it."""
    while _is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


@cache
def _is_view(target: object) -> bool:
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and private.may_alias(target))
