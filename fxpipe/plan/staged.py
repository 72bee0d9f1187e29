"""Staged: which blocks form a stage and which rank owns it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from fxpipe.plan.block_graph import BlockGraph

Run = tuple[int, int]
"""Blocks from the first to before the second."""


SHARDS = {
    "none": (False, False, False),
    "optimizer": (True, False, False),
    "gradients": (True, True, False),
    "weights": (True, False, True),
    "all": (True, True, True),
}
"""Whether replicas of a stage share out the optimizer's states, gradients of every micro-batch, and weights, by name:
nothing, ZeRO-1, ZeRO-2, ZeRO-3 with gradients summed once a step, ZeRO-3."""


def trains_alike(shard: str | None) -> bool:
    """Whether replicas that share this out have as many micro-batches each, since they exchange something for each."""
    return any(SHARDS[shard or "none"][1:])


@dataclass(frozen=True)
class PlannedCut:
    """Into how many blocks a step was to be cut, for micro-batches of so many samples; `divisible` if there are any.

    A sample is `rows` rows of the batch.
    """

    num_blocks: int
    num_samples: int
    divisible: bool = True
    rows: int = 1

    def __str__(self) -> str:
        rows = f" of {self.rows} rows" if self.rows > 1 else ""
        return f"{self.num_blocks} blocks for {self.num_samples} samples{rows}" + ", one micro-batch" * (
            not self.divisible
        )


@dataclass(frozen=True)
class Staged:
    """Stage s holds blocks boundaries[s] to boundaries[s + 1]; its replicas are on the ranks stage_ranks[s].

    Micro-batch m runs on stage_ranks[s][m % their number]. `schedule` names the order the placement was made for;
    `collocated` says that no skip crosses ranks by design. Of every run of blocks in `recompute`, each within a stage,
    only what comes into the run is kept for the backward, which computes the rest again. Frozen component c may run on
    the ranks frozen_ranks[c], which hold its weights; on all where that is empty. Where it is `sharded`, each parameter
    of a stage is trained on one of its replicas, which alone has its gradient and the optimizer's state; where the
    weights are `gathered`, that one alone holds it, trained or frozen, and others while they compute with it; where
    gradients are `scattered`, those of every micro-batch are summed on it as they come, else those of the whole step.
    Where it is `offloaded`, the optimizer's states are on the host, and so are its updates. Receives are posted
    `prefetch` actions before the one that needs them.
    """

    boundaries: tuple[int, ...]
    stage_ranks: tuple[tuple[int, ...], ...]
    schedule: str
    collocated: bool
    world_size: int
    recompute: tuple[Run, ...] = ()
    frozen_ranks: tuple[tuple[int, ...], ...] = ()
    sharded: bool = False
    offloaded: bool = False
    gathered: bool = False
    scattered: bool = False
    prefetch: int = 1

    @property
    def shard(self) -> str:
        """What replicas of a stage share out: one of `SHARDS`."""
        of = self.sharded, self.scattered, self.gathered
        return next((name for name, shared in SHARDS.items() if shared == of), "none")

    def sharing(self, shard: str) -> "Staged":
        """The same where replicas share out what this one of `SHARDS` says."""
        sharded, scattered, gathered = SHARDS[shard]
        return replace(self, sharded=sharded, scattered=scattered, gathered=gathered)

    def summed_for(self, num_microbatches: int) -> "Staged":
        """The same for so many micro-batches: where no replica has two, gradients of each are those of the step."""
        several = any(1 < len(ranks) < num_microbatches for ranks in self.stage_ranks)
        return replace(self, scattered=self.scattered and several)

    def cut_at(self, boundaries: tuple[int, ...]) -> "Staged":
        """As many stages of other blocks: recomputed as a whole where these are, else blocks by themselves."""
        whole = self.recompute and self.recompute == whole_stages(self.boundaries)
        recompute = whole_stages(boundaries) if whole else runs_within(self.recompute, boundaries)
        return replace(self, boundaries=boundaries, recompute=recompute)

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

    def recomputed(self, stage: int) -> tuple[Run, ...]:
        """The runs of a stage's blocks that its backward computes again."""
        start, stop = self.boundaries[stage : stage + 2]
        return tuple(run for run in self.recompute if start <= run[0] and run[1] <= stop)

    def runs(self, stage: int) -> Iterator[tuple[Run, bool]]:
        """A stage's blocks in runs, and whether each is computed again."""
        start, stop = self.boundaries[stage : stage + 2]
        for run in self.recomputed(stage):
            if start < run[0]:
                yield (start, run[0]), False
            yield run, True
            start = run[1]
        if start < stop:
            yield (start, stop), False

    def may_run(self, component: int, rank: int) -> bool:
        """Whether a rank holds a frozen component's weights."""
        return not self.frozen_ranks or rank in self.frozen_ranks[component]

    def frozen_places(self, places: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
        """`frozen_ranks` within a pipeline, whose ranks have these places."""
        return tuple(tuple(sorted(places[r] for r in ranks if r in places)) for ranks in self.frozen_ranks)

    @cached_property
    def pipelines(self) -> list[tuple[int, ...]]:
        """The ranks of equal pipelines, place by place; none where stages differ in their replicas."""
        return equal_pipelines(self.stage_ranks, self.world_size)

    def alike(self, rank: int) -> tuple[int, ...]:
        """The ranks at the same place of equal pipelines; the rank alone where stages differ in their replicas."""
        if len(set(map(len, self.stage_ranks))) > 1:
            return (rank,)
        return next((ranks for ranks in self.stage_ranks if rank in ranks), (rank,))

    def blocks(self, stage: int) -> range:
        return range(self.boundaries[stage], self.boundaries[stage + 1])


def equal_pipelines(stage_ranks: Sequence[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """As `Staged.pipelines`."""
    if len(set(map(len, stage_ranks))) > 1:
        return []
    found = [tuple(dict.fromkeys(ranks)) for ranks in zip(*stage_ranks, strict=True)]
    return found if sorted(rank for of in found for rank in of) == list(range(world_size)) else []


def whole_stages(boundaries: Sequence[int]) -> tuple[Run, ...]:
    """Every stage as a run to recompute; those without blocks are left out."""
    return tuple((start, stop) for start, stop in pairwise(boundaries) if start < stop)


def runs_within(runs: Sequence[Run], boundaries: Sequence[int]) -> tuple[Run, ...]:
    """The runs, those that cross a boundary in parts."""
    parts = ((max(start, first), min(stop, last)) for start, stop in runs for first, last in pairwise(boundaries))
    return tuple((start, stop) for start, stop in parts if start < stop)


def stage_bytes(
    graph: BlockGraph, staged: Staged, num_samples: int, gradients: bool = False
) -> dict[tuple[int, int], int]:
    """Bytes of so many samples from stage to stage, each value once per reader; of `gradients`, that come back, by the
    same stages."""
    moved: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        if isinstance(edge.producer, int) and (edge.requires_grad or not gradients):
            source = staged.stage_of_block[edge.producer]
            for target in {staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)}:
                moved[source, target] = moved.get((source, target), 0) + edge.num_bytes(num_samples)
    return moved
