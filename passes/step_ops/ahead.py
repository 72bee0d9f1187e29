"""Frozen work of the next batch: who makes which samples of what, who wants them, and what is sent.

    rank 0: 0F0 0T[0:4]x0:5 0F1 ...      latents 0:5 made here, 4:5 to rank 1
    rank 1: 1F0 0T[0:4]x5:8 1F1 ...      latents 5:8 made here; carried to the next step: what its micro-batches read

As rank programs do it (`passes.lowering.frozen`): a value is moved once to each rank that reads it, in runs of samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxpipe.plan.actions import Action
from fxpipe.plan.schedule import Schedule
from passes.costs.frozen_layers import LayerValue
from passes.step_ops.units import Units

Samples = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Ahead:
    """The pieces of a schedule, and the values they make; `samples` are those of every micro-batch."""

    units: Units
    schedule: Schedule
    samples: Sequence[Samples]

    @cached_property
    def pieces(self) -> list[list[Action]]:
        """Of every rank, in order."""
        return [[action for action in actions if action.is_piece] for actions in self.schedule.ranks]

    @cached_property
    def values(self) -> dict[str, LayerValue]:
        """What layers return to other layers, or to stages, by name."""
        return {value.name: value for value in self.units.case.frozen.values}

    @cached_property
    def _returns(self) -> dict[tuple[int, int], list[str]]:
        found: dict[tuple[int, int], list[str]] = {}
        for value in self.values.values():
            found.setdefault(value.maker, []).append(value.name)
        return found

    @cached_property
    def _reads(self) -> dict[tuple[int, int], list[str]]:
        found: dict[tuple[int, int], list[str]] = {}
        for value in self.values.values():
            for reader in value.readers:
                found.setdefault(reader, []).append(value.name)
        return found

    def returns(self, component: int, layer: int) -> Sequence[str]:
        return self._returns.get((component, layer), ())

    def reads(self, component: int, layer: int) -> Sequence[str]:
        return self._reads.get((component, layer), ())

    @cached_property
    def kept(self) -> list[list[tuple[str, int]]]:
        """Per rank: the values of micro-batches that its stages read and no action of this step makes."""
        found: list[dict[tuple[str, int], None]] = [{} for _ in self.schedule.ranks]
        within = {(a.stage, a.microbatch) for actions in self.schedule.ranks for a in actions if a.kind == "T"}
        for rank, actions in enumerate(self.schedule.ranks):
            for action in actions:
                if action.kind == "F":
                    for name, source in self.units.table["F", action.stage].makers.items():
                        if source[0] == "T" and (source[1], action.microbatch) not in within:
                            found[rank][name, action.microbatch] = None
        return [sorted(keys) for keys in found]

    @cached_property
    def wanted(self) -> list[dict[str, set[int]]]:
        """Per rank: the samples of every value that its stages or its own pieces read."""
        found: list[dict[str, set[int]]] = [{} for _ in self.schedule.ranks]
        for rank, pieces in enumerate(self.pieces):
            for name, microbatch in self.kept[rank]:
                found[rank].setdefault(name, set()).update(range(*self.samples[microbatch]))
            for piece in pieces:
                for name in {name for layer in range(*piece.layers) for name in self.reads(piece.stage, layer)}:
                    found[rank].setdefault(name, set()).update(range(*piece.samples))
        return found

    @cached_property
    def _wanting(self) -> dict[str, list[int]]:
        """The ranks that want some of a value."""
        found: dict[str, list[int]] = {}
        for rank, wanted in enumerate(self.wanted):
            for name in wanted:
                found.setdefault(name, []).append(rank)
        return found

    def sends(self, rank: int, piece: Action) -> Iterator[tuple[int, int, str, str, int, Samples]]:
        """(rank, bytes, kind, value, no micro-batch, samples) of what a piece gives to other ranks."""
        for layer in range(*piece.layers):
            for name in self.returns(piece.stage, layer):
                for other in self._wanting.get(name, ()):
                    if other != rank:
                        yield from self._runs(piece, self.values[name], other)

    def _runs(self, piece: Action, value: LayerValue, other: int) -> Iterator[tuple[int, int, str, str, int, Samples]]:
        if not value.batched:  # the same for every sample: the first piece that makes it tells all
            if piece is self._first_maker(value) and not self._makes(other, value):
                yield other, value.num_bytes(1), "conditioning", value.name, -1, (piece.samples[0], piece.samples[1])
            return
        wanted = self.wanted[other][value.name]
        for start, stop in runs([sample for sample in range(*piece.samples) if sample in wanted]):
            yield other, value.num_bytes(stop - start), "conditioning", value.name, -1, (start, stop)

    def _first_maker(self, value: LayerValue) -> Action:
        return min(
            (p for pieces in self.pieces for p in pieces if _contains(p, value.maker)), key=lambda p: p.samples[0]
        )

    def _makes(self, rank: int, value: LayerValue) -> bool:
        return any(_contains(piece, value.maker) for piece in self.pieces[rank])


def _contains(piece: Action, layer: tuple[int, int]) -> bool:
    return piece.stage == layer[0] and piece.layers[0] <= layer[1] < piece.layers[1]


def runs(samples: Sequence[int]) -> Iterator[Samples]:
    """Neighbouring numbers as (first, last + 1)."""
    breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(samples)) if b != a + 1), len(samples)]
    return ((samples[a], samples[b - 1] + 1) for a, b in pairwise(breaks) if a < b)
