"""A candidate as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from fxpipe.plan.tuning import Outcome
from passes.case import Case
from passes.tuner.candidates import Candidate
from passes.tuner.room import Room
from passes.tuner.simulate import Simulated


@dataclass(frozen=True, slots=True)
class TooLarge:
    """What a trial lacks memory for: `unseen` bytes beside those of its training, of messages in flight and frozen
    work; which `ways` are to be looked at next: all others, a bound on what recomputing takes, or blocks for it. Its
    bound leaves out `saved_seconds`, which are part of steps whose gradients are not scattered."""

    unseen: int
    ways: Literal["others", "bound", "blocks"] = "others"
    saved_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Trial:
    """A candidate as far as it is known: no step of it is shorter than `bound_seconds`, or hardly, where blocks are to
    be recomputed.

    Once it `is_ordered`, its order is the named one or, where there is one, `of_one`, of each of equal pipelines, or
    `schedule`. `simulated` is its step, or its training while the next batch's frozen work is to come, in some `room`;
    where some pipelines stand for all, that of these, until it is `done`. `needs` are bytes on the fullest rank; one
    that `is_thrifty` was made to need less. One that is `too_large` does not fit, and what needs less is yet to be
    looked for. `method` says how the order was found, `why` what it lost by.
    """

    candidate: Candidate
    bound_seconds: float
    staged: Staged | None = None
    is_ordered: bool = False
    of_one: Schedule | None = None
    schedule: Schedule | None = None
    simulated: Simulated | None = None
    room: Room | None = None
    is_filled: bool = False
    done: bool = False
    needs: int | None = None
    is_thrifty: bool = False
    too_large: TooLarge | None = None
    method: str = ""
    why: str = ""

    def known(self, found: Simulated, done: bool) -> Trial:
        """The trial, simulated."""
        bound = max(self.bound_seconds, found.seconds)
        return replace(self, simulated=found, needs=found.peak_bytes, done=done, bound_seconds=bound)

    @property
    def seconds(self) -> float | None:
        """Of a step, where it is known in full."""
        return self.simulated.seconds if self.simulated is not None and self.done else None

    def sizes(self, case: Case) -> tuple[int, ...]:
        """Samples of every micro-batch."""
        return microbatch_sizes(case.batch_size, self.candidate.microbatches)

    @property
    def placed(self) -> Staged:
        """The stages of a trial that is placed."""
        if self.staged is None:
            raise ValueError("the trial is not placed yet")
        return self.staged

    @property
    def outcome(self) -> Outcome:
        shape, staged, simulated = self.candidate.shape, self.staged, self.simulated
        return Outcome(
            len(shape.pipelines), shape.places, shape.schedule, shape.stages, self.candidate.microbatches,
            staged.collocated if staged else shape.is_folded and shape.hard, bool(staged and staged.recompute),
            self.bound_seconds, self.seconds, self.needs, simulated.wire_bytes if simulated and self.done else None,
            self.why,
        )  # fmt: skip
