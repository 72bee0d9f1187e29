"""How ranks are used: the shape that a named schedule gives stages, before blocks are looked at.

4 ranks, 4 stages    1f1b          pipelines (0 1 2 3)       places of stages 0 1 2 3
data_parallel=2      wave          pipelines (0 1) (2 3)     places of stages 0 1 1 0
"""

from dataclasses import dataclass

from fxpipe.errors import CompileError
from fxpipe.plan.staged import Staged
from passes.schedules.policies import POLICIES


@dataclass(frozen=True)
class Shape:
    """How ranks are used: `pipelines` holds the ranks of every pipeline, in the order of its places.

    `schedule` is a name, `stages` their number; a `hard` placement keeps every skip on its rank where it can.
    """

    schedule: str
    stages: int
    pipelines: tuple[tuple[int, ...], ...]
    hard: bool = True
    conditioning: float = 1.0  # the probability of a first pass, where there are two

    @property
    def places(self) -> int:
        """Ranks of one pipeline."""
        return len(self.pipelines[0])

    @property
    def world_size(self) -> int:
        return self.places * len(self.pipelines)

    @property
    def is_uneven(self) -> bool:
        """Whether a line has fewer stages than ranks, so that some stages have more replicas than others."""
        return self.stages < self.places

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every stage's replicas, where all have as many."""
        return tuple(tuple(pipeline[p] for pipeline in self.pipelines) for p in self.place_of_stage)

    @property
    def is_folded(self) -> bool:
        """Whether the network is folded, so that both ends of a skip can be on one rank."""
        return POLICIES[self.schedule].is_folded(self.stages, self.places)

    @property
    def is_opposite(self) -> bool:
        """Whether two groups of backbones go through the ranks in opposite directions."""
        return POLICIES[self.schedule].reverses

    @property
    def waits(self) -> bool:
        """Whether micro-batches in flight are so few that stages wait for messages to be answered."""
        rule = POLICIES[self.schedule].rule
        return not rule.drain_last and not rule.grouped

    @property
    def is_cut_by_memory(self) -> bool:
        """Whether there is a partition within limits of memory: of a line with a stage per place, and of waves."""
        if self.is_folded:
            return True
        return not self.is_uneven and not self.is_opposite and self.stages == self.places

    @property
    def place_of_stage(self) -> tuple[int, ...]:
        """Line and loop: in turn; fold: there and back."""
        n = self.places
        if self.is_folded or self.is_opposite:
            return tuple(s % n if s // n % 2 == 0 else n - 1 - s % n for s in range(self.stages))
        return tuple(s % n for s in range(self.stages))

    def staged(self, boundaries: tuple[int, ...]) -> Staged:
        """The shape's stages, cut there, on its ranks."""
        return Staged(boundaries, self.stage_ranks, self.schedule, False, self.world_size)


def shape(name: str, world_size: int, stages: int | None, data_parallel: int, strided: bool = False) -> Shape:
    """The shape of a named schedule.

    Args:
        stages: one per rank of a pipeline where left out, two where the name needs them.
        strided: neighbours of a pipeline are `data_parallel` ranks apart, replicas next to each other.

    Raises:
        CompileError: the name is unknown, or the numbers do not fit each other.
    """
    if name not in POLICIES:
        raise CompileError(
            f"unknown schedule {name!r}; choose one of auto, {', '.join(POLICIES)}, or pass a schedule's text"
        )
    if world_size % data_parallel:
        raise CompileError(
            f"data_parallel={data_parallel} does not divide world_size={world_size}; every pipeline has as many ranks"
        )
    policy, places = POLICIES[name], world_size // data_parallel
    count = stages or places * policy.stages_per_rank[0]
    found = Shape(name, count, pipelines(places, data_parallel, strided))
    if count < places and data_parallel == 1 and policy.uneven:
        return found
    if count % places:
        raise CompileError(
            f"stages={count} is no multiple of the {places} ranks of a pipeline (world_size={world_size}, "
            f"data_parallel={data_parallel}); every rank owns as many stages"
        )
    if policy.reverses and count != 2 * places:
        raise CompileError(f"schedule {name!r} has two stages per rank of a pipeline, {2 * places}, not {count}")
    if policy.folds and count % (2 * places):
        raise CompileError(
            f"schedule {name!r} goes there and back: its stages are a multiple of {2 * places}, not {count}"
        )
    return found


def pipelines(places: int, count: int, strided: bool = False) -> tuple[tuple[int, ...], ...]:
    """The ranks of every pipeline."""
    if strided:
        return tuple(tuple(range(p, places * count, count)) for p in range(count))
    return tuple(tuple(range(p * places, (p + 1) * places)) for p in range(count))
