"""A contestant's ways to run the step, tried on the simulator: the fastest that fits into memory.

DDP    1 micro-batch, needs 96 GiB      too much
       2 micro-batches, 52 GiB          1.92 s    <- its best
       4 micro-batches, 30 GiB          1.98 s
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxpipe.show.comparison import Contestant
from fxpipe.simulate import simulate, timeline
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.tuner.simulate import least_peaks


@dataclass(frozen=True)
class Attempt:
    """One way to run the step, which takes `bound_seconds` or more; written and walked only if it may be the best."""

    setting: str
    bound_seconds: float
    write: Callable[[], StepOps]


@dataclass(frozen=True)
class _Tried:
    setting: str
    ops: StepOps
    seconds: float
    peak_bytes: int


def best(case: Case, name: str, ladder: Iterable[Sequence[Attempt]]) -> Contestant | None:
    """The fastest attempt of the first rung where any fits; the least hungry one where none does anywhere.

    Args:
        ladder: attempts by preference, such as those without recomputation, then those with.
    """
    least: _Tried | None = None
    for rung in ladder:
        found: _Tried | None = None
        for attempt in sorted(rung, key=lambda a: a.bound_seconds):
            if found is not None and attempt.bound_seconds >= found.seconds:
                break
            tried = _try(case, attempt)
            if not case.fits(tried.peak_bytes):
                least = tried if least is None or tried.peak_bytes < least.peak_bytes else least
            elif found is None or tried.seconds < found.seconds:
                found = tried
        if found is not None:
            return contestant(case, name, found.setting, found.ops)
    return None if least is None else contestant(case, name, least.setting, least.ops)


def _try(case: Case, attempt: Attempt) -> _Tried:
    """Walked only if it may fit."""
    ops = attempt.write()
    needed = max(least_peaks(ops))
    if not case.fits(needed):
        return _Tried(attempt.setting, ops, 0.0, needed)
    walked = simulate(ops, case.cluster)
    return _Tried(attempt.setting, ops, walked.seconds, walked.peak_bytes)


def contestant(case: Case, name: str, setting: str, ops: StepOps) -> Contestant:
    """A row, with its timeline."""
    walked = simulate(ops, case.cluster)
    whole = walked.seconds * len(ops.ranks)
    idle = sum(walked.idle_seconds) / whole if whole else 0.0
    return Contestant(
        name, setting, walked.seconds, case.batch_size, idle, ops.wire_bytes, walked.peak_bytes,
        case.fits(walked.peak_bytes), timeline(ops, case.cluster),
    )  # fmt: skip
