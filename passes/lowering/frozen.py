"""Frozen work of the next batch: pieces of it between a rank's actions, and its results on their way to their readers.

    rank 0: 0F0 0T[0:4]x0:5 0F1 ...             rank 1: 1F0 0T[0:4]x5:8 ...
            latents 0:5  made here                      latents 5:8  made here
            latents 5:8  from rank 1                    latents 4:5  from rank 0
            carried to the next step: latents of the micro-batches that this rank's stages read

A piece runs some layers of a component on some samples. A value is moved once to each rank that reads it, in runs of
samples, and put together there from what was made and what was received.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.actions import Action
from fxpipe.plan.rank_program import Message
from fxpipe.plan.schedule import Schedule
from passes.lowering.borders import Border
from passes.lowering.messages import Layout
from passes.lowering.rank_writer import RankWriter, WholeBatch, carried_name, shape_only
from passes.lowering.sources import BatchSlice
from passes.lowering.step_graphs import Key, StepGraphs
from passes.lowering.units import Value

Carried = tuple[str, int]
"""A value and a micro-batch."""


@dataclass(frozen=True, eq=False)
class FrozenWork:
    """The pieces of a schedule, and who reads what they make: the stages of `training`, in the step after."""

    step: StepGraphs
    schedule: Schedule
    training: Layout

    @cached_property
    def pieces(self) -> list[list[Action]]:
        """Per rank, in order."""
        return [[action for action in actions if action.is_piece] for actions in self.schedule.ranks]

    def border(self, layer: Key, num_samples: int) -> Border:
        return self.step.border(layer, num_samples)

    @cached_property
    def maker(self) -> dict[str, Key]:
        """The layer that returns a value."""
        return {value: key for key, unit in self.step.layer_units.items() for value in unit.returns}

    def reads(self, piece: Action) -> set[str]:
        """What comes into a piece's layers."""
        return {name for layer in self.step.layers_of(piece) for name in self.step.unit(layer).reads}

    @cached_property
    def kept(self) -> list[list[Carried]]:
        """Per rank: the values of micro-batches that its stages read."""
        found: list[dict[Carried, None]] = [{} for _ in self.schedule.ranks]
        for (unit, microbatch), rank in self.training.rank_of.items():
            for name in self.training.units[unit].reads:
                if name in self.maker:
                    found[rank][name, microbatch] = None
        return [sorted(keys) for keys in found]

    def samples_of(self, microbatch: int) -> range:
        start = sum(self.step.sizes[:microbatch])
        return range(start, start + self.step.sizes[microbatch])

    @cached_property
    def wanted(self) -> list[dict[str, dict[int, None]]]:
        """Per rank: the samples of every value that its own pieces or its stages read, those first read first."""
        found: list[dict[str, dict[int, None]]] = [{} for _ in self.pieces]
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                for name in sorted(self.reads(piece) & self.maker.keys()):
                    found[rank].setdefault(name, {}).update(dict.fromkeys(range(*piece.samples)))
            for name, microbatch in self.kept[rank]:
                found[rank].setdefault(name, {}).update(dict.fromkeys(self.samples_of(microbatch)))
        return found

    def sends(self, rank: int, piece: Action) -> Iterator[tuple[int, str, int, int]]:
        """(rank, value, first sample, last sample + 1) of what a piece gives to other ranks."""
        start, stop = piece.samples
        for name in (name for layer in self.step.layers_of(piece) for name in self.step.unit(layer).returns):
            for other, wanted in enumerate(self.wanted):
                if other == rank or name not in wanted:
                    continue
                if self.slices[name] is None:  # the same for every sample: that of the first sample that is read
                    if start <= next(iter(wanted[name])) < stop:
                        yield other, name, start, stop
                    continue
                for first, end in _runs([s for s in range(start, stop) if s in wanted[name]]):
                    yield other, name, first, end

    @property
    def slices(self) -> Mapping[str, BatchSlice | None]:
        return self.step.sources.slices

    def message(self, edge: int, src: int, piece: Action, dst: int, name: str, start: int, stop: int) -> Message:
        value = self.value(name, stop - start)
        return Message(edge, src, dst, piece, name, -1, "conditioning", value.shape, value.dtype, (start, stop))

    def value(self, name: str, num_samples: int) -> Value:
        """Shape and type of so many samples of a value."""
        return next(v for v in self.border(self.maker[name], num_samples).returns if v.name == name)


