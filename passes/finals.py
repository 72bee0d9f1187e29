"""The tuner with rehearsals: a candidate that could be the best is walked in full, and counts as that says.

tuned          3.738   3.741   3.741   3.744   3.815 s      the pipeline, or the ranks' average load
rehearsed      4.562   4.624   3.751   3.766     -          links that are shared, and bubbles as they are
searched       4.401     -     3.749   3.612                the best of these, their orders searched for
                                         ^ chosen
"""

from dataclasses import replace
from math import inf

from passes.candidates import Candidate, Wishes
from passes.rehearsal.case import Case
from passes.rehearsal.rehearse import Rehearsal
from passes.tune import Tuned, told, tune

_MOST, _MOST_STEPS = 16, 6144  # candidates; ranks x micro-batches of all of them together
_FEWEST = 4  # candidates: rehearsing fewer than that decides nothing
_MOST_SEARCHED = 4  # placements whose orders are searched for
_SLOWEST, _WORTH = 1.2, 0.99  # of the best's seconds: what theirs may be by a named order, and without bubbles


def finals(case: Case, wishes: Wishes, budget_seconds: float = 0.0) -> Tuned:
    """The candidate that is fastest when rehearsed, by the order it is named after or one that is searched for.

    Steps of very many ranks and micro-batches count as estimated, and so do self-conditioned ones, of which there are
    two.

    Args:
        budget_seconds: to search in; twice as much may be taken in all.

    Raises:
        CompileError: none fits; says which would need least.
    """
    if wishes.conditioning is not None:
        return tune(case.graph, case.costs, case.cluster, wishes)
    rehearsals = _Rehearsals(case, wishes.filled)
    tuned = tune(case.graph, case.costs, case.cluster, wishes, rehearsals)
    return rehearsals.searched(tuned, budget_seconds) if budget_seconds else tuned


class _Rehearsals:
    """Rehearses candidates until that has cost enough."""

    def __init__(self, case: Case, filled: bool) -> None:
        self._case, self._filled = case, filled and bool(case.frozen.names)
        self._left, self._steps, self._more = _MOST, _MOST_STEPS, 1.0
        self._best = inf

    def __call__(self, candidate: Candidate) -> Candidate | None:
        """The candidate as rehearsed; None if there were enough. One too long for that takes as much more than was
        estimated as any that was rehearsed."""
        steps = self._case.world_size * candidate.microbatches
        if self._is_long(candidate):
            return replace(candidate, seconds=self._more * candidate.likely_seconds)
        self._left, self._steps = self._left - 1, self._steps - steps
        if self._left < 0 or self._steps < 0:
            return None
        found = self._rehearsed(candidate, None)
        assert found.seconds is not None
        self._more = max(self._more, found.seconds / candidate.likely_seconds if candidate.likely_seconds else 1.0)
        if found.seconds >= self._best:
            self._steps += steps // 2  # not filled
        elif self._fits(found):
            self._best = found.seconds
        return found

    def searched(self, tuned: Tuned, budget_seconds: float) -> Tuned:
        """The best with orders that are searched for, where that helps: half of the time for all that come near, and
        all of it for the best of them."""
        chosen = tuned.chosen
        if self._is_long(chosen):
            return tuned
        contenders = self._contenders(tuned)
        tries = [(chosen, 0.0)]
        for candidate in contenders:
            some = budget_seconds / 2 / len(contenders)
            tries.append((self._rehearsed(candidate, some), some))
        best, seconds = min(tries, key=self._rank)
        if seconds:
            tries.append((self._rehearsed(best, budget_seconds), budget_seconds))
            best, seconds = min(tries, key=self._rank)
        others = [replace(c, why="") for c in tuned.ranked if _key(c) != _key(best)]
        ranked = best, *(told(c, best, self._case.limit_bytes) for c in others)
        return replace(tuned, ranked=ranked, search_seconds=seconds)

    def _rank(self, tried: tuple[Candidate, float]) -> tuple[bool, float]:
        return not self._fits(tried[0]), tried[0].likely_seconds

    def _contenders(self, tuned: Tuned) -> list[Candidate]:
        """Candidates that an order without bubbles would make the best, one of every placement."""
        best = tuned.chosen.likely_seconds
        found: dict[tuple[object, ...], Candidate] = {}
        for candidate in sorted(tuned.ranked, key=lambda c: c.estimated_seconds or inf):
            if candidate.seconds is None or candidate.shape.places == 1 or self._is_long(candidate):
                continue
            worth = best * (1.0 if candidate is tuned.chosen else _WORTH)
            near = candidate.seconds <= _SLOWEST * best and (candidate.estimated_seconds or 0.0) < worth
            if near and self._fits(candidate):
                found.setdefault((replace(candidate.placed, schedule=""), candidate.microbatches), candidate)
        return list(found.values())[:_MOST_SEARCHED]

    def _is_long(self, candidate: Candidate) -> bool:
        return _FEWEST * self._case.world_size * candidate.microbatches > _MOST_STEPS

    def _rehearsed(self, candidate: Candidate, budget_seconds: float | None) -> Candidate:
        found = Rehearsal(self._case, candidate).run(self._filled, budget_seconds, self._best)
        return replace(candidate, seconds=found.timeline.makespan_seconds, peak_bytes=found.peak_bytes, why="")

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.peak_bytes is not None and self._case.fits(candidate.peak_bytes)


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.staged, candidate.microbatches
