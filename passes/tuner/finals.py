"""Orders that are searched for: of the placements in front, since a named order says little about what a better one
takes.

named       4.562   4.624   3.751   3.766 s     walked, best first
searched    4.401     -     3.749   3.612       a part of the time for each of those that may still win
                                    3.608       all of it for the best
"""

from dataclasses import replace

from passes.tuner.search import Found, told_of
from passes.tuner.trial import Trial
from passes.tuner.trials import Trials

_MOST_SEARCHED = 4
"""Placements of either form of frozen work whose orders are searched for."""
_FEW_ACTIONS, _SMALL_SHARE = 1000, 20
"""Of a step whose gradients are tried to be summed for every micro-batch, which is walked with all its ranks: few, or a
small part of all that was walked before."""
_SLOWEST, _WORTH = 1.2, 0.99
"""Of the best's seconds: what a placement may take in its named order, and what it may take at least."""


def finals(trials: Trials, found: Found, budget_seconds: float) -> Found:
    """The found trials with searched orders, where these are faster."""
    contenders = _contenders(trials, found)
    if not budget_seconds or not contenders:
        return found
    tried = {id(trial): trial for trial in found.ranked}
    best, named = found.best, found.best
    for trial in contenders:
        searched = trials.searched(trial, budget_seconds / 2 / _MOST_SEARCHED, best.bound_seconds)
        if searched is not None:
            best = tried[id(trial)] = searched
            named = trial
    if any(named is trial for trial in contenders):
        searched = trials.searched(named, budget_seconds, best.bound_seconds)
        if searched is not None:
            best = tried[id(named)] = searched
    others = [replace(trial, why="") for trial in tried.values() if trial is not best]
    told = [told_of(trial, best, trials.case.limit_bytes) for trial in others]
    return Found((best, *sorted(told, key=lambda each: each.bound_seconds)))


def scattered(trials: Trials, found: Found) -> Found:
    """The found trials, the best with gradients of every micro-batch summed as they come, if that is faster."""
    best = found.best
    actions = 4 * best.placed.num_stages * best.candidate.microbatches
    if actions > max(_FEW_ACTIONS, trials.walked // _SMALL_SHARE):
        return found
    faster = trials.scattered(best, best.bound_seconds)
    if faster is None:
        return found
    told = [told_of(replace(trial, why=""), faster, trials.case.limit_bytes) for trial in found.ranked]
    return Found((faster, *told))


def _contenders(trials: Trials, found: Found) -> list[Trial]:
    """The best, and others that a better order could make the best: of either form of frozen work, one of every
    placement. Some were not walked, for their named order could not win."""
    best = found.best.bound_seconds
    contenders: dict[bool, dict[tuple[object, ...], Trial]] = {False: {}, True: {}}
    for trial in found.ranked:
        near = trial.bound_seconds <= _SLOWEST * best and trial.candidate.bound_seconds < _WORTH * best
        if near and trial.is_ordered and trial.too_large is None and trials.fits(trial) and trials.may_search(trial):
            key = replace(trial.placed, schedule=""), trial.candidate.microbatches
            contenders[trial.candidate.ahead].setdefault(key, trial)
    return [trial for of_form in contenders.values() for trial in list(of_form.values())[:_MOST_SEARCHED]]
