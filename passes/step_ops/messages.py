"""Every value and gradient that crosses ranks in a step, in the one order that both ends of a channel use.

    rank 0: 0F0 0F1 0B0 0B1          channel 0 -> 1:  h[0] main, h[1] main
    rank 1: 1F0 1B0 1F1 1B1    ->    channel 1 -> 0:  h[0] gradient, h[1] gradient

A value goes once to each rank that reads it; the gradients
that a rank's stages give to a value are summed there and go back once, from the last of those stages' backwards.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from fxpipe.plan.actions import Action
from fxpipe.plan.block_graph import EdgeKind
from fxpipe.plan.schedule import Schedule
from passes.costs.call_bytes import UnitKey
from passes.step_ops.units import Units


class PlannedMessage(NamedTuple):
    """One value on its way from rank to rank; `edge` is its id, `microbatch` -1 where it belongs to none."""

    edge: int
    src: int
    dst: int
    num_bytes: int
    kind: str
    value: str
    microbatch: int = -1
    samples: tuple[int, int] | None = None

    @property
    def channel(self) -> tuple[int, int]:
        return self.src, self.dst

    def __str__(self) -> str:
        part = f"[{self.microbatch}]" if self.microbatch >= 0 else ""
        if self.samples is not None:
            part = f" of next samples {self.samples[0]}:{self.samples[1]}"
        return f"{self.value}{part} {self.kind}"


class Routes:
    """Who runs what, and so what each action sends: (target, value, kind of message)."""

    def __init__(self, units: Units, schedule: Schedule) -> None:
        self.units = units
        self.rank_of: dict[tuple[str, int, int], int] = {}  # unit and micro-batch -> rank
        self._backward: dict[tuple[int, int], tuple[int, int]] = {}  # stage, micro-batch -> rank, place of B or I
        for rank, actions in enumerate(schedule.ranks):
            for place, action in enumerate(actions):
                if action.kind in "FT":
                    self.rank_of[action.kind, action.stage, action.microbatch] = rank
                elif action.kind in "BI":
                    self._backward[action.stage, action.microbatch] = rank, place

    @cached_property
    def _kinds(self) -> Mapping[tuple[str, UnitKey], EdgeKind]:
        found: dict[tuple[str, UnitKey], EdgeKind] = {}
        for wanted in ("conditioning", "skip", "main"):
            for edge in self.units.step.graph.edges:
                for consumer, kind in zip(edge.consumers, edge.kinds, strict=True):
                    if kind == wanted:
                        of_frozen = isinstance(edge.producer, str)
                        found[edge.name, self.units.unit_of(consumer)] = "conditioning" if of_frozen else kind
        return found

    def sends(self, rank: int, place: int, action: Action) -> Iterator[tuple[int, str, str]]:
        """What a rank sends right after its action at `place`."""
        if action.kind in "FT" and not action.is_piece:
            return self._values(rank, action)
        return self._gradients(rank, place, action) if action.kind in "BI" else iter(())

    def _values(self, rank: int, action: Action) -> Iterator[tuple[int, str, str]]:
        for value, readers in self.units.table[action.kind, action.stage].readers.items():
            kinds: dict[int, str] = {}
            for unit in readers:
                other = self.rank_of.get((*unit, action.microbatch), rank)
                if other != rank:
                    kinds.setdefault(other, self._kinds.get((value, unit), "main"))
            for other in sorted(kinds):
                yield other, value, kinds[other]

    def _gradients(self, rank: int, place: int, action: Action) -> Iterator[tuple[int, str, str]]:
        microbatch, unit = action.microbatch, self.units.table["F", action.stage]
        for value, source in unit.makers.items():
            if source[0] != "F" or not self.units.returns_gradient(value):
                continue
            maker = self.rank_of[(*source, microbatch)]
            if maker != rank and not self._is_pending(rank, place, source, value, microbatch):
                yield maker, value, "gradient"

    def _is_pending(self, rank: int, place: int, source: UnitKey, value: str, microbatch: int) -> bool:
        """Whether another of the rank's stages will add to a value's gradient."""
        readers = self.units.table[source].readers[value]
        if len(readers) == 1:
            return False
        others = (self._backward.get((reader[1], microbatch), (-1, -1)) for reader in readers)
        return any(other == rank and later > place for other, later in others)
