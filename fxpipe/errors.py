"""The errors fxpipe raises for the person who must act: the values, the rule, what to change."""

from contextvars import ContextVar
from typing import ClassVar


class FxpipeError(ValueError):
    """Base of every error a user can cause or mend."""


class CaptureError(FxpipeError):
    """The model cannot be captured as one graph; names the module and the construct."""

    noted: ClassVar[ContextVar[list[Exception] | None]] = ContextVar("noted", default=None)
    """In a trace, all of them: of those that forward catches it goes another way than in a step."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if (noted := self.noted.get()) is not None:
            noted.append(self)


class ValuesError(CaptureError):
    """Forward asks what a tensor holds, which its graph does not know."""


class CompileError(FxpipeError):
    """The captured model, or an option, admits no correct program; says why and what to change."""


class ScheduleError(CompileError):
    """A schedule's text does not parse, or the schedule is not a correct order of all work."""


class RunError(RuntimeError):
    """A rank failed while a program ran; names the rank and the action it was in."""


class Stopped(Exception):
    """Raise it on all ranks, in a callback between two steps, to end a sampler's call: the next one is as if there had
    been none. So does what all ranks raise there alike; an exception of one rank, or within a step, ends all."""
