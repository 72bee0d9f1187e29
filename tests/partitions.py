"""Judges of waves that share nothing with the passes: by definition, for tests against brute force."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations_with_replacement, pairwise

from hypothesis import strategies as st

from passes.placement.memory import StageMemory

Boundaries = tuple[int, ...]


def wave_ranks(num_ranks: int, num_waves: int = 1) -> tuple[int, ...]:
    """The rank of every stage of waves: there and back."""
    return (*range(num_ranks), *reversed(range(num_ranks))) * num_waves


def interleaved_ranks(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of every stage, round after round in the same direction."""
    return tuple(range(num_ranks)) * stages_per_rank


@dataclass(frozen=True)
class WaveCase:
    """A line of blocks, its skips, and what crossing one costs."""

    weights: Sequence[float]
    skips: list[tuple[int, int]]
    num_ranks: int
    costs: Sequence[float]
    cuts: Sequence[int]
    memory: StageMemory | None = field(default=None)

    def owner(self, boundaries: Boundaries) -> dict[int, int]:
        stages = range(2 * self.num_ranks)
        runs = {s: range(boundaries[s], boundaries[s + 1]) for s in stages}
        return {block: min(s, 2 * self.num_ranks - 1 - s) for s in stages for block in runs[s]}

    def crossing(self, boundaries: Boundaries) -> tuple[int, ...]:
        owner = self.owner(boundaries)
        return tuple(k for k, (a, b) in enumerate(self.skips) if owner[a] != owner[b])

    def loads(
        self, boundaries: Boundaries, pair_seconds: Callable[[int, int, int], float] | None = None
    ) -> list[float]:
        """Of every rank, with crossing skips at their costs, or at those of their pair of ranks."""
        owner, loads = self.owner(boundaries), [0.0] * self.num_ranks
        for block, weight in enumerate(self.weights):
            loads[owner[block]] += weight
        for k in self.crossing(boundaries):
            ends = sorted(owner[end] for end in self.skips[k])
            for rank in ends:
                loads[rank] += pair_seconds(k, ends[0], ends[1]) if pair_seconds else self.costs[k]
        return loads

    def ties(self, boundaries: Boundaries) -> tuple[int, int]:
        """Empty stages, then cuts."""
        return sum(a == b for a, b in pairwise(boundaries)), sum(self.cuts[p] for p in set(boundaries))

    def every(self) -> Iterator[Boundaries]:
        """All waves that fit into memory."""
        size = len(self.weights)
        for inner in combinations_with_replacement(range(size + 1), 2 * self.num_ranks - 1):
            if self.fits((0, *inner, size)):
                yield (0, *inner, size)

    def used(self, boundaries: Boundaries) -> list[float]:
        """Bytes of every rank."""
        assert self.memory is not None
        used = [0.0] * self.num_ranks
        for stage, (start, stop) in enumerate(pairwise(boundaries)):
            held = sum(self.memory.held_bytes[start:stop])
            kept = self.memory.in_flight[stage] * sum(self.memory.activation_bytes[start:stop])
            used[min(stage, 2 * self.num_ranks - 1 - stage)] += held + kept
        return used

    def fits(self, boundaries: Boundaries) -> bool:
        if self.memory is None:
            return True
        return all(used <= room for used, room in zip(self.used(boundaries), self.memory.limit_bytes, strict=True))

    def least(self) -> tuple[int, int]:
        """The smallest largest load and the fewest crossing skips with it, by recursion over open intervals."""
        size = len(self.weights)

        def level(i: int, i2: int, j2: int, j: int) -> tuple[int, int]:
            """Load, and the skips from this level to what stays open."""
            here, inner = {*range(i, i2), *range(j2, j)}, range(i2, j2)
            torn = [k for k, (a, b) in enumerate(self.skips) if (a in here) != (b in here)]
            new = sum(a in inner or b in inner for a, b in (self.skips[k] for k in torn))
            return sum(self.weights[b] for b in here) + sum(self.costs[k] for k in torn), new

        moves = {
            (i, j): [(i2, j2, *level(i, i2, j2, j)) for i2 in range(i, j + 1) for j2 in range(i2, j + 1)]
            for i in range(size + 1)
            for j in range(i, size + 1)
        }

        @cache
        def largest(i: int, j: int, levels: int) -> float:
            if levels == 0 or i == j:
                return 0 if i == j else float("inf")
            return min(max(load, largest(i2, j2, levels - 1)) for i2, j2, load, _ in moves[i, j])

        best = largest(0, size, self.num_ranks)

        @cache
        def fewest(i: int, j: int, levels: int) -> float:
            if levels == 0 or i == j:
                return 0 if i == j else float("inf")
            found = (new + fewest(i2, j2, levels - 1) for i2, j2, load, new in moves[i, j] if load <= best)
            return min(found, default=float("inf"))

        return int(best), int(fewest(0, size, self.num_ranks))


@st.composite
def memories(draw: st.DrawFn, num_blocks: int, num_stages: int, num_ranks: int) -> StageMemory:
    """Tables of small numbers, with limits some waves keep."""

    def table(size: int) -> list[int]:
        return draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))

    held, activations, in_flight = table(num_blocks), table(num_blocks), table(num_stages)
    most = sum(held) + max(in_flight) * sum(activations)
    limits = st.lists(st.integers(0, most), min_size=num_ranks, max_size=num_ranks)
    alike = st.integers(most // num_stages, most).map(lambda limit: [limit] * num_ranks)
    return StageMemory(held, activations, in_flight, draw(st.one_of(alike, limits)))


@st.composite
def wave_cases(draw: st.DrawFn, max_blocks: int, max_ranks: int, with_memory: bool = False) -> WaveCase:
    weights = draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 40)), min_size=2, max_size=max_blocks))
    size, num_ranks = len(weights), draw(st.integers(1, max_ranks))
    ends = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] != pair[1])
    skips = draw(st.lists(ends, max_size=size))
    costs = draw(st.lists(st.integers(0, 5), min_size=len(skips), max_size=len(skips)))
    cuts = [0, *draw(st.lists(st.integers(0, 9), min_size=size - 1, max_size=size - 1)), 0]
    memory = draw(memories(size, 2 * num_ranks, num_ranks)) if with_memory else None
    return WaveCase(weights, skips, num_ranks, costs, cuts, memory)
