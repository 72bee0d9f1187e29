"""Best first: the trial with the least bound is looked at more closely, until the one in front is known in full.

bound     1.61   1.62   1.64   1.70   ...        all candidates
walked    1.66   1.63   1.69                     1.63 is the best: nothing else can be shorter than 1.64
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from passes.tuner.candidates import Candidate, no_way
from passes.tuner.trial import Trial
from passes.tuner.trials import Trials

_MOST_ACTIONS = 200_000
"""Actions that are walked for either form of frozen work: some 25 seconds of a core. What is left then is not walked,
once something that was has been found to fit."""

_WORTH = 0.005
"""Of the best's seconds: what does not fit and would gain less, were there memory enough, is not looked for in less."""

_SAME = 0.0005
"""Of the best's seconds: less than this is not told as a difference."""


class NothingFits(CompileError):
    """Every candidate needs more memory than there may be."""


@dataclass(frozen=True)
class RankedTrials:
    """The best trial first, then the others, the fastest first; those that did not fit among them."""

    ranked: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        return self.ranked[0]

    def led_by(self, best: Trial, limit_bytes: int | None) -> "RankedTrials":
        """The same with another trial in front, and what all others lose by."""
        told = [_told(trial, best, limit_bytes) for trial in self.ranked if trial is not best]
        return RankedTrials((replace(best, why=""), *sorted(told, key=lambda each: each.bound_seconds)))


def search(trials: Trials, candidates: Iterable[Candidate]) -> RankedTrials:
    """The trial that is fastest of those that fit into memory.

    Raises:
        CompileError: there is no candidate, or none fits; says which would need least.
    """
    heap: list[tuple[float, int, Trial]] = []
    number, known = count(), list[Trial]()

    def push(trial: Trial) -> None:
        heappush(heap, (trial.bound_seconds, next(number), trial))

    lost, every = list[Trial](), list(candidates)
    for ahead in (False, True):  # its own frozen work first: that needs least memory, and rules out most of the others
        most = trials.walks.num_actions + _MOST_ACTIONS
        for candidate in every:
            if candidate.ahead is ahead:
                push(Trial(candidate, candidate.bound_seconds))
        while heap and not (known and (heap[0][0] >= known[0].bound_seconds or trials.walks.num_actions > most)):
            trial = _next(heap, trials.walks.num_actions > most)
            if known and trial.too_large and trial.bound_seconds > (1 - _WORTH) * known[0].bound_seconds:
                lost.append(trial)
                continue
            for closer in trials.closer(trial):
                if closer.done and (not known or closer.bound_seconds < known[0].bound_seconds):
                    closer = trials.with_its_step(closer)
                    if not trials.fits(closer):
                        closer = trials.thrift.too_large(closer, trials.walks.unseen(closer))
                if not trials.fits(closer):
                    lost.append(closer)
                elif closer.done:
                    known = sorted([*known, closer], key=lambda each: each.bound_seconds)
                else:
                    push(closer)
    if not known:
        raise _nothing_fits(lost, trials)
    return RankedTrials((*known, *lost, *(trial for *_, trial in heap))).led_by(known[0], trials.case.limit_bytes)


def _next(heap: list[tuple[float, int, Trial]], spent: bool) -> Trial:
    """The trial in front; of a search that has `spent` its actions the first that was walked, if any: it is finished
    before others that may be faster."""
    walked = (each for each in heap if each[-1].simulated is not None and each[-1].too_large is None)
    found = min(walked, default=None) if spent else None
    if found is None:
        return heappop(heap)[-1]
    heap.remove(found)
    heapify(heap)
    return found[-1]


def _told(trial: Trial, best: Trial, limit_bytes: int | None) -> Trial:
    """The trial with the reason it lost to the best."""
    longer = trial.bound_seconds / best.bound_seconds - 1 if best.bound_seconds else 0.0
    if trial.needs is not None and limit_bytes is not None and trial.needs > limit_bytes:
        return replace(trial, why=f"needs {human_bytes(trial.needs)} on a rank")
    if trial.bound_seconds < best.bound_seconds:
        gain = f"{-longer:.1%} shorter, too little for a batch of frozen work more"
        return replace(trial, why=gain if trial.done else "not simulated: others promised more")
    more = f"{longer:.1%} longer" if longer >= _SAME else "as long"
    return replace(trial, why=more if trial.done else f"at least {more}")


def _nothing_fits(lost: list[Trial], trials: Trials) -> CompileError:
    request, limit = trials.request, trials.case.limit_bytes
    if not lost:
        return no_way(request)
    least = min(lost, key=lambda trial: trial.needs or 0)
    return NothingFits(
        f"no plan fits into memory_limit={human_bytes(limit or 0)} per rank: the least tried needs "
        f"{human_bytes(least.needs or 0)} ({least.outcome}); use more ranks, smaller batches, or a higher limit"
    )
