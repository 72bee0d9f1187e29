"""Seconds of what ranks of a grid tell each other at once: every group of samples, and every copy, does the same."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from fxpipe.cluster import Cluster
from fxpipe.cluster.network import Routed, route
from fxpipe.plan.sample_grid import Grid
from fxpipe.remembered import remembered
from passes.sampling.work import SentBytes, Told


class Busy(NamedTuple):
    """Seconds in which links are busy, the latency after them, and those that the busiest rank loses: to the messages,
    and to their bytes alone."""

    seconds: float
    latency: float
    taken: float
    taken_by_bytes: float

    @property
    def until_there(self) -> float:
        return self.seconds + self.latency


class Links:
    """A cluster's links, as a grid's ranks use them."""

    def __init__(self, cluster: Cluster, grid: Grid, shares: Sequence[float] = ()) -> None:
        """Of what is told of one group's patches, those of every group send these `shares`; all as much by default."""
        self.cluster, self.grid, self.shares = cluster, grid, shares or [1.0] * grid.groups
        self._told: dict[tuple[int, int], tuple[SentBytes, Busy]] = {}

    def of_patches(self, told: Told, column: int) -> Busy:
        """An exchange of a column's patches."""
        key = column, id(told.sent)  # exchanges alike have one and the same; kept here, it stays the only one of its id
        if key not in self._told:
            transfers = (
                (self.grid.rank(group, column, src), self.grid.rank(group, column, dst), size * share)
                for group, share in enumerate(self.shares)
                for src, dst, size in told.sent
            )
            self._told[key] = told.sent, self._at_once(transfers)
        return self._told[key][1]

    @cached_property
    def are_bus(self) -> bool:
        """Whether all messages of a copy pass one port."""
        ports = {route(self.cluster, a, b)[1] for a, b in pairwise(range(self.grid.of_copy))}
        return len(ports) == 1 and len(*ports) == 1

    def of_channels(self, told: Told, column: int) -> list[tuple[str, float, int]]:
        """An exchange by the channels that share buckets, to the next patches or to others, moments apart: their share
        of its seconds, and bytes of the largest message."""
        sizes: dict[str, list[int]] = {}
        for source, target, size in told.sent:
            near = "near" if abs(source - target) == 1 else "far"
            sizes.setdefault("moments" if told.kind == "moments" else near, []).append(size)
        each = self.of_patches(told, column).seconds / sum(map(sum, sizes.values()))
        return [(channels, each * sum(own), max(own)) for channels, own in sizes.items()]

    def to_columns(self, column: int, others: Sequence[int], num_bytes: int) -> Busy:
        """A value of every patch from a column to others."""
        groups, patches, rank = range(self.grid.groups), range(self.grid.patches), self.grid.rank
        return self._at_once(
            (rank(group, column, patch), rank(group, other, patch), num_bytes)
            for group in groups
            for patch in patches
            for other in others
        )

    def to_all(self, column: int, num_bytes: int, watching: int = 0) -> Busy:
        """A prediction from every patch of a column, of every group, to all other ranks, and those that watch."""
        groups, patches = range(self.grid.groups), range(self.grid.patches)
        sources = [self.grid.rank(group, column, patch) for group in groups for patch in patches]
        ranks = range(self.grid.of_copy + watching)
        return self._at_once((src, dst, num_bytes) for src in sources for dst in ranks if src != dst)

    def to_watching(self, num_bytes: int, watching: int) -> Busy:
        """A whole prediction from the first rank to those that watch."""
        first = self.grid.world_size
        return self._busy(tuple((0, dst, num_bytes) for dst in range(first, first + watching)))

    def of_groups(self, sizes: Sequence[int]) -> list[float]:
        """Until every group's prediction of so many bytes is at all others, where all are told at once."""
        groups, rank = range(self.grid.groups), self.grid.rank
        places = [*product(range(self.grid.stages), range(self.grid.patches))]
        told = [(a, b, place) for a in groups for b in groups if a != b for place in places]
        sent = [(rank(a, *place), rank(b, *place), sizes[a]) for a, b, place in told]
        if len(set(sizes)) == 1:  # all end at once
            return [self._at_once(sent).until_there] * len(sizes)
        ends = self.cluster.concurrent_seconds(sent)
        return [max(end for end, (source, *_) in zip(ends, told, strict=True) if source == group) for group in groups]

    def overhead_seconds(self, num_messages: float) -> float:
        """Those that a rank loses to so many messages of patches, whatever their bytes."""
        last = self.grid.rank(0, 0, self.grid.patches - 1)
        return num_messages * route(self.cluster, 0, last)[0].overhead_seconds if last else 0.0

    def _at_once(self, transfers: Iterable[Routed]) -> Busy:
        firsts = range(0, self.grid.world_size, self.grid.of_copy)
        return self._busy(tuple((at + a, at + b, size) for a, b, size in transfers if size for at in firsts))

    @remembered
    def _busy(self, sent: tuple[Routed, ...]) -> Busy:
        latency = max((route(self.cluster, a, b)[0].latency_seconds for a, b, _ in sent), default=0.0)
        seconds = max(self.cluster.concurrent_seconds(sent), default=latency) - latency
        taken, overhead = Counter[int](), Counter[int]()
        for src, dst, size in sent:
            taken.update(dict.fromkeys((src, dst), self.cluster.taken_seconds(src, dst, size)))
            overhead.update(dict.fromkeys((src, dst), route(self.cluster, src, dst)[0].overhead_seconds))
        by_bytes = (taken[rank] - overhead[rank] for rank in taken)
        return Busy(seconds, latency, max(taken.values(), default=0.0), max(by_bytes, default=0.0))
