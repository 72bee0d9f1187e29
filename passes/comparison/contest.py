"""A contestant's ways to run the step, tried on the simulator: the fastest that fits into memory.

DDP    1 micro-batch, needs 96 GiB      too much
       2 micro-batches, 52 GiB          1.92 s    <- its best
       4 micro-batches, 30 GiB          1.98 s
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

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


def best(case: Case, name: str, ladder: Iterable[Sequence[Attempt]]) -> Contestant | None:
    """The fastest attempt of the first rung where any fits; the least hungry one where none does anywhere.

    Args:
        ladder: attempts by preference, such as those without recomputation, then those with.
    """
    least: tuple[int, str, StepOps] | None = None  # bytes
    for rung in ladder:
        found: tuple[float, str, StepOps] | None = None  # seconds
        for attempt in sorted(rung, key=lambda a: a.bound_seconds):
            if found is not None and attempt.bound_seconds >= found[0]:
                break
            ops, seconds = attempt.write(), inf
            needed = max(least_peaks(ops))
            if case.fits(needed):  # walked only then
                walked = simulate(ops, case.cluster)
                needed, seconds = walked.peak_bytes, walked.seconds
            if not case.fits(needed):
                least = (needed, attempt.setting, ops) if least is None or needed < least[0] else least
            elif found is None or seconds < found[0]:
                found = seconds, attempt.setting, ops
        if found is not None:
            return contestant(case, name, *found[1:])
    return None if least is None else contestant(case, name, *least[1:])


def contestant(case: Case, name: str, setting: str, ops: StepOps) -> Contestant:
    """A row, with its timeline."""
    walked = simulate(ops, case.cluster)
    whole = walked.seconds * len(ops.ranks)
    idle = sum(walked.idle_seconds) / whole if whole else 0.0
    return Contestant(
        name, setting, walked.seconds, case.batch_size, idle, ops.wire_bytes, walked.peak_bytes,
        case.fits(walked.peak_bytes), timeline(ops, case.cluster),
    )  # fmt: skip
