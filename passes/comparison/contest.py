"""A contestant's ways to run the step, tried on the simulator: the fastest that fits into memory.

DDP    1 micro-batch, needs 96 GiB      too much
       2 micro-batches, 52 GiB          1.92 s    <- its best
       4 micro-batches, 30 GiB          1.98 s
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from fxpipe.show.comparison import Contestant
from fxpipe.simulate import Clock, simulate
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.tuner.simulate import least_peaks


@dataclass(frozen=True)
class Attempt:
    """One way to run the step, in micro-batches of `num_samples` at most, which takes `bound_seconds` or more; written
    and walked only if it may be the best; of the best `early`, too, the same with receives posted early."""

    setting: str
    bound_seconds: float
    num_samples: int
    write: Callable[[], StepOps]
    early: Callable[[], StepOps] | None = None


def best(case: Case, name: str, ladder: Iterable[Sequence[Attempt]]) -> Contestant | None:
    """The fastest attempt of the first rung where any fits; the least hungry one where none does anywhere.

    Args:
        ladder: attempts by preference, such as those without recomputation, then those with. Of a rung what has no
            smaller micro-batches than another that does not fit does not, either.
    """
    least: tuple[int, str, StepOps] | None = None  # bytes
    for rung in ladder:
        found: Contestant | None = None
        early: Callable[[], StepOps] | None = None
        too_large = inf  # samples of a micro-batch
        for attempt in sorted(rung, key=lambda a: a.bound_seconds):
            if found is not None and attempt.bound_seconds >= found.seconds:
                break
            if attempt.num_samples >= too_large:
                continue
            ops = attempt.write()
            needed = max(least_peaks(ops))
            if case.fits(needed):  # walked only then
                walked = contestant(case, name, attempt.setting, ops)
                needed = walked.peak_bytes
                if walked.fits and (found is None or walked.seconds < found.seconds):
                    found, early = walked, attempt.early
            if not case.fits(needed):
                too_large = attempt.num_samples
                least = (needed, attempt.setting, ops) if least is None or needed < least[0] else least
        if found is not None and early is not None:
            sooner = contestant(case, name, f"{found.setting}, early receives", early())
            found = min(found, sooner, key=lambda row: (not row.fits, row.seconds))
        if found is not None:
            return found
    return None if least is None else contestant(case, name, *least[1:])


def contestant(case: Case, name: str, setting: str, ops: StepOps) -> Contestant:
    """A row."""
    return walked_contestant(case, name, setting, simulate(ops, case.cluster), ops.wire_bytes)


def walked_contestant(case: Case, name: str, setting: str, clock: Clock, wire_bytes: int) -> Contestant:
    fits, idle = case.fits(clock.peak_bytes), clock.idle_share
    return Contestant(name, setting, clock.seconds, case.batch_size, idle, wire_bytes, clock.peak_bytes, fits)
