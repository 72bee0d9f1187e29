"""The order of every rank's actions for stages on ranks: a named one, or one that is searched for.

stages, times, transfers, memory    ->    one pipeline's schedule, and a bound on what any could reach
                                    ->    the same for every pipeline, with the reductions over them
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import ActionTimes, simulate
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from passes.case import Case
from passes.schedules.named import make_schedule, named_schedule
from passes.schedules.problem import Problem, peak_bytes
from passes.schedules.replicas import tile
from passes.schedules.synthesis import synthesise
from passes.step_ops.seconds import ActionSeconds
from passes.tuner.lags import Lags


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders for one placement: `ahead` without frozen work, which is the next batch's, else with this batch's."""

    case: Case
    staged: Staged
    num_microbatches: int
    ahead: bool

    @cached_property
    def work(self) -> Work:
        """What an order has to contain."""
        work = self.case.work.of(self.staged, self.num_microbatches)
        return work.without_frozen() if self.ahead else work

    @property
    def pipelines(self) -> list[tuple[int, ...]]:
        """The ranks of equal pipelines, place by place; none where stages differ in their replicas."""
        return [] if self.num_microbatches % self.staged.replicas else self.staged.pipelines

    def named(self) -> Schedule:
        """The order that the placement is named after, of all ranks."""
        return self.of_all(self.of_one, scattered=self.staged.scattered) if self.pipelines else self._whole()

    def of_all(self, schedule: Schedule, only: Collection[int] | None = None, scattered: bool = False) -> Schedule:
        """The order of one of equal pipelines as that of all ranks, or of those of `only` these pipelines; gradients of
        every micro-batch are summed as they come where they are `scattered`."""
        return tile(schedule, self.pipelines, self._of_one, only, scattered)

    @cached_property
    def of_one(self) -> Schedule:
        """The named order of one of equal pipelines."""
        return named_schedule(self.staged.schedule, self._problem)

    def alone(self, of_one: Schedule, again_seconds: Sequence[float] = ()) -> ActionTimes:
        """When the actions of the first pipeline take place that has all links for itself, where so many seconds of
        every stage's forward are computed again."""
        sizes = self._sizes[:: self.staged.replicas]
        seconds = {size: self._seconds_of(size) for size in {*sizes}}
        for size in seconds if again_seconds else ():
            again = {kind: tuple(map(add, seconds[size][kind], again_seconds)) for kind in "BI"}
            seconds[size] = {**seconds[size], **again}

        def duration(action: Action) -> float:
            return seconds[sizes[action.microbatch]][action.kind][action.stage]

        lag = Lags(self.case, self.staged, sizes[-1], alone=True)
        return simulate(of_one, self._of_one, duration, lag)

    @cached_property
    def named_alone(self) -> ActionTimes:
        """The same in the named order."""
        return self.alone(self.of_one)

    def searched(self, budget_seconds: float, limit_bytes: int | None, needed: Sequence[int]) -> tuple[Schedule, str]:
        """The best order of one of equal pipelines that is found in this time, and what is known about it.

        Args:
            limit_bytes: of memory on every rank.
            needed: of that, by the named order, per rank.
        """
        problem, known = self._problem, ""
        if self.staged.recompute:  # what an I computes again would be held until its W
            problem = replace(problem, seconds={k: s for k, s in problem.seconds.items() if k not in "IW"})
            known = ", of orders with whole backwards"
        if limit_bytes is not None:
            problem = self._within(problem, limit_bytes, needed)
        found = synthesise(problem, budget_seconds)
        return found.schedule, f"one pipeline's schedule {found}{known}"

    def _whole(self) -> Schedule:
        """The order of all ranks at once."""
        seconds = self._seconds
        return make_schedule(
            self.staged.schedule, self.work, self.staged.stage_ranks, seconds["F"], seconds["B"],
            frozen_seconds=seconds["T"], frozen_ranks=self.staged.frozen_ranks, world_size=self.staged.world_size,
        )  # fmt: skip

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Samples of every micro-batch, the largest first."""
        return microbatch_sizes(self.case.batch_size, self.num_microbatches)

    @property
    def _num_samples(self) -> int:
        return self._sizes[0]

    @cached_property
    def _seconds(self) -> dict[str, tuple[float, ...]]:
        return self._seconds_of(self._num_samples)

    def _seconds_of(self, num_samples: int) -> dict[str, tuple[float, ...]]:
        """Of every kind of action, by stage or component."""
        seconds = ActionSeconds(self.case, self.staged)
        stages, components = range(self.staged.num_stages), range(self.work.num_components)
        counts = {"F": stages, "B": stages, "I": stages, "W": stages, "T": components}
        return {
            kind: tuple(seconds.of(Action(number, kind, 0), num_samples) for number in numbers)
            for kind, numbers in counts.items()
        }

    @property
    def _of_one(self) -> Work:
        """The work of one pipeline."""
        return replace(self.work, num_microbatches=self.num_microbatches // self.staged.replicas)

    @cached_property
    def _problem(self) -> Problem:
        """One pipeline's."""
        staged, work = self.staged, self._of_one
        place = {rank: place for place, rank in enumerate(self.pipelines[0])}
        places = tuple(place[ranks[0]] for ranks in staged.stage_ranks)
        seconds = {kind: of for kind, of in self._seconds.items() if kind != "T" or work.num_components}
        frozen = staged.frozen_places(place) if work.num_components else ()
        lags = Lags(self.case, staged, self._num_samples)
        return Problem(work, places, seconds, max(places) + 1, lags, frozen_ranks=frozen)

    def _within(self, problem: Problem, limit_bytes: int, needed: Sequence[int]) -> Problem:
        """What the named order needs for saved activations, or as much more as the limit leaves beside the rest."""
        limited = replace(problem, activation_bytes=self._saved())
        named = peak_bytes(limited, self.of_one)
        rooms = (
            saved + max(0, limit_bytes - needed[rank]) for rank, saved in zip(self.pipelines[0], named, strict=True)
        )
        return replace(limited, memory_limit_bytes=tuple(rooms))

    def _saved(self) -> tuple[int, ...]:
        """What one micro-batch holds on every stage from its forward to its backward."""
        staged, costs = self.staged, self.case.costs
        return tuple(
            sum(costs.stage_saved_bytes(range(*run), self._num_samples, again) for run, again in staged.runs(stage))
            for stage in range(staged.num_stages)
        )
