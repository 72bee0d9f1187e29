"""A contestant's ways to run the step, tried on the simulator: the fastest that fits into memory.

DDP    1 micro-batch, needs 96 GiB      too much
       2 micro-batches, 52 GiB          1.92 s    <- its best
       4 micro-batches, 30 GiB          1.98 s
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxpipe.comparison import Contestant
from fxpipe.simulation import walk
from fxpipe.timeline import Timeline
from passes.comparison.case import Case
from passes.comparison.op_writer import OpWriter


@dataclass(frozen=True)
class Attempt:
    """One way to run the step, simulated only if it may be the best: `bound_seconds` is never more than it takes."""

    setting: str
    peak_bytes: int
    bound_seconds: float
    ops: Callable[[], OpWriter]


def simulated(case: Case, name: str, attempt: Attempt) -> Contestant:
    """An attempt's row, with its timeline."""
    writer = attempt.ops()
    timeline: Timeline = walk(writer.ops, {}, case.cluster).timeline()
    return Contestant(
        name, attempt.setting, timeline.makespan_seconds, case.batch_size, timeline.bubble_ratio,
        writer.wire_bytes, attempt.peak_bytes, case.fits(attempt.peak_bytes), timeline,
    )  # fmt: skip


def best(case: Case, name: str, ladder: Iterable[Sequence[Attempt]]) -> Contestant | None:
    """The fastest attempt of the first rung where any fits; the least hungry one where none does anywhere.

    Args:
        ladder: attempts by preference, such as those without recomputation, then those with.
    """
    every: list[Attempt] = []
    for rung in ladder:
        every += rung
        found: Contestant | None = None
        for attempt in sorted(rung, key=lambda a: a.bound_seconds):
            if case.fits(attempt.peak_bytes) and (found is None or attempt.bound_seconds < found.seconds):
                tried = simulated(case, name, attempt)
                found = tried if found is None or tried.seconds < found.seconds else found
        if found is not None:
            return found
    return simulated(case, name, min(every, key=lambda a: a.peak_bytes)) if every else None
