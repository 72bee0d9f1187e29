"""A placement in less memory: what may be done about a trial that is too large, the ways that take no time first.

too large        ->   frozen weights on some ranks only, stages cut by memory, weights shared out over replicas
what still is    ->   about the least seconds of a step with blocks recomputed so that it fits
that             ->   blocks recomputed, the cheapest that are enough; none are: other stages
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fxpipe.plan.staged import Staged, trains_alike
from passes.case import Case
from passes.tuner.bounds import compute_seconds, ordered_seconds, placed_seconds, reduction_seconds, sums_are_hidden
from passes.tuner.memory import cut_for_recomputed, most, recomputed_stages, thriftier_stages, totals
from passes.tuner.recompute import least_again
from passes.tuner.request import Request
from passes.tuner.trial import TooLarge, Trial
from passes.tuner.walks import Walks


@dataclass(frozen=True, eq=False)
class Thrift:
    """Every placement is looked at once."""

    case: Case
    request: Request
    walks: Walks
    _seen: set[tuple[Staged, int, bool]] = field(default_factory=set)

    def closer(self, trial: Trial) -> Iterator[Trial]:
        """What becomes of a trial that is too large; at first also itself, as one that does not fit."""
        assert trial.too_large is not None
        too_large, unseen = trial.too_large, trial.too_large.unseen
        if too_large.ways == "others":
            yield replace(trial, too_large=None)
            found = [*self._others(trial, unseen)]
        else:
            if too_large.ways == "bound" and (bound := self._recomputed_bound(trial, unseen)) is not None:
                yield replace(trial, bound_seconds=bound, too_large=replace(too_large, ways="blocks"))
                return
            given = self.case, trial.candidate, trial.placed, self.walks.peaks(trial), self._limit(unseen)
            found = [*recomputed_stages(*given, by_blocks=too_large.ways == "blocks")]
            found = found or [*cut_for_recomputed(*given)]
        for staged in found:
            yield from self._known(trial, staged, unseen)

    def too_large(self, trial: Trial, unseen: int = 0) -> Trial:
        """A trial that does not fit, whose placement may be had in less memory; `unseen` bytes are left, of messages in
        flight and frozen work. Its bound is that of a step in which replicas add up shares of gradients, if they may.
        """
        if self.case.limit_bytes is None or trial.is_thrifty:
            return trial
        saved = self.saved_seconds(trial) if self.ways_to_share(trial) else 0.0
        bound = trial.bound_seconds - saved
        return replace(trial, done=False, bound_seconds=bound, too_large=TooLarge(unseen, saved_seconds=saved))

    def saved_seconds(self, trial: Trial) -> float:
        """What replicas may save that add up shares of their micro-batches' gradients, in all stages of a pipeline."""
        staged, sums = trial.placed, trial.candidate.microbatches // trial.placed.replicas - 1
        sizes = (sum(self.case.costs.trained_bytes[b] for b in staged.blocks(s)) for s in range(staged.num_stages))
        return sums * sum(self.case.adding_seconds(size) for size in sizes) if sums else 0.0

    def ways_to_share(self, trial: Trial) -> tuple[str, ...]:
        """What replicas may yet share out, of `SHARDS`, the fastest first; of one micro-batch each, weights.

        The other one is for what the first leaves open: of gradients of every micro-batch that are summed while the
        next is computed all, or without gathers, if there is room; of those that are not only if there is none.
        """
        placed, count = trial.placed, trial.candidate.microbatches
        is_open = self.request.shard is None and placed.replicas > 1 and not trains_alike(placed.shard)
        if not is_open or not self.walks.orders(trial).pipelines:
            return ()
        if count == placed.replicas:
            return ("weights",)
        return ("all", "gradients") if sums_are_hidden(self.case, placed, count) else ("weights", "all")

    def _limit(self, unseen: int) -> int:
        """Bytes that what is seen of a trial may need."""
        assert self.case.limit_bytes is not None
        return self.case.limit_bytes - unseen

    def _others(self, trial: Trial, unseen: int) -> Iterator[Staged]:
        """Without recomputing more."""
        peaks, limit, fits = self.walks.peaks(trial), self._limit(unseen), False
        yield from thriftier_stages(self.case, trial.candidate, trial.placed, peaks, limit)
        for number, way in enumerate(self.ways_to_share(trial)):
            staged = trial.placed.sharing(way)
            if number and fits != (way == "gradients"):
                return
            yield staged
            fits = most(peaks(staged)[1]) <= limit

    def _known(self, trial: Trial, staged: Staged, unseen: int) -> Iterator[Trial]:
        """The trial on stages that fit, or of which blocks are to be recomputed."""
        peaks, limit, candidate = self.walks.peaks(trial), self._limit(unseen), trial.candidate
        fits = most(peaks(staged)[1]) <= limit
        assert trial.too_large is not None
        least = trial.bound_seconds + (0.0 if staged.scattered else trial.too_large.saved_seconds)
        if _place(staged) != _place(trial.placed):  # what was walked says nothing of these
            sizes = trial.sizes(self.case)
            sums = reduction_seconds(self.case, staged, len(sizes))
            least = max(candidate.bound_seconds, placed_seconds(self.case, staged, sizes), sums)
        key = staged, candidate.microbatches, candidate.ahead
        if key in self._seen or (not fits and isinstance(self.request.recompute, bool)):
            return
        self._seen.add(key)
        if fits:
            bound = max(least, self._with_recomputed(trial, staged))
            yield Trial(candidate, bound, staged, is_thrifty=True)
        else:
            yield replace(trial, bound_seconds=least, staged=staged, too_large=TooLarge(unseen, "bound"))

    def _recomputed_bound(self, trial: Trial, unseen: int) -> float | None:
        """Seconds of a step with blocks computed again so that it fits, about the least; None where it cannot."""
        given = totals(self.walks.peaks(trial)), self._limit(unseen)
        again = least_again(self.case, trial.placed, trial.sizes(self.case), *given)
        if again is None:
            return None
        bound, orders = self._with_recomputed(trial, trial.placed, sum(again)), self.walks.orders(trial)
        if orders.pipelines and trial.schedule is None:
            alone = orders.alone(trial.of_one or orders.of_one, again)
            bound = max(bound, ordered_seconds(self.case, trial.placed, alone))
        return max(bound, trial.bound_seconds)

    def _with_recomputed(self, trial: Trial, staged: Staged, more_seconds: float = 0.0) -> float:
        """No step is shorter that computes these blocks again, and so much more of a micro-batch's forward."""
        candidate, seconds = trial.candidate, self.case.costs.at(trial.sizes(self.case)[-1]).forward_seconds
        again = sum(seconds[block] for run in staged.recompute for block in range(*run)) + more_seconds
        return compute_seconds(self.case, candidate.shape, candidate.microbatches, candidate.ahead, again)


def _place(staged: Staged) -> tuple[object, ...]:
    """What computes where."""
    return staged.boundaries, staged.stage_ranks, staged.frozen_ranks
