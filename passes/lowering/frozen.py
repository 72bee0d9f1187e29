"""Frozen work of the next batch: pieces of it between a rank's actions, and its results on their way to their readers.

    rank 0: 0F0 | vae[0:4] x 0:5 | 0F1 ...      rank 1: 1F0 | vae[0:4] x 5:8 | ...
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

from fxpipe import ops
from fxpipe.rank_program import Message
from passes.lowering.messages import Layout
from passes.lowering.rank_writer import BatchSlice, RankWriter, WholeBatch, carried_name, shape_only
from passes.lowering.stage_graphs import StageGraphs
from passes.lowering.units import Value

Key = tuple[str, int]
"""A value and a micro-batch."""


@dataclass(frozen=True)
class Piece:
    """Frozen layers, by number, on samples from `start` to before `stop`, after `position` of the rank's actions."""

    layers: range
    start: int
    stop: int
    position: int
    label: str

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class FrozenWork:
    """Frozen layers and who runs them.

    Args:
        graphs: of every layer, by the numbers of samples it runs on.
        pieces: per rank, in order.
        values: one sample's shape and type of everything the layers return.
    """

    graphs: Sequence[Mapping[int, StageGraphs]]
    pieces: tuple[tuple[Piece, ...], ...]
    layout: Layout
    values: Mapping[str, torch.Tensor]
    slices: Mapping[str, BatchSlice | None]

    @cached_property
    def maker(self) -> dict[str, int]:
        """The layer that returns a value."""
        return {v: i for i, sizes in enumerate(self.graphs) for v in next(iter(sizes.values())).unit.returns}

    def reads(self, layer: int) -> tuple[str, ...]:
        return next(iter(self.graphs[layer].values())).unit.reads

    @cached_property
    def kept(self) -> list[list[Key]]:
        """Per rank: the values of micro-batches that its stages read."""
        found: list[dict[Key, None]] = [{} for _ in self.pieces]
        for (unit, microbatch), rank in sorted(self.layout.rank_of.items()):
            for name in self.layout.graph(unit, microbatch).unit.reads:
                if name in self.maker:
                    found[rank][name, microbatch] = None
        return [sorted(keys) for keys in found]

    def samples_of(self, microbatch: int) -> range:
        start = sum(self.layout.sizes[:microbatch])
        return range(start, start + self.layout.sizes[microbatch])

    @cached_property
    def wanted(self) -> list[dict[str, set[int]]]:
        """Per rank: the samples of every value that its stages or its own pieces read."""
        found: list[dict[str, set[int]]] = [{} for _ in self.pieces]
        for rank, pieces in enumerate(self.pieces):
            for name, microbatch in self.kept[rank]:
                found[rank].setdefault(name, set()).update(self.samples_of(microbatch))
            for piece in pieces:
                for name in {name for layer in piece.layers for name in self.reads(layer)} & self.maker.keys():
                    found[rank].setdefault(name, set()).update(range(piece.start, piece.stop))
        return found

    def sends(self, rank: int, piece: Piece) -> Iterator[tuple[int, str, int, int]]:
        """(rank, value, first sample, last sample + 1) of what a piece gives to other ranks."""
        for name in (name for layer in piece.layers for name in self._returns(layer)):
            for other, wanted in enumerate(self.wanted):
                if other == rank or name not in wanted:
                    continue
                if self.slices[name] is None:  # the same for every sample: the first piece that makes it tells all
                    if piece is self._first_maker(name) and not self._makes(other, name):
                        yield other, name, piece.start, piece.stop
                    continue
                for start, stop in _runs([s for s in range(piece.start, piece.stop) if s in wanted[name]]):
                    yield other, name, start, stop

    def _returns(self, layer: int) -> tuple[str, ...]:
        return next(iter(self.graphs[layer].values())).unit.returns

    def _first_maker(self, name: str) -> Piece:
        layer = self.maker[name]
        return min((p for ps in self.pieces for p in ps if layer in p.layers), key=lambda p: p.start)

    def _makes(self, rank: int, name: str) -> bool:
        return any(self.maker[name] in piece.layers for piece in self.pieces[rank])

    def message(self, edge: int, src: int, dst: int, name: str, start: int, stop: int) -> Message:
        value = self.shape(name, stop - start)
        samples = start, stop
        return Message(edge, src, dst, None, name, -1, "conditioning", tuple(value.shape), value.dtype, samples)

    def shape(self, name: str, num_samples: int) -> torch.Tensor:
        """Shape and type of so many samples of a value."""
        value, where = self.values[name], self.slices[name]
        shape = list(value.shape)
        if where is not None:
            shape[where.dim] *= num_samples
        return shape_only(shape, value.dtype)


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
        for message in self.writer.messages:
            if message.samples is not None and message.dst == self.writer.rank:
                self._add(message.value, *message.samples, message)

    def run(self, piece: Piece, messages: Sequence[Message]) -> None:
        """Call the piece's layers one after the other, and send what others read."""
        self.writer.begin(piece.label)
        for layer in piece.layers:
            graphs = self.work.graphs[layer][piece.num_samples]
            args = tuple(self._read(name, piece.start, piece.stop) for name in graphs.unit.reads)
            result = self.writer.call_module(f"{graphs.unit.name}_b{piece.num_samples}", graphs.forward, args)
            returns = self.writer.item(result, 0, f"returns_{graphs.unit.name}_{piece.start}")
            for index, value in enumerate(graphs.returns):
                node = self.writer.item(returns, index, _name(value.name, piece.start, piece.stop))
                node.meta["val"] = shape_only(value.shape, value.dtype)
                self._add(value.name, piece.start, piece.stop, node)
        for message in messages:
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
        joined.meta["val"] = self.work.shape(name, stop - start)
        return joined

    def _part(self, segment: _Segment, start: int, stop: int, where: BatchSlice, name: str) -> fx.Node:
        node = self._node(segment)
        if (start, stop) == (segment.start, segment.stop):
            return node
        place = (start - segment.start, stop - segment.start, segment.stop - segment.start)
        part = self.writer.call(
            ops.slice_batch, (node, where.dim, where.outer, where.inner, *place), _name(name, start, stop)
        )
        part.meta["val"] = self.work.shape(name, stop - start)
        return part

    def _node(self, segment: _Segment) -> fx.Node:
        return self.writer.receive(segment.source) if isinstance(segment.source, Message) else segment.source


def _name(value: str, start: int, stop: int) -> str:
    return f"{value}_s{start}_{stop}"


def one_sample(value: Value, num_samples: int, where: BatchSlice | None) -> torch.Tensor:
    """Shape and type of one sample of a value that was traced with several."""
    shape = list(value.shape)
    if where is not None:
        shape[where.dim] //= num_samples
    return shape_only(shape, value.dtype)
