"""fxpipe's plans as contestants: the tuner's, the same with idle time filled, and the one that is best when filled.

fxpipe               frozen work of a micro-batch before it        0T0 0F0 0F1 ...
fxpipe, filled       frozen work of the next batch in idle time    0F0 0T[0:3]x0:9 0F1 ...
... for filling      of all plans the tuner has simulated, the one whose filled step is shortest
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.comparison import OURS, Contestant
from fxpipe.options import microbatch_sizes
from fxpipe.schedule import Schedule
from fxpipe.simulation import walk
from fxpipe.staged import Staged
from passes.candidates import Candidate, Wishes
from passes.comparison.case import Case
from passes.comparison.contest import Attempt, simulated
from passes.comparison.memory import pipeline_peak_bytes
from passes.comparison.pieces import Piece, filled
from passes.comparison.pipeline_ops import pipeline_ops
from passes.estimate import estimated_work
from passes.fill import FillProblem, idle_of_timeline, per_device
from passes.filled import without_components
from passes.order import Resources, order
from passes.tune import Tuned, block_times, tune

_MOST_FILLED = 12  # plans that are filled to find the best


def ours(case: Case, wishes: Wishes, budget_seconds: float) -> list[Contestant]:
    """The tuner's plan, and what filling makes of it.

    Raises:
        CompileError: nothing fits.
    """
    tuned = tune(case.graph, case.costs, case.cluster, replace(wishes, memory_limit_bytes=case.limit_bytes))
    chosen = _Plan.of(case, tuned.chosen)
    found = [chosen.plain(budget_seconds)]
    if not case.frozen.names:
        return found
    found.append(chosen.filled(f"{OURS}, filled", budget_seconds))
    other = _best_to_fill(case, tuned)
    if other is not None:
        found.append(other.filled(f"{OURS}, planned for filling", budget_seconds))
    return found


def _best_to_fill(case: Case, tuned: Tuned) -> "_Plan | None":
    """The plan whose filled step is shortest, orders by name alone; None where that is the tuner's own."""
    best, best_seconds = None, float("inf")
    for candidate in _worth_filling(case, tuned):
        plan = _Plan.of(case, candidate)
        tried = plan.filled("", 0.0)
        if tried.fits and tried.seconds < best_seconds:
            best, best_seconds = plan, tried.seconds
    return best if best is not None and best.candidate is not tuned.chosen else None


def _worth_filling(case: Case, tuned: Tuned) -> Iterator[Candidate]:
    """Simulated plans that fit, by the least that a filled step can take: the pipeline, or everything shared evenly."""
    found = [c for c in tuned.ranked if c.seconds is not None and c.peak_bytes is not None and case.fits(c.peak_bytes)]
    yield from sorted(found, key=lambda c: _least_seconds(case, c))[:_MOST_FILLED]


def _least_seconds(case: Case, candidate: Candidate) -> float:
    assert candidate.seconds is not None
    times = case.costs.at(-(-case.batch_size // candidate.microbatches))
    frozen = candidate.microbatches * sum(times.component_seconds) / case.world_size
    work = sum(times.forward_seconds) * (2 if candidate.shape.recompute else 1) + sum(times.backward_seconds)
    evenly = candidate.microbatches * work / case.world_size + frozen
    return max(candidate.seconds - frozen, evenly)


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

    def plain(self, budget_seconds: float) -> Contestant:
        """With frozen work among the actions, as `fxpipe.compile` orders it."""
        return self._simulated(OURS, self._schedule(budget_seconds, frozen=True), ())

    def filled(self, name: str, budget_seconds: float) -> Contestant:
        """With the next batch's frozen work in the idle time of the training alone."""
        case, schedule = self.case, self._schedule(budget_seconds, frozen=False)
        alone = walk(pipeline_ops(case, self.staged, schedule, self.sizes).ops, {}, case.cluster).timeline()
        idle = idle_of_timeline(alone)
        found = per_device(
            FillProblem(alone.makespan_seconds, idle, case.frozen.components(case.batch_size), case.batch_size)
        )
        starts = [
            [e.start_seconds for e in alone.actions if e.rank == rank and e.kind != "end"]
            for rank in range(case.world_size)
        ]
        return self._simulated(name, schedule, filled(found, starts))

    def _schedule(self, budget_seconds: float, frozen: bool) -> Schedule:
        case = self.case
        times = block_times(case.costs, self.sizes[0])
        work = estimated_work(case.graph, self.staged, len(self.sizes))
        resources = Resources.of(case.costs, self.staged, times, case.cluster, case.limit_bytes)
        work = work if frozen else without_components(work)
        return order(case.graph, self.staged, work, resources, budget_seconds).schedule

    def _simulated(self, name: str, schedule: Schedule, pieces: Sequence[Sequence[Piece]]) -> Contestant:
        case, staged, sizes = self.case, self.staged, self.sizes
        peak = pipeline_peak_bytes(case, staged, schedule, sizes, pieces, whole_batch=True)
        attempt = Attempt(
            str(self.candidate.outcome), peak, 0.0, lambda: pipeline_ops(case, staged, schedule, sizes, pieces=pieces)
        )
        return simulated(case, name, attempt)
