"""Staged: which blocks form a stage and which rank owns it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Staged:
    """Stage s holds blocks boundaries[s] to boundaries[s + 1]; its replicas are on the ranks stage_ranks[s].

    Micro-batch m runs on stage_ranks[s][m % their number]. `schedule` names the order the placement was made for;
    `collocated` says that no skip crosses ranks by design; stages in `recompute` keep only their inputs for the
    backward. Frozen component c may run on the ranks frozen_ranks[c], which hold its weights; on all where that is
    empty.
    """

    boundaries: tuple[int, ...]
    stage_ranks: tuple[tuple[int, ...], ...]
    schedule: str
    collocated: bool
    world_size: int
    recompute: frozenset[int] = frozenset()
    frozen_ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1

    @property
    def replicas(self) -> int:
        """The most replicas a stage has."""
        return max(map(len, self.stage_ranks))

    @cached_property
    def stage_of_block(self) -> tuple[int, ...]:
        """The stage of every block."""
        pairs = zip(self.boundaries, self.boundaries[1:], strict=False)
        return tuple(stage for stage, (start, stop) in enumerate(pairs) for _ in range(start, stop))

    def may_run(self, component: int, rank: int) -> bool:
        """Whether a rank holds a frozen component's weights."""
        return not self.frozen_ranks or rank in self.frozen_ranks[component]

    def frozen_places(self, places: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
        """`frozen_ranks` within a pipeline, whose ranks have these places."""
        return tuple(tuple(sorted(places[r] for r in ranks if r in places)) for ranks in self.frozen_ranks)

    def alike(self, rank: int) -> tuple[int, ...]:
        """The ranks at the same place of equal pipelines; the rank alone where stages differ in their replicas."""
        if len(set(map(len, self.stage_ranks))) > 1:
            return (rank,)
        return next((ranks for ranks in self.stage_ranks if rank in ranks), (rank,))

    def blocks(self, stage: int) -> range:
        return range(self.boundaries[stage], self.boundaries[stage + 1])