def _runs(samples: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers as (first, last + 1)."""
    start = None
    for i, sample in enumerate(samples):
        if start is None:
            start = sample
        if i + 1 == len(samples) or samples[i + 1] != sample + 1:
            yield start, sample + 1
            start = None


@dataclass(frozen=True)
class _Segment:
    """Samples of a value on this rank: a node, or a message still to be received."""

    start: int
    stop: int
    source: fx.Node | Message


@dataclass
class FrozenWriter:
    """Writes one rank's pieces into its graph."""

    writer: RankWriter
    work: FrozenWork
    batch: WholeBatch
    _segments: dict[str, list[_Segment]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for message in self.writer.mail.incoming:
            if message.samples is not None:
                self._add(message.value, *message.samples, message)

    def run(self, piece: Action) -> None:
        """Call the piece's layers one after the other, and send what others read."""
        self.writer.begin(str(piece))
        start, stop = piece.samples
        for layer in self.work.step.layers_of(piece):
            border = self.work.border(layer, piece.num_samples)
            args = tuple(self._read(name, start, stop) for name in border.unit.reads)
            forward = self.work.step.graphs(layer, piece.num_samples).forward
            result = self.writer.call_module(f"{border.unit.name}_b{piece.num_samples}", forward, args)
            returns = self.writer.item(result, 0, f"returns_{border.unit.name}_{start}")
            for index, value in enumerate(border.returns):
                node = self.writer.item(returns, index, _name(value.name, start, stop))
                node.meta["val"] = shape_only(value.shape, value.dtype)
                self._add(value.name, start, stop, node)
        for message in self.writer.sends_after(piece):
            assert message.samples is not None
            self.writer.send(message, self._read(message.value, *message.samples, own=True))

    def carries(self) -> dict[str, fx.Node]:
        """What the rank's stages read in the next step."""
        found = {}
        for name, microbatch in self.work.kept[self.writer.rank]:
            samples = self.work.samples_of(microbatch)
            found[carried_name(name, microbatch)] = self._read(name, samples.start, samples.stop, apart=True)
        return found

    def _add(self, name: str, start: int, stop: int, source: fx.Node | Message) -> None:
        self._segments.setdefault(name, []).append(_Segment(start, stop, source))

    def _read(self, name: str, start: int, stop: int, own: bool = False, apart: bool = False) -> fx.Node:
        """Samples of a value: an input's or a draw's, or put together from segments.

        `own`: they were made here; `apart`: in memory of their own, so that it can be freed before other samples'.
        """
        if name not in self.work.maker:
            return self.batch.samples(name, start, stop, _name(name, start, stop))
        segments = sorted(self._segments[name], key=lambda s: (isinstance(s.source, Message), s.start))
        where = self.work.slices[name]
        if where is None:
            return self._node(segments[0])
        parts, now = [], start
        while now < stop:
            segment = next(s for s in segments if s.start <= now < s.stop)
            assert not (own and isinstance(segment.source, Message)), f"{name} is sent on, not made here"
            end = min(stop, segment.stop)
            parts.append(self._part(segment, now, end, where, name))
            now = end
        view = parts[0].target is ops.slice_batch and where.dim == 0 and where.outer == 1
        if len(parts) == 1 and not (apart and view):
            return parts[0]
        label = _name(name, start, stop)
        joined = self.writer.call(ops.cat_batch, (parts, where.dim, where.outer, where.inner), label)
        joined.meta["val"] = self._shape(name, stop - start)
        return joined

    def _part(self, segment: _Segment, start: int, stop: int, where: BatchSlice, name: str) -> fx.Node:
        node = self._node(segment)
        if (start, stop) == (segment.start, segment.stop):
            return node
        place = (start - segment.start, stop - segment.start, segment.stop - segment.start)
        part = self.writer.call(
            ops.slice_batch, (node, where.dim, where.outer, where.inner, *place), _name(name, start, stop)
        )
        part.meta["val"] = self._shape(name, stop - start)
        return part

    def _node(self, segment: _Segment) -> fx.Node:
        return self.writer.receive(segment.source) if isinstance(segment.source, Message) else segment.source

    def _shape(self, name: str, num_samples: int) -> torch.Tensor:
        value = self.work.value(name, num_samples)
        return shape_only(value.shape, value.dtype)


def _name(value: str, start: int, stop: int) -> str:
    return f"{value}_s{start}_{stop}"
