"""What a candidate would take, looked at ever more closely.

    bound      compute alone                                    before anything is placed
    placed     stages on ranks; the busiest port                thousands a second
    ordered    the order it is named after, and its memory      hundreds a second
    walked     with messages that share links                   tens a second
    filled     the same, with the next batch's frozen work
    whole      all ranks, where some stood for others

The seconds of each step are at most those of the next, so the search may stop where the least is the last. Frozen work
that is looked at anew, on other ranks, begins with the bound of its candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from fxpipe.plan.schedule import Schedule
from passes.case import Case
from passes.placement.frozen_ranks import home_ranks
from passes.tuner.ahead import AheadFill
from passes.tuner.bounds import ordered_seconds
from passes.tuner.memory import most
from passes.tuner.orders import Orders
from passes.tuner.placements import Placements
from passes.tuner.request import Request
from passes.tuner.room import Room
from passes.tuner.simulate import Simulated, simulate, simulated
from passes.tuner.thrift import Thrift
from passes.tuner.trial import Trial
from passes.tuner.walks import Walks

_SLOWED = 1.02
"""By how much messages must slow a step for other places of frozen work to be looked at."""


class Trials:
    """Looks at candidates."""

    def __init__(self, case: Case, request: Request) -> None:
        self.case, self.request = case, request
        self.walks = Walks(case)
        self.thrift = Thrift(case, request, self.walks)
        self._placements, self._ahead = Placements(case, request), AheadFill(case, request, self.walks)

    def closer(self, trial: Trial) -> Iterator[Trial]:
        """The trial, known one step further; several where memory decides, none where nothing fits."""
        if trial.too_large is not None:
            yield from self.thrift.closer(trial)
        elif trial.staged is None:
            yield from self._placements.of(trial)
        elif not trial.is_ordered:
            yield from self._ordered(trial)
        elif trial.simulated is None:
            yield from self._walked(trial)
        elif trial.candidate.ahead and not trial.is_filled:
            yield from self._filled(trial)
        else:
            yield self._whole(trial)

    def fits(self, trial: Trial) -> bool:
        """Whether it does, as far as is known, or something that needs less is yet to be looked for."""
        return trial.needs is None or trial.too_large is not None or self.case.fits(trial.needs)

    def finished(self, trial: Trial, below: float = inf) -> Trial | None:
        """The fastest of all that becomes of a trial, fits, and is `below` as many seconds."""
        pending, best = [trial], None
        while pending:
            trial = pending.pop()
            if trial.bound_seconds >= below:
                continue
            for closer in filter(self.fits, self.closer(trial)):
                if not closer.done:
                    pending.append(closer)
                elif closer.bound_seconds < below:
                    best, below = closer, closer.bound_seconds
        return best

    def _ordered(self, trial: Trial) -> Iterator[Trial]:
        """In the order that the placement is named after."""
        orders, seconds = self.walks.orders(trial), trial.bound_seconds
        if orders.pipelines:
            seconds = max(seconds, ordered_seconds(self.case, trial.placed, orders.named_alone))
        yield replace(trial, is_ordered=True, bound_seconds=seconds)

    def _walked(self, trial: Trial) -> Iterator[Trial]:
        """The ranks of pipelines that stand for all; if what they hold does not fit, in ways to need less, too."""
        only = self.walks.first(trial)
        schedule = self.walks.order(trial, only)
        ops = self.walks.ops(trial, schedule, only)
        needs = most(self.walks.needs(trial, schedule, ops))
        found, known = simulated(self.case, schedule, ops), trial.bound_seconds
        if not self.case.fits(needs):
            yield self.thrift.too_large(replace(trial, needs=needs, bound_seconds=self._if_it_fitted(trial, found)))
            return
        trial = trial.known(found, done=only is None and not trial.candidate.ahead)
        if not self.fits(trial):
            bound = self._if_it_fitted(trial, found)
            yield self.thrift.too_large(replace(trial, bound_seconds=bound), found.peak_bytes - needs)
        elif trial.candidate.ahead:
            yield self._ahead.to_fill(trial, found)
        else:
            yield trial
            yield from self._at_home(trial, known)

    def _if_it_fitted(self, trial: Trial, training: Simulated) -> float:
        """The bound on a step, were there memory enough: what needs less takes no less time."""
        ahead = trial.candidate.ahead
        filled = self._ahead.seconds(trial, training, Room.everywhere(training.clock)) if ahead else training.seconds
        return max(trial.bound_seconds, filled)

    def _filled(self, trial: Trial) -> Iterator[Trial]:
        """In the trial's room; in ways that need less, if it does not fit."""
        assert trial.simulated is not None
        assert trial.room is not None
        found = self._ahead.filled(trial, trial.simulated, trial.room, self.walks.first(trial))
        if self.fits(found):
            yield found
            yield from self._at_home(found, trial.bound_seconds)
        else:
            yield self.thrift.too_large(replace(trial, needs=found.needs), self.walks.unseen(found))

    def _whole(self, trial: Trial) -> Trial:
        """What is known of some pipelines, of all."""
        step = self.walks.step(trial, self.walks.order(trial))
        return trial.known(step, done=True) if trial.room is None else self._ahead.filled_alike(trial, step)

    def _at_home(self, trial: Trial, known_seconds: float) -> Iterator[Trial]:
        """The same with frozen work where most of what it makes is read, if it takes longer than was known before its
        messages were: on slow links no sample's results need travel then."""
        if isinstance(self.request.schedule, Schedule) or trial.placed.frozen_ranks or not self.case.frozen.names:
            return
        if trial.bound_seconds > _SLOWED * known_seconds:
            ranks = home_ranks(self.case.graph, trial.placed)
            if len(ranks) < trial.placed.world_size:
                staged = replace(trial.placed, frozen_ranks=(ranks,) * len(self.case.frozen.names))
                yield Trial(trial.candidate, trial.candidate.bound_seconds, staged, is_thrifty=trial.is_thrifty)

    def with_its_step(self, trial: Trial) -> Trial:
        """With what a step on the same stages needs that does its own frozen work, where memory is limited."""
        if self.case.limit_bytes is None or not trial.candidate.ahead or not self.fits(trial):
            return trial
        alone = Orders(self.case, trial.placed, trial.candidate.microbatches, ahead=False).named()
        needs = simulate(self.case, trial.placed, alone, trial.sizes(self.case)).peak_bytes
        return replace(trial, needs=max(needs, trial.needs or 0))
