"""What is looked for at the end: orders of the placements in front, since a named one says little about what a better
one takes; and of the best alone, blocks that are recomputed, where stages begin, and sums of gradients.

named       4.562   4.624   3.751   3.766 s     walked, best first
searched    4.401     -     3.749   3.612       a part of the time for each of those that may still win
                                    3.608       all of it for the best
shifted                             3.571       receives are posted early, stages begin some blocks earlier or later
"""

from collections.abc import Iterator
from dataclasses import replace

from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged
from passes.placement.cascade import first_pass
from passes.placement.collocation import is_collocated
from passes.tuner.bounds import ordered_seconds
from passes.tuner.memory import totals
from passes.tuner.recompute import fitting_runs
from passes.tuner.search import RankedTrials
from passes.tuner.trial import Trial
from passes.tuner.trials import Trials

EARLY = 4
"""Actions ahead of its use that a receive may be posted. For the race's step 2 were worth less, and 8 and 16 no more on
links of 30 Mbit/s and faster."""
_MOVES = (1, -1, 2, -2, 4, -4)
"""Blocks by which the begin of a stage is moved. With the last two 3 of 18 folds of a U-Net are 1 to 2 % faster."""
_SHIFTED = 2
"""While stages are moved, one action is walked for so many that were before."""
_LARGEST = 3072
"""Actions of one pipeline beyond which searching costs more than it brings: a list schedule takes half a second."""
_MOST_SEARCHED = 4
"""Placements of either form of frozen work whose orders are searched for."""
_LEAST_ACTIONS = 1000
"""That may be walked for either of the last two, whatever was walked before."""
_SCATTERED = 20
"""While sums of gradients for every micro-batch are tried, with all ranks, the same as `_SHIFTED`."""
_AHEAD = 0.99
"""Of the seconds of a step that does its own frozen work: what one that does the next batch's may take. That holds a
batch of frozen values more and looks for changes of frozen weights: of two replicas, which have no idle time to fill,
steps were predicted alike, and took 1.02 s with the next batch's, 1.00 s with their own."""
_SLOWEST, _WORTH = 1.2, 0.99
"""Of the best's seconds: what a placement may take in its named order, and what it may take at least."""


def searched(trials: Trials, found: RankedTrials, budget_seconds: float) -> RankedTrials:
    """The found trials with searched orders, where these are faster."""
    contenders = _contenders(trials, found) if budget_seconds else []
    tried = {id(trial): trial for trial in found.ranked}
    best, chosen = found.best, found.best
    for trial in contenders:
        faster = _searched(trials, trial, budget_seconds / 2 / _MOST_SEARCHED, best.bound_seconds)
        if faster is not None:
            best, chosen = faster, trial
            tried[id(trial)] = faster
    if any(chosen is trial for trial in contenders):
        faster = _searched(trials, chosen, budget_seconds, best.bound_seconds)
        if faster is not None:
            best = tried[id(chosen)] = faster
    return RankedTrials(tuple(tried.values())).led_by(best, trials.case.limit_bytes)


def settled(trials: Trials, found: RankedTrials) -> RankedTrials:
    """The found trials, the best led by the fastest step that does its own frozen work, where doing the next batch's
    gains hardly anything."""
    own = next(
        (trial for trial in found.ranked if trial.done and not trial.candidate.ahead and trials.fits(trial)), None
    )
    if trials.request.fill != "auto" or not found.best.candidate.ahead or own is None:
        return found
    gains = found.best.bound_seconds < _AHEAD * own.bound_seconds
    return found if gains else found.led_by(own, trials.case.limit_bytes)


