"""Frozen work of the next batch: who makes which samples of what, who wants them, and what is sent.

    rank 0: 0F0 0T[0:4]x0:5 0F1 ...      latents 0:5 made here, 4:5 to rank 1
    rank 1: 1F0 0T[0:4]x5:8 1F1 ...      latents 5:8 made here; carried to the next step: what its micro-batches read

A value is moved once to each rank that reads it, in runs of samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxpipe.plan.actions import Action
from fxpipe.plan.schedule import Schedule
from passes.costs.frozen_layers import LayerValue
from passes.step_ops.units import Units

Samples = tuple[int, int]


@dataclass(frozen=True, eq=False)
class AheadPieces:
    """The pieces of a schedule, and who reads the `values` they make: other layers, and the stages of `training`, in
    the step after. `samples` are those of every micro-batch."""

    units: Units
    schedule: Schedule
    training: Schedule
    samples: Sequence[Samples]
    values: Mapping[str, LayerValue]

    @cached_property
    def pieces(self) -> list[list[Action]]:
        """Of every rank, in order."""
        return [[action for action in actions if action.is_piece] for actions in self.schedule.ranks]

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
        """Per rank: the values of micro-batches that its stages read and no action of the step itself makes."""
        found: list[dict[tuple[str, int], None]] = [{} for _ in self.training.ranks]
        within = {(a.stage, a.microbatch) for actions in self.training.ranks for a in actions if a.kind == "T"}
        for rank, actions in enumerate(self.training.ranks):
            for action in actions:
                if action.kind == "F":
                    for name, source in self.units.table["F", action.stage].makers.items():
                        if source[0] == "T" and (source[1], action.microbatch) not in within:
                            found[rank][name, action.microbatch] = None
        return [sorted(keys) for keys in found]

    @cached_property
    def wanted(self) -> list[dict[str, dict[int, None]]]:
        """Per rank: the samples of every value that its own pieces or its stages read, those first read first."""
        found: list[dict[str, dict[int, None]]] = [{} for _ in self.pieces]
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                for name in {name for layer in range(*piece.layers) for name in self.reads(piece.stage, layer)}:
                    found[rank].setdefault(name, {}).update(dict.fromkeys(range(*piece.samples)))
            for name, microbatch in self.kept[rank]:
                found[rank].setdefault(name, {}).update(dict.fromkeys(range(*self.samples[microbatch])))
        return found

    @cached_property
    def _wanting(self) -> dict[tuple[str, int], list[int]]:
        """The ranks that want a sample of a value. One that is the same for every sample: that which is read first."""
        found: dict[tuple[str, int], list[int]] = {}
        for rank, wanted in enumerate(self.wanted):
            for name, samples in wanted.items():
                for sample in samples if self.values[name].batched else (next(iter(samples)),):
                    found.setdefault((name, sample), []).append(rank)
        return found

    def sends(self, rank: int, piece: Action) -> Iterator[tuple[int, str, Samples]]:
        """(rank, value, samples) of what a piece gives to other ranks."""
        start, stop = piece.samples
        for name in (name for layer in range(*piece.layers) for name in self.returns(piece.stage, layer)):
            wanted: dict[int, list[int]] = {}
            for sample in range(start, stop):
                for other in self._wanting.get((name, sample), ()):
                    wanted.setdefault(other, []).append(sample)
            for other in sorted(wanted.keys() - {rank}):
                for run in _runs(wanted[other]) if self.values[name].batched else [(start, stop)]:
                    yield other, name, run


def _runs(samples: Sequence[int]) -> Iterator[Samples]:
    """Neighbouring numbers as (first, last + 1)."""
    breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(samples)) if b != a + 1), len(samples)]
    return ((samples[a], samples[b - 1] + 1) for a, b in pairwise(breaks) if a < b)
