"""Stages on ranks for a candidate's shape.

6 blocks, 2 stages on 2 ranks    ->    0 1 2 | 3 4 5     by time and messages: `place`
                                 ->    0 1 | 2 3 4 5     by time alone
   1 rank, 2 replicas            ->    0 1 2 3 | 4 5     buckets of equal gradients
each, where it has replicas      ->    with the optimizer's states shared out over them, and without
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxpipe.plan.staged import Staged, trains_alike
from passes.case import Case
from passes.placement import buckets
from passes.placement.cascade import first_pass
from passes.placement.place import others, place
from passes.placement.shape import Shape
from passes.tuner.bounds import placed_seconds, reduction_seconds, shares_may_slow
from passes.tuner.request import Request
from passes.tuner.trial import Trial


class Placements:
    """Equal ones are made once."""

    def __init__(self, case: Case, request: Request) -> None:
        self.case, self.request = case, request
        self._stages_of: dict[tuple[object, ...], Sequence[Staged]] = {}
        self._bounds: dict[tuple[int, int], float] = {}

    def of(self, trial: Trial) -> Iterator[Trial]:
        """The trial on stages that are placed."""
        shape, case = trial.candidate.shape, self.case
        for staged in self._stages(trial):
            if not shape.hard and staged.collocated and self.request.collocation != "soft":
                continue  # free skips that all stay on their ranks: the hard placement
            recompute = self.request.runs(staged.boundaries)
            placed = replace(
                staged, schedule=shape.schedule, recompute=recompute, offloaded=bool(self.request.offload_optimizer)
            )
            for found in self._shared_out(placed, trial.sizes(case)):
                sums = reduction_seconds(case, found, trial.candidate.microbatches)
                bounds = trial.bound_seconds, self._of_stages(staged, trial), sums
                yield replace(trial, staged=found, bound_seconds=max(bounds))

    def _of_stages(self, staged: Staged, trial: Trial) -> float:
        """The bound that stages on ranks have in whatever order, computed once."""
        sizes = trial.sizes(self.case)
        key = id(staged), len(sizes)  # one of `_stages_of`
        if key not in self._bounds:
            self._bounds[key] = placed_seconds(self.case, staged, sizes)
        return self._bounds[key]

    def _shared_out(self, staged: Staged, sizes: Sequence[int]) -> Sequence[Staged]:
        """What replicas of a stage share out; several where that is open and may be slower. Weights, and gradients of
        every micro-batch, only where that is asked for, and all replicas have as many micro-batches."""
        asked, nothing, states = self.request.shard, staged, staged.sharing("optimizer")
        if staged.replicas == 1 or asked == "none":
            return (nothing,)
        if asked is not None and trains_alike(asked):
            even = staged.pipelines and len(sizes) % staged.replicas == 0
            return (staged.sharing(asked).summed_for(len(sizes)),) if even else ()
        return (states, nothing) if asked is None and shares_may_slow(self.case, staged, sizes[-1]) else (states,)

    def _stages(self, trial: Trial) -> Sequence[Staged]:
        """The stages of the trial's shape: as `place` and `others` have them; single ranks also in buckets."""
        shape, case, size = trial.candidate.shape, self.case, trial.sizes(self.case)[0]
        key = (replace(shape, schedule=""), shape.is_folded, shape.is_opposite, size)
        if key not in self._stages_of:
            given = case, case.costs.at(size), shape, trial.candidate.microbatches
            found = place(*given)
            also = [*others(*given, found), *self._bucketed(shape, found)]
            self._stages_of[key] = tuple({staged.boundaries: staged for staged in (*reversed(also), found)}.values())
        return self._stages_of[key]

    def _bucketed(self, shape: Shape, staged: Staged) -> Iterator[Staged]:
        """For pipelines of one rank: stages of equal gradients, and as data parallel training has them; none of both
        passes, of which the first may be left out."""
        costs, asked = self.case.costs, self.request
        if shape.places > 1 or shape.stages == 1 or asked.stages is not None or not asked.is_open:
            return
        for size in (sum(costs.trained_bytes) / shape.stages, buckets.BUCKET_BYTES):
            boundaries = tuple(sorted({*buckets.buckets(costs, size), first_pass(self.case.graph, costs)}))
            yield replace(staged, boundaries=boundaries, stage_ranks=staged.stage_ranks[:1] * (len(boundaries) - 1))