def shifted(trials: Trials, found: RankedTrials) -> RankedTrials:
    """The found trials, the best with receives posted early, and with stages that begin some blocks earlier or later,
    while that is faster: where they are cut best depends on idle time, frozen work and messages, of which `place` knows
    little."""
    if not _may_shift(trials, found.best):
        return found
    best, before, tried = found.best, None, {found.best.placed}
    most = trials.walks.num_actions + max(_LEAST_ACTIONS, trials.walks.num_actions // _SHIFTED)

    def faster(staged: Staged) -> Trial:
        """The best with these stages, if that is faster and there is time."""
        if staged in tried or trials.walks.num_actions > most:
            return best
        tried.add(staged)
        return _fitting(trials, _on(trials, best, staged), best.bound_seconds) or best

    while best is not before:
        before = best
        best = faster(replace(best.placed, prefetch=max(EARLY, best.placed.prefetch)))
        for staged in _neighbours(trials.case.graph, best.placed):
            best = faster(staged)
    return found if best is found.best else found.led_by(best, trials.case.limit_bytes)


def _may_shift(trials: Trials, trial: Trial) -> bool:
    """Whether stages of its shape may be cut anywhere."""
    case, shape = trials.case, trial.candidate.shape
    passes = trials.request.conditioning is not None or first_pass(case.graph, case.costs)
    return shape.places > 1 and not shape.is_opposite and not passes


def _neighbours(graph: BlockGraph, staged: Staged) -> Iterator[Staged]:
    """With a stage that begins some blocks earlier or later; of a fold that keeps skips on their ranks, with the stage
    on the way back that must then begin elsewhere, too. None is empty for it."""
    for number in range(1, staged.num_stages):
        now = staged.boundaries[number]
        for moved in (now + by for by in _MOVES):
            found = _moved(staged, number, moved)
            if found is None or not staged.collocated or is_collocated(graph, found):
                mirrored = found
            else:
                back = staged.num_stages - number
                nearest = sorted(range(len(graph.blocks)), key=lambda block: abs(block - staged.boundaries[back]))
                both = (_moved(found, back, block) for block in nearest)
                mirrored = next((each for each in both if each and is_collocated(graph, each)), None)
            if mirrored is not None:
                yield mirrored


def _moved(staged: Staged, number: int, begin: int) -> Staged | None:
    """With that stage beginning there; None where a stage would be empty."""
    before, after = staged.boundaries[number - 1], staged.boundaries[number + 1]
    boundaries = (*staged.boundaries[:number], begin, *staged.boundaries[number + 1 :])
    return staged.cut_at(boundaries) if before < begin < after else None


def _on(trials: Trials, trial: Trial, staged: Staged) -> Trial:
    """The trial on other stages, in its order if that is one for them, too."""
    count, work = trial.candidate.microbatches, trials.case.work
    found = Trial(trial.candidate, 0.0, staged)
    if trial.of_one is None or work.of(staged, count) != work.of(trial.placed, count):
        return found
    bound = ordered_seconds(trials.case, staged, trials.walks.orders(found).alone(trial.of_one))
    method = trial.method if staged.boundaries == trial.placed.boundaries else ""  # what it says is of these stages
    return replace(found, bound_seconds=bound, is_ordered=True, of_one=trial.of_one, method=method)


def refined(trials: Trials, found: RankedTrials) -> RankedTrials:
    """The found trials, the best with the blocks that are recomputed chosen again, with more effort, if that is
    faster."""
    best, case = found.best, trials.case
    always = trials.request.runs(best.placed.boundaries)
    if case.limit_bytes is None or isinstance(trials.request.recompute, bool) or best.placed.recompute == always:
        return found
    every, peaks = replace(best.placed, recompute=always), totals(trials.walks.peaks(best))
    limit = case.limit_bytes - trials.walks.unseen(best)
    staged = fitting_runs(case, every, best.sizes(case)[0], peaks, limit)
    faster = staged and _fitting(trials, Trial(best.candidate, 0.0, staged), best.bound_seconds)
    return found.led_by(faster, case.limit_bytes) if faster else found


def scattered(trials: Trials, found: RankedTrials) -> RankedTrials:
    """The found trials, the best with gradients of every micro-batch summed as they come, if that is faster."""
    best, staged = found.best, found.best.placed
    may = trials.request.shard is None and best.candidate.microbatches > staged.replicas > 1 and not staged.scattered
    actions = 4 * staged.num_stages * best.candidate.microbatches
    if not may or actions > max(_LEAST_ACTIONS, trials.walks.num_actions // _SCATTERED):
        return found
    if not trials.walks.orders(best).pipelines or trials.thrift.saved_seconds(best) <= 0:
        return found
    shared = staged.sharing("all" if staged.gathered else "gradients")
    faster = _fitting(trials, _on(trials, best, shared), best.bound_seconds)
    return found.led_by(faster, trials.case.limit_bytes) if faster else found


def _contenders(trials: Trials, found: RankedTrials) -> list[Trial]:
    """The best, and others that a better order could make the best: of either form of frozen work, one of as many
    stages on the same ranks. Some were not walked, for their named order could not win."""
    best = found.best.bound_seconds
    contenders: dict[bool, dict[tuple[object, ...], Trial]] = {False: {}, True: {}}
    for trial in found.ranked:
        near = trial.bound_seconds <= _SLOWEST * best and trial.candidate.bound_seconds < _WORTH * best
        if near and trial.is_ordered and trial.too_large is None and trials.fits(trial) and _may_search(trials, trial):
            key = trial.placed.stage_ranks, trial.candidate.microbatches
            contenders[trial.candidate.ahead].setdefault(key, trial)
    return [trial for of_form in contenders.values() for trial in list(of_form.values())[:_MOST_SEARCHED]]


def _may_search(trials: Trials, trial: Trial) -> bool:
    """Whether an order can be searched for: of equal pipelines of several ranks, whose passes are all made."""
    orders, shape = trials.walks.orders(trial), trial.candidate.shape
    if not orders.pipelines or shape.places == 1 or trials.request.conditioning is not None:
        return False
    return 2 * shape.stages * trial.candidate.microbatches <= _LARGEST * len(shape.pipelines)


def _searched(trials: Trials, trial: Trial, budget_seconds: float, below: float) -> Trial | None:
    """The same placement by an order that is searched for, with receives posted early if that is faster; None where
    nothing of it fits and is `below` as many seconds."""
    orders = trials.walks.orders(trial)
    needed = [needs.total for needs in trials.walks.peaks(trial)(trial.placed)[1]]
    of_one, method = orders.searched(budget_seconds, trials.case.limit_bytes, needed)
    bound = ordered_seconds(trials.case, trial.placed, orders.alone(of_one))
    found = Trial(trial.candidate, bound, trial.placed, True, of_one, method=method)
    faster = _fitting(trials, found, below)
    early = replace(found, staged=replace(trial.placed, prefetch=EARLY))
    return _fitting(trials, early, below if faster is None else faster.bound_seconds) or faster


def _fitting(trials: Trials, trial: Trial, below: float) -> Trial | None:
    """What becomes of a trial as it is, if it fits with its step, and is `below` as many seconds."""
    found = trials.finished(replace(trial, is_thrifty=True), below)
    with_step = None if found is None else trials.with_its_step(found)
    return with_step if with_step is not None and trials.fits(with_step) else None
