"""Which bytes go from where to where in a pipeline, before they are messages.

    direct     0F0 -> 1F0 main      0F0 -> 3F0 skip        3B0 -> 0B0 gradient
    relayed    0F0 -> 1F0 main + skip, 1F0 -> 2F0 main + skip, ...; gradients the same way back

What leaves one point for one other point travels together. A value goes once to each rank that reads it, at the first
action there that does; a rank gives its gradient back once, from the last.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.block_graph import Edge
from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged
from passes.rehearsal.case import Case, spans
from passes.rehearsal.pieces import Piece

Point = tuple[int, str, int]
"""A rank, one of "action", "piece" and "end", and the place among its kind."""


@dataclass
class Flows:
    """Bytes by (from, to, kind), and seconds that adding the gradients of values takes, by where that is done."""

    case: Case
    staged: Staged
    schedule: Schedule
    sizes: Sequence[int]
    relayed: bool = False
    pieces: Sequence[Sequence[Piece]] = ()
    num_bytes: dict[tuple[Point, Point, str], int] = field(default_factory=dict)
    summing_seconds: dict[Point, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._points: dict[Action, Point] = {
            action: (rank, "action", place)
            for rank, actions in enumerate(self.schedule.ranks)
            for place, action in enumerate(actions)
        }
        for microbatch, size in enumerate(self.sizes):
            self._between_stages(microbatch, size)
            self._of_components(microbatch, size)
        self._of_pieces()

    def _add(self, source: Point, target: Point, kind: str, num_bytes: int) -> None:
        if source[0] != target[0] and num_bytes:
            key = source, target, kind
            self.num_bytes[key] = self.num_bytes.get(key, 0) + num_bytes

    def _at(self, kind: str, stage: int, microbatch: int) -> Point:
        """Where an action is; the input gradient of a split backward."""
        action = Action(stage, kind, microbatch)
        return self._points[action if action in self._points or kind != "B" else Action(stage, "I", microbatch)]

    @cached_property
    def _groups(self) -> Mapping[tuple[int, tuple[int, ...], bool], list[Edge]]:
        """The values that stages make for others, by (making stage, reading stages, whether a gradient returns)."""
        found: dict[tuple[int, tuple[int, ...], bool], list[Edge]] = {}
        for edge in self.case.graph.edges:
            if isinstance(edge.producer, int):
                made = self.staged.stage_of_block[edge.producer]
                readers = {self.staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)} - {made}
                if readers:
                    found.setdefault((made, tuple(sorted(readers)), edge.requires_grad), []).append(edge)
        return found

    def _between_stages(self, microbatch: int, size: int) -> None:
        for (made, readers, returns), edges in self._groups.items():
            num_bytes = sum(edge.num_bytes(size) for edge in edges)
            for source, target, back in self._hops(made, readers, microbatch):
                self._add(source, target, "main", num_bytes)
                if returns:
                    self._add(*back, "gradient", num_bytes)
            if returns:
                once = sum(self.case.adding_seconds(edge.num_bytes(size)) for edge in edges)
                for point in self._sums(made, readers, microbatch):
                    self.summing_seconds[point] = self.summing_seconds.get(point, 0.0) + once

    def _hops(
        self, made: int, readers: Sequence[int], microbatch: int
    ) -> Iterator[tuple[Point, Point, tuple[Point, Point]]]:
        """(from, to, (from, to) of the gradient) of every message that one value takes."""
        if self.relayed:
            for stage in range(made, max(readers)):
                forth = self._at("F", stage, microbatch), self._at("F", stage + 1, microbatch)
                yield *forth, (self._at("B", stage + 1, microbatch), self._at("B", stage, microbatch))
            return
        source, back = self._at("F", made, microbatch), self._at("B", made, microbatch)
        for stages in self._by_rank(readers, microbatch):
            first = min((self._at("F", stage, microbatch) for stage in stages), key=_place)
            last = max((self._at("B", stage, microbatch) for stage in stages), key=_place)
            yield source, first, (last, back)

    def _sums(self, made: int, readers: Sequence[int], microbatch: int) -> Iterator[Point]:
        """Where a value's gradients are added, a point for every two that become one."""
        if self.relayed:
            yield from (self._at("B", stage, microbatch) for stage in readers if stage < max(readers))
            return
        ranks = self._by_rank(readers, microbatch)
        for stages in ranks:
            yield from [max((self._at("B", s, microbatch) for s in stages), key=_place)] * (len(stages) - 1)
        yield from [self._at("B", made, microbatch)] * (len(ranks) - 1)

    def _by_rank(self, stages: Sequence[int], microbatch: int) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for stage in stages:
            found.setdefault(self._at("F", stage, microbatch)[0], []).append(stage)
        return list(found.values())

    # -- frozen work

    @cached_property
    def _frozen_edges(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...], Edge]]:
        """(component, reading stages, reading components, value)."""
        numbers = {name: i for i, name in enumerate(self.case.frozen.names)}
        found = []
        for edge in (edge for edge in self.case.graph.edges if isinstance(edge.producer, str)):
            stages = sorted({self.staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)})
            others = sorted(numbers[c] for c in edge.consumers if isinstance(c, str))
            found.append((numbers[str(edge.producer)], tuple(stages), tuple(others), edge))
        return found

    def _of_components(self, microbatch: int, size: int) -> None:
        """What `T` actions make."""
        for component, stages, _, edge in self._frozen_edges:
            source = self._points.get(Action(component, "T", microbatch))
            if source is not None:
                for target in self._readers(stages, microbatch):
                    self._add(source, target, "conditioning", edge.num_bytes(size))

    def _readers(self, stages: Sequence[int], microbatch: int) -> list[Point]:
        """The first action that reads, on every rank where one of these stages' forwards is."""
        first: dict[int, Point] = {}
        for point in (self._at("F", stage, microbatch) for stage in stages):
            first[point[0]] = min(first.get(point[0], point), point, key=_place)
        return list(first.values())

    def _of_pieces(self) -> None:
        """What pieces make goes to the micro-batches of the same samples, and to pieces that go on with them."""
        final = [
            (rank, place, piece)
            for rank, pieces in enumerate(self.pieces)
            for place, piece in enumerate(pieces)
            if piece.is_final(self.case)
        ]
        for component, stages, others, edge in self._frozen_edges:
            for rank, place, piece in (item for item in final if item[2].component == component):
                source = rank, "piece", place
                for microbatch, span in enumerate(spans(tuple(self.sizes))):
                    if count := _common((piece.start, piece.stop), span):
                        for point in self._readers(stages, microbatch):
                            target = (point[0], "end", 0) if piece.ahead else point
                            self._add(source, target, "conditioning", edge.num_bytes(count))
                for other, number, reader in self._starting(others):
                    if count := _common((piece.start, piece.stop), (reader.start, reader.stop)):
                        self._add(source, (other, "piece", number), "conditioning", edge.num_bytes(count))

    def _starting(self, components: Sequence[int]) -> Iterator[tuple[int, int, Piece]]:
        for rank, pieces in enumerate(self.pieces):
            for place, piece in enumerate(pieces):
                if piece.component in components and piece.first_layer == 0:
                    yield rank, place, piece


def _place(point: Point) -> int:
    return point[2]


def _common(first: tuple[int, int], second: tuple[int, int]) -> int:
    """How many samples two spans share."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))
