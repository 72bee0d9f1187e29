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
from passes.rehearsal.case import Case
from passes.rehearsal.op_writer import OpWriter


@dataclass(frozen=True)
class Built:
    """A way to run the step that is known in full: what it needs, and what it does."""

    peak_bytes: int
    ops: Callable[[], OpWriter]


@dataclass(frozen=True)
class Attempt:
    """One way to run the step, which takes `bound_seconds` or more; built and simulated only if it may be the best."""

    setting: str
    bound_seconds: float
    build: Callable[[], Built]


def simulated(case: Case, name: str, setting: str, built: Built) -> Contestant:
    """A row, with its timeline."""
    writer = built.ops()
    timeline: Timeline = walk(writer.ops, {}, case.cluster).timeline()
    return Contestant(
        name, setting, timeline.makespan_seconds, case.batch_size, timeline.bubble_ratio,
        writer.wire_bytes, built.peak_bytes, case.fits(built.peak_bytes), timeline,
    )  # fmt: skip


def best(case: Case, name: str, ladder: Iterable[Sequence[Attempt]]) -> Contestant | None:
    """The fastest attempt of the first rung where any fits; the least hungry one where none does anywhere.

    Args:
        ladder: attempts by preference, such as those without recomputation, then those with.
    """
    too_large: list[tuple[str, Built]] = []
    for rung in ladder:
        found: Contestant | None = None
        for attempt in sorted(rung, key=lambda a: a.bound_seconds):
            if found is not None and attempt.bound_seconds >= found.seconds:
                break
            built = attempt.build()
            if not case.fits(built.peak_bytes):
                too_large.append((attempt.setting, built))
                continue
            tried = simulated(case, name, attempt.setting, built)
            found = tried if found is None or tried.seconds < found.seconds else found
        if found is not None:
            return found
    if not too_large:
        return None
    return simulated(case, name, *min(too_large, key=lambda item: item[1].peak_bytes))
