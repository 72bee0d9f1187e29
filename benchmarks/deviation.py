"""How far a run is from its prediction, action by action.

kind                 actions   predicted    measured    latest by
forward                   32     24.9 ms     25.3 ms       1.2 ms
step                             512 ms      519 ms
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.errors import RunError
from fxpipe.plan.timeline import Timeline, human_seconds
from fxpipe.show.trace_format import NAMES


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action: when it starts, counted from the start of the step, and how long its rank computes in it."""

    rank: int
    action: str
    kind: str
    predicted_start_seconds: float
    measured_start_seconds: float
    predicted_busy_seconds: float
    measured_busy_seconds: float

    @property
    def late_seconds(self) -> float:
        """How much later than predicted it starts."""
        return self.measured_start_seconds - self.predicted_start_seconds


@dataclass(frozen=True)
class Deviation:
    """A step's times as predicted and as measured, and those of every action in the order of ranks and time."""

    predicted_seconds: float
    measured_seconds: float
    actions: tuple[ActionSpan, ...]

    @property
    def ratio(self) -> float:
        """The measured time of the step as a part of the predicted one, less one."""
        return self.measured_seconds / self.predicted_seconds - 1

    def __str__(self) -> str:
        lines = [f"{'kind':<20}{'actions':>8}{'predicted':>12}{'measured':>12}{'latest by':>12}"]
        for kind in dict.fromkeys(times.kind for times in self.actions):
            alike = [times for times in self.actions if times.kind == kind]
            predicted = sum(times.predicted_busy_seconds for times in alike) / len(alike)
            measured = sum(times.measured_busy_seconds for times in alike) / len(alike)
            cells = map(human_seconds, (predicted, measured, max(0.0, *(times.late_seconds for times in alike))))
            lines.append(
                f"{NAMES[kind].partition(',')[0][:20]:<20}{len(alike):>8}" + "".join(f"{c:>12}" for c in cells)
            )
        cells = map(human_seconds, (self.predicted_seconds, self.measured_seconds))
        return "\n".join([*lines, f"{'step':<28}" + "".join(f"{c:>12}" for c in cells) + f"{self.ratio:>+12.1%}"])


def deviation(predicted: Timeline, measured: Timeline) -> Deviation:
    """Set a run beside its prediction.

    Raises:
        RunError: they are of different programs: some rank's actions are not the same ones in the same order.
    """
    of_runs = [list(_actions(timeline)) for timeline in (predicted, measured)]
    names = [[(rank, action) for rank, action, *_ in of_run] for of_run in of_runs]
    if names[0] != names[1]:
        pairs = zip([*names[0], None], [*names[1], None], strict=False)
        first = next((a, b) for a, b in pairs if a != b)
        raise RunError(f"prediction and run are of different programs: where one has {first[0]}, one has {first[1]}")
    found = [
        ActionSpan(rank, action, kind, start, measured_start, busy, measured_busy)
        for (rank, action, kind, start, busy), (*_, measured_start, measured_busy) in zip(*of_runs, strict=True)
    ]
    return Deviation(predicted.makespan_seconds, measured.makespan_seconds, tuple(found))


def _actions(timeline: Timeline) -> Iterator[tuple[int, str, str, float, float]]:
    """(rank, action, kind, start, seconds without the waits inside) in the order of ranks and time."""
    waited: dict[tuple[int, str], float] = {}
    for event in timeline.waits:
        waited[event.rank, event.action] = waited.get((event.rank, event.action), 0.0) + event.seconds
    for event in sorted(timeline.actions, key=lambda event: (event.rank, event.start_seconds)):
        idle = waited.get((event.rank, event.action), 0.0)
        yield event.rank, event.action, event.kind, event.start_seconds, event.seconds - idle
