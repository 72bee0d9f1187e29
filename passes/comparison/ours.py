"""fxpipe's plans as contestants.

fxpipe            the tuner's plan, frozen work of a micro-batch before it            0T0 0F0 0F1 ...
fxpipe, filled    the plan tuned for it, frozen work of the next batch in idle time   0F0 0T[0:3]x0:9 0F1 ...
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.comparison import OURS, Contestant
from fxpipe.options import microbatch_sizes
from fxpipe.schedule import Schedule
from fxpipe.simulation import walk
from fxpipe.staged import Staged
from fxpipe.timeline import Timeline
from passes.candidates import Candidate, Wishes
from passes.comparison.case import Case
from passes.comparison.contest import Built, simulated
from passes.comparison.memory import pipeline_peak_bytes
from passes.comparison.pieces import Piece, filled
from passes.comparison.pipeline_ops import pipeline_ops
from passes.estimate import estimated_work, without_components
from passes.fill import FillProblem, idle_of_timeline, per_device
from passes.order import Resources, order
from passes.room import Room
from passes.tune import block_times, tune

_MOST_TRIED = 6  # plans, the best first


def ours(case: Case, wishes: Wishes, budget_seconds: float) -> list[Contestant]:
    """The plan without filling, and where something is frozen the plan with.

    Raises:
        CompileError: nothing fits.
    """
    search = budget_seconds if wishes.schedule == "auto" else None  # an order asked for by name stays as it is
    found = [_first_that_fits(case, wishes, search, False)]
    return [*found, _first_that_fits(case, wishes, search, True)] if case.frozen.names else found


def _first_that_fits(case: Case, wishes: Wishes, budget_seconds: float | None, filled: bool) -> Contestant:
    """The tuner's best plan; a later one if it needs more memory than the tuner counts, as frozen work in idle time
    does on top of activations."""
    wishes = replace(wishes, memory_limit_bytes=case.limit_bytes, filled=filled)
    tuned = tune(case.graph, case.costs, case.cluster, wishes)
    ranked = [c for c in tuned.ranked if c.peak_bytes is not None and case.fits(c.peak_bytes)]
    for candidate in ranked[:_MOST_TRIED]:
        plan = _Plan.of(case, candidate)
        quick = plan.filled(None) if filled else plan.plain(None)
        if quick.fits:
            break
    found = plan.filled(budget_seconds) if filled else plan.plain(budget_seconds)
    return found if found.fits or not quick.fits else quick


@dataclass(frozen=True)
class _Plan:
    """One of the tuner's candidates, to be ordered, filled and simulated."""

    case: Case
    candidate: Candidate
    sizes: tuple[int, ...]

    @staticmethod
    def of(case: Case, candidate: Candidate) -> "_Plan":
        return _Plan(case, candidate, microbatch_sizes(case.batch_size, candidate.microbatches))

    @property
    def staged(self) -> Staged:
        return self.candidate.placed

    def plain(self, budget_seconds: float | None) -> Contestant:
        """With frozen work among the actions, as `fxpipe.compile` orders it."""
        return self._simulated(OURS, self._schedule(budget_seconds, frozen=True), ())

    def filled(self, budget_seconds: float | None) -> Contestant:
        """With the next batch's frozen work in the idle time of the training alone."""
        case, schedule = self.case, self._schedule(budget_seconds, frozen=False)
        alone = walk(pipeline_ops(case, self.staged, schedule, self.sizes).ops, {}, case.cluster).timeline()
        limit, size, left = case.limit_bytes, self.sizes[0], None
        if limit is not None:
            left = Room(case.costs, case.batch_size, True).for_frozen_work(self.staged, schedule, size, limit)
        layers, idle = case.frozen.components(case.batch_size, left), idle_of_timeline(alone)
        problem = FillProblem(alone.makespan_seconds, idle, layers, case.batch_size)
        pieces = filled(problem, per_device(problem), _starts(alone))
        return self._simulated(f"{OURS}, filled", schedule, pieces)

    def _schedule(self, budget_seconds: float | None, frozen: bool) -> Schedule:
        case = self.case
        times = block_times(case.costs, self.sizes[0])
        work = estimated_work(case.graph, self.staged, len(self.sizes))
        room = Room(case.costs, case.batch_size, filled=not frozen)
        resources = Resources.of(room, self.staged, times, case.cluster, case.limit_bytes)
        return order(
            case.graph, self.staged, work if frozen else without_components(work), resources, budget_seconds
        ).schedule

    def _simulated(self, name: str, schedule: Schedule, pieces: Sequence[Sequence[Piece]]) -> Contestant:
        case, staged, sizes = self.case, self.staged, self.sizes
        peak = pipeline_peak_bytes(case, staged, schedule, sizes, pieces, whole_batch=True)
        built = Built(peak, partial(pipeline_ops, case, staged, schedule, sizes, pieces=pieces))
        return simulated(case, name, str(self.candidate.outcome), built)


def _starts(timeline: Timeline) -> list[list[float]]:
    """When every rank's actions begin to compute, their waits behind them."""
    starts = {(event.rank, event.action): event.start_seconds for event in timeline.actions if event.kind != "end"}
    for wait in timeline.waits:
        if (key := (wait.rank, wait.action)) in starts:
            starts[key] = max(starts[key], wait.end_seconds)
    return [[seconds for (on, _), seconds in starts.items() if on == rank] for rank in range(timeline.num_ranks)]
