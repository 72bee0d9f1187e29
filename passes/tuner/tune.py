"""Choose how to use the ranks: data parallel x stages x waves x micro-batches x collocation x recomputation.

    8 ranks, 32 samples   ->   8 pipelines of 1 rank      x 1, 2, 4 micro-batches
                               4 pipelines of 2 ranks     x line, wave (hard, soft), ...    x 1, 2, 4, 8 micro-batches
                               ...
                          ->   the one predicted fastest of those that fit, and why every other lost

Every candidate has a lower bound on its time. Those whose bound could win get stages and a first estimate; the best by
that are simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from fxpipe.block_graph import BlockGraph, human_bytes
from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.errors import CompileError
from fxpipe.tuning import Outcome
from passes.tuner.candidates import Candidate, Wishes, candidates
from passes.tuner.predictions import Predictions

_MOST_SIMULATED = 40  # candidates that fit
_MOST_FAILING = 40  # simulated candidates that do not fit, before what needs least memory is tried
_ESTIMATED, _SIMULATED, _KNOWN = range(3)
_MARGIN = 1.05, 1.02, 1.0  # by how much less of each kind of estimate a candidate may take


class NothingFits(CompileError):
    """Every candidate needs more memory than there may be."""


@dataclass(frozen=True)
class Tuned:
    """The chosen candidate first, then the others, the fastest first.

    `search_seconds`: how long to search for an order of the chosen one; None where it is to have its named one.
    """

    ranked: tuple[Candidate, ...]
    num_simulated: int
    search_seconds: float | None = None

    @property
    def chosen(self) -> Candidate:
        return self.ranked[0]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(candidate.outcome for candidate in self.ranked)


def tune(
    graph: BlockGraph,
    costs: BlockCosts,
    cluster: Cluster,
    wishes: Wishes,
    rehearse: Callable[[Candidate], Candidate | None] | None = None,
) -> Tuned:
    """The candidate predicted fastest of those that fit into the memory limit.

    Args:
        rehearse: predicts one that could be the best more closely; None ends the search.

    Raises:
        CompileError: none fits; says which would need least.
    """
    predictions = Predictions(graph, costs, cluster, wishes)
    search, best = _Search(predictions, rehearse), None
    ruled_out = sorted(candidates(graph, costs, wishes), key=lambda c: c.bound_seconds)
    while best is None and ruled_out:  # by others, of which none may fit
        estimated, ruled_out = predictions.estimated(ruled_out)
        best = search.best(estimated)
        if best is None:  # of the fastest; of the others, what needs least
            thrifty = sorted(search.skipped, key=predictions.needs)
            search.skipped = thrifty[_MOST_FAILING:]
            best = search.best(thrifty[:_MOST_FAILING])
    if best is None:
        raise _nothing_fits(search.lost, wishes)
    others = [
        told(c, best, wishes.memory_limit_bytes) for c in (*search.lost, *search.skipped, *search.waiting, *ruled_out)
    ]
    return Tuned((best, *sorted(others, key=lambda c: c.likely_seconds)), search.num_simulated)


class _Search:
    """Best first: what promises most is looked at more closely, until the one in front is known in full.

    `lost` are those that cannot win any more, `skipped` those that were not looked at: enough others were.
    """

    def __init__(self, predictions: Predictions, rehearse: Callable[[Candidate], Candidate | None] | None) -> None:
        self._predictions, self._rehearse, self._count = predictions, rehearse, count()
        self._queue: list[tuple[float, int, int, Candidate]] = []
        self._num_fitting = self._num_failing = self.num_simulated = 0
        self.lost: list[Candidate] = []
        self.skipped: list[Candidate] = []

    @property
    def waiting(self) -> list[Candidate]:
        return [candidate for *_, candidate in self._queue]

    def best(self, estimated: Sequence[Candidate]) -> Candidate | None:
        """The fastest of these that fits; None where none does, of as many as are looked at."""
        self._num_failing = self._predictions.num_cut = 0
        for candidate in estimated:
            self._push(_ESTIMATED, candidate)
        while self._queue and self._queue[0][2] != _KNOWN:
            _, _, level, candidate = heappop(self._queue)
            if level == _SIMULATED:
                full = self._rehearse(candidate) if self._rehearse else candidate
                if full is None:
                    if self._known:
                        self.lost.append(candidate)
                    else:
                        self._push(_KNOWN, candidate)
                    break
                if not self._push(_KNOWN, full):
                    for tried in self._predictions.recomputed(candidate):
                        self.num_simulated += 1
                        self._push(_SIMULATED, tried)
            elif self._num_fitting < _MOST_SIMULATED and self._num_failing < _MOST_FAILING:
                for tried in self._predictions.simulated(candidate):
                    self.num_simulated += 1
                    fits = self._push(_SIMULATED if self._rehearse else _KNOWN, tried)
                    self._num_fitting += fits
                    self._num_failing += not fits and tried.seconds is not None
            else:
                self.skipped.append(candidate)
        if not self._known:
            return None
        first = min(self._known)
        self._queue.remove(first)
        return first[-1]

    @property
    def _known(self) -> list[tuple[float, int, int, Candidate]]:
        return [entry for entry in self._queue if entry[2] == _KNOWN]

    def _push(self, level: int, candidate: Candidate) -> bool:
        """Whether it may still win: what needs too much memory does not."""
        fits = level == _ESTIMATED or self._predictions.fits(candidate)
        if fits:
            key = candidate.likely_seconds / _MARGIN[level]
            heappush(self._queue, (key, next(self._count), level, candidate))
        else:
            self.lost.append(candidate)
        return fits


def told(candidate: Candidate, best: Candidate, limit_bytes: int | None) -> Candidate:
    """The candidate with the reason it lost to the best."""
    assert best.seconds is not None
    more = f"{candidate.likely_seconds / best.seconds - 1:.1%} longer" if best.seconds else "longer"
    if candidate.peak_bytes is not None and limit_bytes is not None and candidate.peak_bytes > limit_bytes:
        return replace(candidate, why=f"needs {human_bytes(candidate.peak_bytes)} on a rank")
    if candidate.likely_seconds < best.seconds:
        how = "not simulated" if candidate.seconds is None else "not rehearsed"
        return replace(candidate, why=f"{how}: others promised more")
    if candidate.seconds is not None:
        return replace(candidate, why=more)
    return replace(candidate, why=f"about {more}" if candidate.estimated_seconds else f"at least {more}")


def _nothing_fits(lost: list[Candidate], wishes: Wishes) -> CompileError:
    simulated = [candidate for candidate in lost if candidate.peak_bytes is not None]
    if not simulated:
        return CompileError(
            f"no way to use world_size={wishes.world_size} with data_parallel={wishes.data_parallel}, "
            f"stages={wishes.stages}, microbatches={wishes.microbatches}, {wishes.batch_size} samples; leave some open"
        )
    least = min(simulated, key=lambda c: (c.seconds is None, c.peak_bytes))
    at_least = "at least " if least.seconds is None else ""
    return NothingFits(
        f"no plan fits into memory_limit={human_bytes(wishes.memory_limit_bytes or 0)} per rank: the least needed is "
        f"{at_least}{human_bytes(least.peak_bytes or 0)} ({least.outcome}); use more ranks, smaller batches, or a "
        "higher limit"
    )
