"""What the tuner foretells of a candidate: its stages, a first estimate, a simulation, and whether it fits into memory.

candidate      4 x 2 ranks, wave over 4 stages, 8 micro-batches
estimated      stages placed; seconds by a formula              thousands a second
simulated      seconds in its order; bytes on every rank        tens a second
within room    frozen weights on some ranks only, stages cut by memory
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.errors import CompileError
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from passes.estimate import BlockTimes, first_estimate, simulated_step
from passes.placement.frozen_ranks import frozen_ranks
from passes.placement.place import TWO_PER_RANK, place
from passes.placement.ports import busiest_port_seconds
from passes.room import Room, ranks_of, saved_bytes, wire_bytes
from passes.tuner.candidates import Candidate, Wishes
from passes.tuner.within_memory import homes, stage_memory

_TRUSTED = 1.25  # a bound this much above the best first estimate rules a candidate out
_MOST_CUT = 32  # partitions within memory, of candidates that do not fit as they are


@dataclass(frozen=True)
class _Shares:
    """Of a backbone's time for a micro-batch: per sample, and the shares of the first blocks, of the first two, ..."""

    sample_seconds: float
    first: tuple[float, ...]

    @staticmethod
    def of(times: BlockTimes) -> "_Shares":
        sums = tuple(accumulate(times.total))
        return _Shares(sums[-1] / times.num_samples, tuple(each / sums[-1] if sums[-1] else 0.0 for each in sums))

    def are_near(self, other: "_Shares", stages: int) -> bool:
        """Whether no stage's time would differ by more than 3 % of the mean, nor compute against links by 10 %."""
        slower = abs(self.sample_seconds - other.sample_seconds) <= 0.1 * self.sample_seconds
        return slower and max(abs(a - b) for a, b in zip(self.first, other.first, strict=True)) * stages < 0.015


