"""The tuner with rehearsals: a candidate that could be the best is walked in full, and counts as that says.

tuned          3.738   3.741   3.741   3.744   3.815 s      the pipeline, or the ranks' average load
rehearsed      4.562   4.624   3.751   3.766     -          links that are shared, and bubbles as they are
searched       4.401     -     3.749   3.612                the best of these, their orders searched for
                                         ^ chosen
"""

from dataclasses import replace
from math import inf

from passes.rehearsal.case import Case
from passes.rehearsal.rehearse import Rehearsal
from passes.tuner.candidates import Candidate, Wishes
from passes.tuner.tune import Tuned, told, tune

_MOST, _MOST_STEPS = 16, 6144  # candidates; ranks x micro-batches of all of them together
_FEWEST = 4  # candidates: rehearsing fewer than that decides nothing
_MOST_SEARCHED = 4  # placements whose orders are searched for
_SLOWEST, _WORTH = 1.2, 0.99  # of the best's seconds: what theirs may be by a named order, and at best


def finals(case: Case, wishes: Wishes, budget_seconds: float | None = None) -> Tuned:
    """The candidate that is fastest when rehearsed, by the order it is named after or one that is searched for.

    Steps of very many ranks and micro-batches count as estimated, and so do self-conditioned ones, of which there are
    two.

    Args:
        budget_seconds: to search in, half as much again in all; orders are the named ones where left out.

    Raises:
        CompileError: none fits; says which would need least.
    """
    rehearsals = None if wishes.conditioning is not None else _Rehearsals(case, wishes.filled)
    tuned = tune(case.graph, case.costs, case.cluster, wishes, rehearsals)
    if rehearsals is None or not budget_seconds or rehearsals.is_long(tuned.chosen):
        return replace(tuned, search_seconds=budget_seconds)
    return rehearsals.searched(tuned, budget_seconds)


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
        if self.is_long(candidate):
            return replace(candidate, seconds=self._more * candidate.likely_seconds)
        self._left, self._steps = self._left - 1, self._steps - steps
        if self._left < 0 or self._steps < 0:
            return None
        found, whole = self._rehearsed(candidate, None)
        assert found.seconds is not None
        if not whole:
            self._steps += steps // 2
        elif candidate.likely_seconds:
            self._more = max(self._more, found.seconds / candidate.likely_seconds)
        if whole and self._fits(found):
            self._best = min(self._best, found.seconds)
        return found

    def searched(self, tuned: Tuned, budget_seconds: float) -> Tuned:
        """The best with orders that are searched for, where that helps: half of the time for all that come near, and
        all of it for the best of them."""
        tries: list[tuple[Candidate, float | None]] = [(candidate, None) for candidate in tuned.ranked]
        contenders = self._contenders(tuned)
        for candidate in contenders:
            some = budget_seconds / 2 / len(contenders)
            tries.append((self._rehearsed(candidate, some)[0], some))
        best, seconds = min([tries[0], *tries[len(tuned.ranked) :]], key=self._rank)
        if seconds is not None:
            tries.append((self._rehearsed(best, budget_seconds)[0], budget_seconds))
            best, seconds = min([(best, seconds), tries[-1]], key=self._rank)
        others = {_key(best): best}  # of every candidate the best order
        for candidate, _ in sorted(tries, key=self._rank):
            others.setdefault(_key(candidate), candidate)
        del others[_key(best)]
        told_of = [told(replace(c, why=""), best, self._case.limit_bytes) for c in others.values()]
        ranked = best, *sorted(told_of, key=lambda c: c.likely_seconds)
        return replace(tuned, ranked=ranked, search_seconds=seconds)

    def _rank(self, tried: tuple[Candidate, float | None]) -> tuple[bool, float]:
        return not self._fits(tried[0]), tried[0].likely_seconds

    def _contenders(self, tuned: Tuned) -> list[Candidate]:
        """The chosen one, and others that a better order could make the best, one of every placement."""
        best = tuned.chosen.likely_seconds
        others = sorted(tuned.ranked[1:], key=lambda c: c.estimated_seconds or inf)
        found: dict[tuple[object, ...], Candidate] = {}
        for candidate in (tuned.chosen, *others):
            shape, seconds = candidate.shape, candidate.seconds
            if seconds is None or shape.places == 1 or shape.is_uneven or self.is_long(candidate):
                continue
            near = seconds <= _SLOWEST * best and candidate.bound_seconds < _WORTH * best
            if candidate is tuned.chosen or (near and self._fits(candidate)):
                found.setdefault((replace(candidate.placed, schedule=""), candidate.microbatches), candidate)
        return list(found.values())[:_MOST_SEARCHED]

    def is_long(self, candidate: Candidate) -> bool:
        return _FEWEST * self._case.world_size * candidate.microbatches > _MOST_STEPS

    def _rehearsed(self, candidate: Candidate, budget_seconds: float | None) -> tuple[Candidate, bool]:
        """The candidate, and whether it was rehearsed in full: what can be no rival is not filled, and takes at least
        so long."""
        found = Rehearsal(self._case, candidate).run(self._filled, budget_seconds, self._best)
        whole = found.filled == self._filled
        peak = found.peak_bytes if whole else candidate.peak_bytes
        return replace(candidate, seconds=found.timeline.makespan_seconds, peak_bytes=peak, why=""), whole

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.peak_bytes is not None and self._case.fits(candidate.peak_bytes)


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.shape, candidate.staged, candidate.microbatches
