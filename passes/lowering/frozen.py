"""Frozen work of the next batch: pieces of it between a rank's actions, and its results on their way to their readers.

    rank 0: 0F0 0T[0:4]x0:5 0F1 ...             rank 1: 1F0 0T[0:4]x5:8 ...
            latents 0:5  made here                      latents 5:8  made here
            latents 5:8  from rank 1                    latents 4:5  from rank 0
            carried to the next step: latents of the micro-batches that this rank's stages read

A piece runs some layers of a component on some samples. A value is moved once to each rank that reads it, in runs of
samples, and put together there from what was made and what was received.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.actions import Action
from fxpipe.plan.plan import microbatch_samples
from fxpipe.plan.rank_program import Message
from fxpipe.plan.schedule import Schedule
from passes.batch.layout import BatchLayout
from passes.lowering.rank_writer import RankWriter, WholeBatch, carried_name, shape_only
from passes.lowering.step_graphs import Key, StepGraphs
from passes.lowering.units import Value
from passes.step_ops.ahead import AheadPieces


@dataclass(frozen=True, eq=False)
class FrozenWork:
    """The pieces of a schedule, and who reads what they make."""

    step: StepGraphs
    ahead: AheadPieces

    @staticmethod
    def of(step: StepGraphs, schedule: Schedule, training: Schedule) -> "FrozenWork":
        """For the stages of `training`, in the step after."""
        samples = microbatch_samples(step.sizes)
        return FrozenWork(step, AheadPieces(step.crossing, schedule, training, samples, step.layer_values))

    @cached_property
    def maker(self) -> dict[str, Key]:
        """The layer that returns a value."""
        return {value: key for key, unit in self.step.layer_units.items() for value in unit.returns}

    def reads(self, piece: Action) -> set[str]:
        """What comes into a piece's layers."""
        return {name for layer in self.step.layers_of(piece) for name in self.step.unit(layer).reads}

    def message(self, edge: int, src: int, piece: Action, dst: int, name: str, samples: tuple[int, int]) -> Message:
        value = self.value(name, samples[1] - samples[0])
        return Message(edge, src, dst, piece, name, -1, "conditioning", value.shape, value.dtype, samples)

    def value(self, name: str, num_samples: int) -> Value:
        """Shape and type of so many samples of a value."""
        return next(v for v in self.step.border(self.maker[name], num_samples).returns if v.name == name)


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
        start, stop = piece.samples
        for layer in self.work.step.layers_of(piece):
            border = self.work.step.border(layer, piece.num_samples)
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
        for name, microbatch in self.work.ahead.kept[self.writer.rank]:
            samples = self.work.ahead.samples[microbatch]
            found[carried_name(name, microbatch)] = self._read(name, *samples, apart=True)
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
        where = self.work.step.samples(name)
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

    def _part(self, segment: _Segment, start: int, stop: int, where: BatchLayout, name: str) -> fx.Node:
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
