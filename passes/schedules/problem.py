"""What a synthesised schedule is asked for, and which schedules answer it.

work, stage_rank           seconds of F B I W T, lag       activation bytes, limit per rank
0F0 1F0 1B0 0B0 ...        how long, how far apart         F of a stage takes, B (or W) gives back
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import ActionTimes, Lag, no_lag, simulate
from fxpipe.plan.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """Work, its placement and its costs.

    Args:
        work: what has to be done.
        stage_rank: the rank of every stage.
        seconds: kind -> seconds per stage ("T": per component). The backward may be split where "I" and "W" are given.
        num_ranks: number of ranks; those that `stage_rank` names where left out.
        lag: seconds a value travels, as in `fxpipe.plan.execution.simulate`.
        activation_bytes: bytes that a micro-batch holds on a stage, from the start of F to the end of B or W.
        memory_limit_bytes: for these bytes, per rank; nothing is limited where left out.
        frozen_ranks: the ranks of every component, which take its micro-batches in turn; all where left out.
    """

    work: Work
    stage_rank: tuple[int, ...]
    seconds: Mapping[str, Sequence[float]]
    num_ranks: int = 0
    lag: Lag = no_lag
    activation_bytes: tuple[int, ...] = ()
    memory_limit_bytes: tuple[int, ...] | None = None
    frozen_ranks: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.num_ranks:
            object.__setattr__(self, "num_ranks", max(self.stage_rank, default=0) + 1)

    @property
    def splittable(self) -> frozenset[int]:
        """The stages whose backward may be I and W: elsewhere that gains nothing."""
        return self.work.input_grad & self.work.weight_grad if "I" in self.seconds else frozenset()

    def duration(self, action: Action) -> float:
        """Seconds of an action."""
        return float(self.seconds[action.kind][action.stage])

    def simulate(self, schedule: Schedule) -> ActionTimes:
        """When every action of `schedule` runs."""
        return simulate(schedule, self.work, self.duration, self.lag)

    def backward_kinds(self, stage: int, split: frozenset[int]) -> str:
        """The letters of a stage's backward, the last of which frees its activations; empty without gradients."""
        if stage not in self.work.backward:
            return ""
        return "IW" if stage in split else "B"

    def rank(self, action: Action) -> int:
        if action.kind != "T":
            return self.stage_rank[action.stage]
        ranks = self.frozen_ranks[action.stage] if self.frozen_ranks else range(self.num_ranks)
        return ranks[action.microbatch % len(ranks)]

    def bytes_taken(self, action: Action) -> int:
        """What `action` adds to its rank's memory at its start."""
        holds = action.kind == "F" and action.stage in self.work.backward and self.activation_bytes
        return self.activation_bytes[action.stage] if holds else 0

    def bytes_freed(self, action: Action, split: frozenset[int]) -> int:
        """What `action` gives back at its end."""
        frees = action.kind != "T" and self.activation_bytes and self.backward_kinds(action.stage, split)
        return self.activation_bytes[action.stage] if frees and frees[-1] == action.kind else 0


def peak_bytes(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """The most activation bytes every rank holds. A rank's own order decides, whatever the others do."""
    split = frozenset(a.stage for actions in schedule.ranks for a in actions if a.kind == "W")
    return tuple(
        most_held((problem.bytes_taken(a), problem.bytes_freed(a, split)) for a in actions)
        for actions in schedule.ranks
    )


def most_held(steps: Iterable[tuple[int, int]]) -> int:
    """The most bytes at once of steps that take some when they start and free some when they end."""
    held = peak = 0
    for taken, freed in steps:
        held += taken
        peak = max(peak, held)
        held -= freed
    return peak


def fits(problem: Problem, schedule: Schedule) -> bool:
    """Whether no rank holds more than its limit."""
    limits = problem.memory_limit_bytes
    return limits is None or all(p <= limit for p, limit in zip(peak_bytes(problem, schedule), limits, strict=True))