class Predictions:
    """What all candidates share; placements are kept, since many candidates differ in their order only."""

    def __init__(self, graph: BlockGraph, costs: BlockCosts, cluster: Cluster, wishes: Wishes) -> None:
        self._graph, self._costs, self._cluster, self._wishes = graph, costs, cluster, wishes
        self._room = Room(costs, wishes.batch_size, wishes.filled)
        self._placed: dict[tuple[object, ...], list[tuple[_Shares, Staged]]] = {}
        self._ports: dict[tuple[object, ...], float] = {}
        self.num_cut = 0
        self._steps: dict[tuple[Staged, int], tuple[float, Schedule]] = {}

    def estimated(self, waiting: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Those with a first estimate, the best first, and those that their bound rules out."""
        best = inf
        found: list[Candidate] = []
        for position, candidate in enumerate(waiting):
            if candidate.bound_seconds > _TRUSTED * best:
                return sorted(found, key=lambda c: c.likely_seconds), waiting[position:]
            estimated = self._first_estimate(candidate)
            if not candidate.shape.hard and estimated.placed.collocated:
                continue  # free skips that all stay on their ranks: the hard placement
            found.append(estimated)
            if self._could_fit(found[-1]):
                best = min(best, found[-1].likely_seconds)
        return sorted(found, key=lambda c: c.likely_seconds), []

    def simulated(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate, and where it does not fit, or the user wants it, recomputed; what cannot fit is no more than
        told so."""
        if not self._could_fit(candidate):
            yield replace(candidate, peak_bytes=self.needs(candidate))
            return
        plain = None
        if not self._wishes.recompute:
            plain = self._within_room(self._simulated(candidate))
            yield plain
        if self._wishes.recompute or (plain and (plain.placed.frozen_ranks or not self.fits(plain))):
            yield from self.recomputed(candidate)

    def recomputed(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with every stage recomputed, if it is not yet and may be."""
        if not candidate.shape.recompute and self._wishes.recompute is not False:
            again = replace(candidate, shape=replace(candidate.shape, recompute=True))
            yield self._within_room(self._simulated(self._first_estimate(again)))

    def fits(self, candidate: Candidate) -> bool:
        assert candidate.peak_bytes is not None
        limit = self._wishes.memory_limit_bytes
        return limit is None or candidate.peak_bytes <= limit

    def _first_estimate(self, candidate: Candidate) -> Candidate:
        times = BlockTimes.of(self._costs, self._num_samples(candidate))
        staged = self._place(candidate, times)
        seconds = first_estimate(self._graph, times, staged, candidate.microbatches, *self._setting)
        seconds = max(seconds, self._port_seconds(staged))
        return replace(candidate, staged=staged, estimated_seconds=max(seconds, candidate.bound_seconds))

    def _simulated(self, candidate: Candidate) -> Candidate:
        num_samples, staged = self._num_samples(candidate), candidate.placed
        seconds, schedule = self._estimated(candidate)
        return replace(
            candidate,
            seconds=max(seconds, self._port_seconds(staged)),
            peak_bytes=max(self._room.peak_bytes(staged, schedule, num_samples)),
            wire_bytes=wire_bytes(self._graph, self._costs, staged, self._wishes.batch_size),
        )

    def _within_room(self, candidate: Candidate) -> Candidate:
        """A simulated candidate; one that does not fit with frozen weights on those ranks only that have room for them,
        or with stages cut by memory, as it is where neither helps."""
        limit = self._wishes.memory_limit_bytes
        if limit is None or self.fits(candidate):
            return candidate
        peaks = self._peaks_without_frozen_weights(candidate)
        if sum(peaks) + sum(self._costs.component_bytes) > limit * len(peaks):
            return candidate  # too much for all ranks together
        for tried in (candidate, *self._cut_by_memory(candidate, limit)):
            found = self._with_frozen_ranks(tried, limit)
            if found is not None and self.fits(found):
                return found
        return candidate

    def _peaks_without_frozen_weights(self, candidate: Candidate) -> list[int]:
        return self._room.peak_bytes(
            self._nowhere(candidate.placed), self._estimated(candidate)[1], self._num_samples(candidate)
        )

    def _with_frozen_ranks(self, candidate: Candidate, limit: int) -> Candidate | None:
        """None where some component's weights have room on no rank."""
        num_samples, staged = self._num_samples(candidate), candidate.placed
        room = [limit - peak for peak in self._peaks_without_frozen_weights(candidate)]
        seconds = BlockTimes.of(self._costs, num_samples).components
        places = frozen_ranks(room, self._costs.component_bytes, seconds)
        if places is None:
            return None
        alike = [staged.alike(rank) for rank in ranks_of(staged, self._estimated(candidate)[1])]
        ranks = tuple(tuple(sorted(rank for p in of_component for rank in alike[p])) for of_component in places)
        if all(len(of_component) == staged.world_size for of_component in ranks):
            ranks = ()
        return self._simulated(replace(candidate, staged=replace(staged, frozen_ranks=ranks)))

    def _cut_by_memory(self, candidate: Candidate, limit: int) -> Iterator[Candidate]:
        """The candidate with the best stages that fit, for several places of frozen weights."""
        if not candidate.shape.is_cut_by_memory:
            return
        num_samples, staged, schedule = self._num_samples(candidate), candidate.placed, self._estimated(candidate)[1]
        times = BlockTimes.of(self._costs, num_samples)
        for frozen in homes(staged, self._costs.component_bytes, ranks_of(staged, schedule)):
            home = replace(staged, frozen_ranks=frozen)
            memory = stage_memory(self._room, home, schedule, num_samples, limit)
            if memory is None or self.num_cut >= _MOST_CUT:
                continue
            self.num_cut += 1
            try:
                cut = place(self._graph, self._costs, times, candidate.shape, self._cluster, memory=memory)
            except CompileError:
                continue  # nothing fits
            yield replace(candidate, staged=cut)

    def _estimated(self, candidate: Candidate) -> tuple[float, Schedule]:
        """Seconds of a step, and its order."""
        key = candidate.placed, candidate.microbatches
        if key not in self._steps:
            times = BlockTimes.of(self._costs, self._num_samples(candidate))
            found = simulated_step(self._graph, times, candidate.placed, candidate.microbatches, *self._setting)
            self._steps = {key: found}  # the last one is enough
        return self._steps[key]

    def _place(self, candidate: Candidate, times: BlockTimes) -> Staged:
        """The stages of a shape depend on its places, their links, and how blocks share the time: they are the same for
        all sizes of micro-batches that share it alike."""
        shape = candidate.shape
        kind = "fold" if shape.is_folded else shape.schedule if shape.schedule in TWO_PER_RANK else "line"
        uneven = candidate.microbatches if shape.is_uneven else 0
        key = (kind, shape.stages, shape.hard, shape.pipelines, uneven)
        shares = _Shares.of(times)
        alike = self._placed.setdefault(key, [])
        known = next((staged for other, staged in alike if shares.are_near(other, shape.stages)), None)
        if known is None:
            known = place(self._graph, self._costs, times, shape, self._cluster, candidate.microbatches)
            alike.append((shares, known))
        if shape.is_uneven:
            return known
        recompute = frozenset(range(shape.stages)) if shape.recompute else frozenset[int]()
        return replace(known, schedule=shape.schedule, stage_ranks=shape.stage_ranks, recompute=recompute)

    def _could_fit(self, candidate: Candidate) -> bool:
        """Whether one micro-batch at a time would fit, recomputed where that is allowed."""
        limit = self._wishes.memory_limit_bytes
        if limit is None:
            return True
        if candidate.shape.is_cut_by_memory:  # elsewhere, where it is too much here
            least = self._least_bytes(candidate)
            return sum(least) + sum(self._costs.component_bytes) <= limit * len(least)
        return self.needs(candidate) <= limit

    def needs(self, candidate: Candidate) -> int:
        """Bytes on the fullest rank, or on the average one where frozen weights make that more; as stages are now."""
        least = self._least_bytes(candidate)
        return max(*least, -(-(sum(least) + sum(self._costs.component_bytes)) // len(least)))

    def _least_bytes(self, candidate: Candidate) -> list[int]:
        """Of every place, with one micro-batch at a time, the thriftier of recomputed and not where both are allowed;
        without frozen weights, which may be on other ranks."""
        num_samples, wanted = self._num_samples(candidate), self._wishes.recompute
        plain = replace(candidate.placed, recompute=frozenset())
        again = replace(plain, recompute=frozenset(range(plain.num_stages)))
        ways = [plain] * (wanted is not True) + [again] * (wanted is not False)
        places = candidate.shape.place_of_stage
        of_place = [[s for s, p in enumerate(places) if p == place] for place in range(candidate.shape.places)]
        found = [self._bytes_of_one(self._nowhere(way), of_place, num_samples) for way in ways]
        return [min(of_ways) for of_ways in zip(*found, strict=True)]

    def _bytes_of_one(self, staged: Staged, of_place: Sequence[Sequence[int]], num_samples: int) -> list[int]:
        """With one micro-batch, of ranks with these stages."""
        saved, room = saved_bytes(self._costs, staged, num_samples), self._room
        return [
            room.held_bytes(staged, 0, stages)
            + room.temporary_bytes(staged, stages, num_samples)
            + sum(saved[s] for s in stages)
            for stages in of_place
        ]

    def _nowhere(self, staged: Staged) -> Staged:
        """Without frozen weights."""
        return replace(staged, frozen_ranks=((),) * len(self._costs.component_bytes))

    def _port_seconds(self, staged: Staged) -> float:
        batch_size, gradients = self._wishes.batch_size, self._costs.trained_bytes
        key = staged.boundaries, staged.stage_ranks
        if key not in self._ports:
            self._ports[key] = busiest_port_seconds(self._graph, staged, batch_size, self._cluster, gradients)
        return self._ports[key]

    @property
    def _setting(self) -> tuple[Cluster, tuple[int, ...], bool]:
        """What estimates depend on besides the placement."""
        return self._cluster, self._costs.trained_bytes, self._wishes.filled

    def _num_samples(self, candidate: Candidate) -> int:
        return -(-self._wishes.batch_size // candidate.microbatches)
