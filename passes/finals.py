"""The tuner with rehearsals: a candidate that could be the best is walked in full, and counts as that says.

tuned          3.738   3.741   3.741   3.744   3.815 s      the pipeline, or the ranks' average load
rehearsed      4.562   4.624   3.751   3.766     -          links that are shared, and bubbles as they are
                                 ^ chosen      no longer in reach
"""

from dataclasses import replace

from passes.candidates import Candidate, Wishes
from passes.rehearsal.case import Case
from passes.rehearsal.rehearse import Rehearsal
from passes.tune import Tuned, tune

_MOST, _MOST_STEPS = 16, 6144  # candidates; ranks x micro-batches of all of them together
_FEWEST = 4  # candidates: rehearsing fewer than that decides nothing


def finals(case: Case, wishes: Wishes) -> Tuned:
    """The candidate that is fastest when rehearsed.

    Steps of very many ranks and micro-batches count as estimated, and so do self-conditioned ones, of which there are
    two.

    Raises:
        CompileError: none fits; says which would need least.
    """
    rehearse = None if wishes.conditioning is not None else _Rehearsals(case, wishes.filled)
    return tune(case.graph, case.costs, case.cluster, wishes, rehearse)


class _Rehearsals:
    """Rehearses candidates until that has cost enough."""

    def __init__(self, case: Case, filled: bool) -> None:
        self._case, self._filled = case, filled and bool(case.frozen.names)
        self._left, self._steps, self._more = _MOST, _MOST_STEPS, 1.0

    def __call__(self, candidate: Candidate) -> Candidate | None:
        """The candidate as rehearsed; None if there were enough. One too long for that takes as much more than was
        estimated as any that was rehearsed."""
        steps = self._case.world_size * candidate.microbatches
        if _FEWEST * steps > _MOST_STEPS:
            return replace(candidate, seconds=self._more * candidate.likely_seconds)
        self._left, self._steps = self._left - 1, self._steps - steps
        if self._left < 0 or self._steps < 0:
            return None
        found = Rehearsal(self._case, candidate).run(self._filled)
        seconds = found.timeline.makespan_seconds
        self._more = max(self._more, seconds / candidate.likely_seconds if candidate.likely_seconds else 1.0)
        return replace(candidate, seconds=seconds, peak_bytes=found.peak_bytes)
