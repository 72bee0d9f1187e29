"""Trials' steps, action by action: their orders, what every rank needs in them, and their seconds.

8 equal pipelines in 8 nodes    ->    the first is walked and stands for all: `first`
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged, trains_alike
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.step_ops import step_ops
from passes.tuner.memory import Needs, Peaks, most, needs_of
from passes.tuner.orders import Orders
from passes.tuner.simulate import Simulated, simulated
from passes.tuner.stand_ins import stand_ins
from passes.tuner.trial import Trial

Form = tuple[Staged, int, bool]
"""Stages, micro-batches, and whether frozen work is the next batch's."""


class Walks:
    """Equal orders are made once; `num_actions` are those of all that were walked."""

    def __init__(self, case: Case) -> None:
        self.case, self.num_actions = case, 0
        self._orders_of: dict[Form, Orders] = {}
        self._needs: dict[Form, tuple[Schedule, list[Needs]]] = {}
        self._stand_ins: dict[tuple[tuple[int, ...], ...], list[int]] = {}

    def orders(self, trial: Trial) -> Orders:
        """Those that its stages may have; what replicas share out, and when receives are posted, is no matter."""
        stages = replace(trial.placed.sharing("none"), prefetch=1)
        key = staged, count, ahead = _form(trial, stages)
        if key not in self._orders_of:
            self._orders_of[key] = Orders(self.case, staged, count, ahead)
        return self._orders_of[key]

    def order(self, trial: Trial, only: Sequence[int] | None = None) -> Schedule:
        """Of all ranks, or those of `only` these pipelines."""
        orders = self.orders(trial)
        if trial.schedule is not None or not orders.pipelines:
            return trial.schedule or orders.named()
        return orders.of_all(trial.of_one or orders.of_one, only, trial.placed.scattered)

    def first(self, trial: Trial) -> Sequence[int] | None:
        """The pipelines that stand for all; None where there are no others."""
        pipelines = tuple(self.orders(trial).pipelines)
        if trial.schedule is not None or not pipelines or trains_alike(trial.placed.shard):  # each holds others
            return None
        if pipelines not in self._stand_ins:
            self._stand_ins[pipelines] = stand_ins(self.case.cluster, pipelines)
        found = self._stand_ins[pipelines]
        return found if len(found) < len(pipelines) else None

    def ops(self, trial: Trial, schedule: Schedule, only: Sequence[int] | None = None) -> StepOps:
        """Of all ranks, or those of `only` these pipelines."""
        self.num_actions += sum(map(len, schedule.ranks))
        staged, pipelines = trial.placed, trial.placed.pipelines
        ranks = None if only is None else [rank for number in only for rank in pipelines[number]]
        return step_ops(self.case, staged, schedule, trial.sizes(self.case), only=ranks)

    def step(self, trial: Trial, schedule: Schedule, only: Sequence[int] | None = None) -> Simulated:
        """Of all ranks, or those of `only` these pipelines."""
        return simulated(self.case, schedule, self.ops(trial, schedule, only))

    def needs(self, trial: Trial, schedule: Schedule, ops: StepOps) -> list[Needs]:
        """Bytes per rank, if messages took no time; remembered of the named order."""
        found = needs_of(self.case, trial.placed, schedule, ops, trial.candidate.ahead)
        if trial.of_one is None and trial.schedule is None:
            self._needs[_form(trial, trial.placed)] = schedule, found
        return found

    def peaks(self, trial: Trial) -> Peaks:
        """Bytes per rank of the trial's shape with other stages."""

        def peaks(staged: Staged) -> tuple[Schedule, list[Needs]]:
            form = _form(trial, staged)
            if form not in self._needs:
                named = Trial(trial.candidate, 0.0, staged)
                only = self.first(named)
                schedule = self.order(named, only)
                self.needs(named, schedule, self.ops(named, schedule, only))
            return self._needs[form]

        return peaks

    def unseen(self, trial: Trial) -> int:
        """Bytes that a trial needs beside those of its training: of messages, frozen work, or its plain step."""
        return max(0, (trial.needs or 0) - most(self.peaks(trial)(trial.placed)[1]))


def _form(trial: Trial, staged: Staged) -> Form:
    return staged, trial.candidate.microbatches, trial.candidate.ahead
