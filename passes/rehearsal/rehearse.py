"""Rehearse a candidate of the tuner: order it, fill its idle time, and walk its op lists.

The tuner's own simulation has a lag for every message; here messages that share links queue, reductions are issued
where they are in rank programs, and frozen work is fitted into the bubbles there really are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from fxpipe.options import microbatch_sizes
from fxpipe.schedule import Schedule
from fxpipe.simulation import walk
from fxpipe.staged import Staged
from fxpipe.timeline import Timeline
from passes.estimate import BlockTimes, estimated_work, without_components
from passes.fill import FillProblem, idle_of_timeline, per_device
from passes.frozen_layers import Ahead
from passes.order import Resources, order
from passes.rehearsal.case import Case
from passes.rehearsal.memory import pipeline_peak_bytes
from passes.rehearsal.pieces import Piece, filled
from passes.rehearsal.pipeline_ops import pipeline_ops
from passes.room import Room
from passes.tuner.candidates import Candidate


@dataclass(frozen=True)
class Rehearsed:
    """A step as simulated; bytes are those all ranks send, and the fullest rank's peak."""

    timeline: Timeline
    wire_bytes: int
    peak_bytes: int
    filled: bool = False


@dataclass(frozen=True)
class Rehearsal:
    """One of the tuner's candidates, to be ordered, filled and simulated."""

    case: Case
    candidate: Candidate

    @property
    def staged(self) -> Staged:
        return self.candidate.placed

    @property
    def sizes(self) -> tuple[int, ...]:
        return microbatch_sizes(self.case.batch_size, self.candidate.microbatches)

    def run(self, filled: bool, budget_seconds: float | None = None, worth_seconds: float = inf) -> Rehearsed:
        """One step, `filled` with the next batch's frozen work; its order is searched for where there is a budget.

        A step that takes `worth_seconds` or more by its training alone is not filled: it is no rival.
        """
        if filled:
            return self._filled(budget_seconds, worth_seconds)
        return self._walked(self._schedule(budget_seconds, frozen=True), ())

    def _filled(self, budget_seconds: float | None, worth_seconds: float) -> Rehearsed:
        """The next batch's frozen work in the idle time of the training alone."""
        schedule = self._schedule(budget_seconds, frozen=False)
        plain = self._walked(schedule, ())
        alone = plain.timeline
        if alone.makespan_seconds >= worth_seconds:
            return plain
        problem, found = self._ahead(schedule).filled(
            alone.makespan_seconds, idle_of_timeline(alone), per_device, free=True
        )
        return replace(self._walked(schedule, filled(problem, found, _starts(alone))), filled=True)

    def fill_problem(self, budget_seconds: float | None = None) -> FillProblem:
        """The idle time of the training alone, and what is to be put into it."""
        schedule = self._schedule(budget_seconds, frozen=False)
        alone = self._walked(schedule, ()).timeline
        return self._ahead(schedule).problem(alone.makespan_seconds, idle_of_timeline(alone))

    def _ahead(self, schedule: Schedule) -> Ahead:
        case, left = self.case, None
        if (limit := case.limit_bytes) is not None:
            left = Room(case.costs, case.batch_size, True).for_frozen_work(self.staged, schedule, self.sizes[0], limit)
        return Ahead(case.frozen, case.batch_size, left, not case.divisible, self.staged.frozen_ranks)

    def _schedule(self, budget_seconds: float | None, frozen: bool) -> Schedule:
        case = self.case
        times = BlockTimes.of(case.costs, self.sizes[0])
        work = estimated_work(case.graph, self.staged, len(self.sizes))
        room = Room(case.costs, case.batch_size, filled=not frozen)
        resources = Resources.of(room, self.staged, times, case.cluster, case.limit_bytes)
        return order(
            case.graph, self.staged, work if frozen else without_components(work), resources, budget_seconds
        ).schedule

    def _walked(self, schedule: Schedule, pieces: Sequence[Sequence[Piece]]) -> Rehearsed:
        case, staged, sizes = self.case, self.staged, self.sizes
        peak = pipeline_peak_bytes(case, staged, schedule, sizes, pieces, whole_batch=True)
        writer = pipeline_ops(case, staged, schedule, sizes, pieces=pieces)
        return Rehearsed(walk(writer.ops, {}, case.cluster).timeline(), writer.wire_bytes, peak)


def _starts(timeline: Timeline) -> list[list[float]]:
    """When every rank's actions begin to compute, their waits behind them."""
    starts = {(event.rank, event.action): event.start_seconds for event in timeline.actions if event.kind != "end"}
    for wait in timeline.waits:
        if (key := (wait.rank, wait.action)) in starts:
            starts[key] = max(starts[key], wait.end_seconds)
    return [[seconds for (on, _), seconds in starts.items() if on == rank] for rank in range(timeline.num_ranks)]
