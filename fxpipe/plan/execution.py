"""When every action of a schedule starts and ends: each rank keeps its order and starts as early as it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import Action, Work

if TYPE_CHECKING:
    from fxpipe.plan.schedule import Schedule

Lag = Callable[[int, int, str], float]


@dataclass(frozen=True)
class ActionTimes:
    """Start and end of every action of a schedule, in seconds from the start of the step."""

    start_seconds: dict[Action, float]
    end_seconds: dict[Action, float]
    num_ranks: int

    @property
    def makespan_seconds(self) -> float:
        """From the first start to the last end."""
        return max(self.end_seconds.values(), default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Idle share of ranks x makespan."""
        busy = sum(end - self.start_seconds[action] for action, end in self.end_seconds.items())
        return 1.0 - busy / (self.makespan_seconds * self.num_ranks) if self.makespan_seconds else 0.0


def execution_order(
    schedule: Schedule, work: Work, together: Mapping[Action, Collection[Action]] | None = None
) -> Iterator[tuple[int, Action]]:
    """Run the ranks as straight-line programs; yield (rank, action) as each becomes possible, and end when none is.

    Ranks with FIFO channels and sends that never block are a Kahn network: what can run does not depend on timing, so
    one run that reaches the end proves the absence of deadlock. Actions that were not yielded can never run.

    Args:
        together: what else must end before some actions, since several ranks exchange something for these.
    """
    return ((rank, action) for rank, action, _ in _with_needs(schedule, work, together or {}))


def _with_needs(
    schedule: Schedule, work: Work, together: Mapping[Action, Collection[Action]]
) -> Iterator[tuple[int, Action, Sequence[Action]]]:
    """The order of execution, and what must end before each action."""
    needs_of = work.needs_among({action for actions in schedule.ranks for action in actions})
    needs = [[(*needs_of(action), *together.get(action, ())) for action in actions] for actions in schedule.ranks]
    position = [0] * len(schedule.ranks)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(schedule.ranks)))[::-1]
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        for place in range(position[rank], len(actions)):
            action, before = actions[place], needs[rank][place]
            missing = next((need for need in before if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            position[rank] += 1
            yield rank, action, before
            ready += waiting.pop(action, ())


def no_lag(source: int, target: int, kind: str) -> float:
    """Every transfer is free."""
    return 0.0


def simulate(schedule: Schedule, work: Work, durations: Callable[[Action], float], lag: Lag = no_lag) -> ActionTimes:
    """Run `schedule` with `durations(action)` seconds per action.

    `lag(source, target, kind)` is the seconds a value travels: kind "F" and "B" between stages (a gradient goes from
    the later stage to the earlier), "T" from component `source` to stage `target`. It is zero for a value that stays
    on its rank.
    Raises ScheduleError when the schedule deadlocks or repeats an action.
    """
    free = [0.0] * len(schedule.ranks)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    for rank, action, needs in _with_needs(schedule, work, {}):
        begin = max([free[rank], *[end[need] + _travel(need, action, lag) for need in needs]])
        start[action], end[action] = begin, begin + durations(action)
        free[rank] = end[action]
    if len(end) < sum(map(len, schedule.ranks)):
        raise ScheduleError(f"schedule {schedule.name} stops after {len(end)} actions; schedule_check.check says why")
    return ActionTimes(start, end, len(schedule.ranks))


def _travel(source: Action, target: Action, lag: Lag) -> float:
    if target.kind == "T" or (source.stage == target.stage and source.kind != "T"):
        return 0.0  # within a stage, or between components
    return lag(source.stage, target.stage, source.kind.replace("I", "B"))
