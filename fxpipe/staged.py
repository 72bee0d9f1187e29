"""Staged: which blocks form a stage and which rank owns it."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Staged:
    """Stage s holds blocks boundaries[s] to boundaries[s + 1]; its replicas are on the ranks stage_ranks[s].

    Micro-batch m runs on stage_ranks[s][m % their number]. `schedule` names the order the placement was made for;
    `collocated` says that no skip crosses ranks by design; stages in `recompute` keep only their inputs for the
    backward.
    """

    boundaries: tuple[int, ...]
    stage_ranks: tuple[tuple[int, ...], ...]
    schedule: str
    collocated: bool
    world_size: int
    recompute: frozenset[int] = frozenset()

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

    def blocks(self, stage: int) -> range:
        return range(self.boundaries[stage], self.boundaries[stage + 1])
