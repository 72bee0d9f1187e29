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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged, trains_alike
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.fill.ahead import filled, groups
from passes.fill.per_device import no_fill, per_device
from passes.placement import buckets
from passes.placement.cascade import first_pass
from passes.placement.frozen_ranks import home_ranks
from passes.placement.place import Shape, balanced, place
from passes.step_ops import step_ops
from passes.tuner.bounds import (
    again_seconds,
    compute_seconds,
    filled_seconds,
    ordered_seconds,
    placed_seconds,
    reduction_seconds,
    shares_may_slow,
    sums_are_hidden,
)
from passes.tuner.memory import Needs, Peaks, made_bytes, most, needs_of, totals
from passes.tuner.orders import Orders
from passes.tuner.recompute import fitting_runs
from passes.tuner.request import Request
from passes.tuner.simulate import Simulated, simulate, simulated
from passes.tuner.stand_ins import stand_ins
from passes.tuner.thrift import Thrift
from passes.tuner.trial import Filler, Room, TooLarge, Trial, Way

_SLOWED = 1.02
"""By how much messages must slow a step for other places of frozen work to be looked at."""
_LARGEST = 3072
"""Actions of one pipeline beyond which searching costs more than it brings: a list schedule takes half a second."""
_MOST_ROOMS = 1
"""Rooms for frozen work that are tried, the most promising ones."""


class Trials:
    """Looks at candidates; equal placements are made once. `walked` are the actions of all orders that were; only steps
    `below` as many seconds are still wanted."""

    def __init__(self, case: Case, request: Request) -> None:
        self.case, self.request = case, request
        self._placed: dict[tuple[object, ...], Sequence[Staged]] = {}
        self._needs: dict[tuple[Staged, int, bool], tuple[Schedule, list[Needs]]] = {}
        self.walked, self.below = 0, inf
        self._thrift = Thrift(case, request, self._peaks, self._ways_to_share)
        self._orders_of: dict[tuple[Staged, int, bool], Orders] = {}
        self._bounds: dict[tuple[int, int], float] = {}
        self._stand_ins: dict[tuple[tuple[int, ...], ...], list[int]] = {}

    def closer(self, trial: Trial) -> Iterator[Trial]:
        """The trial, known one step further; several where memory decides, none where nothing fits."""
        if trial.too_large is not None:
            yield from self._thrift.closer(trial, self.below)
        elif trial.staged is None:
            yield from self._place(trial)
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

    def may_search(self, trial: Trial) -> bool:
        """Whether an order can be searched for: of equal pipelines of several ranks, whose passes are all made."""
        orders, shape = self._orders(trial), trial.candidate.shape
        if not orders.pipelines or shape.places == 1 or self.request.conditioning is not None:
            return False
        return 2 * shape.stages * trial.candidate.microbatches <= _LARGEST * len(shape.pipelines)

    def searched(self, trial: Trial, budget_seconds: float, below: float) -> Trial | None:
        """The same placement by an order that is searched for; None where nothing of it fits and is `below` as many
        seconds."""
        orders = self._orders(trial)
        needed = [needs.total for needs in self._peaks(trial)(trial.placed)[1]]
        of_one, method = orders.searched(budget_seconds, self.case.limit_bytes, needed)
        bound = ordered_seconds(self.case, trial.placed, orders.alone(of_one))
        return self._fitting(Trial(trial.candidate, bound, trial.placed, True, of_one, method=method), below)

    def refined(self, trial: Trial) -> Trial | None:
        """The same placement with the blocks that are recomputed chosen again, with more effort; None where that is no
        faster."""
        limit, size, placed = self.case.limit_bytes, trial.sizes(self.case)[0], trial.placed
        always = self.request.runs(placed.boundaries)
        if limit is None or isinstance(self.request.recompute, bool) or placed.recompute == always:
            return None
        every, peaks = replace(placed, recompute=always), totals(self._peaks(trial))
        staged = fitting_runs(self.case, every, size, peaks, limit - self.unseen(trial))
        return None if staged is None else self._fitting(Trial(trial.candidate, 0.0, staged), trial.bound_seconds)

    def _fitting(self, trial: Trial, below: float) -> Trial | None:
        """What becomes of a trial as it is, if it fits with its step, and is `below` as many seconds."""
        found = self.finished(replace(trial, is_thrifty=True), below)
        with_step = None if found is None else self.with_its_step(found)
        return with_step if with_step is not None and self.fits(with_step) else None

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

    def _ops(self, trial: Trial, schedule: Schedule, only: Sequence[int] | None = None) -> StepOps:
        """Of all ranks, or those of `only` these pipelines."""
        self.walked += sum(map(len, schedule.ranks))
        staged, pipelines = trial.placed, trial.placed.pipelines
        ranks = None if only is None else [rank for number in only for rank in pipelines[number]]
        return step_ops(self.case, staged, schedule, trial.sizes(self.case), only=ranks)

    def _first(self, trial: Trial) -> Sequence[int] | None:
        """The pipelines that stand for all; None where there are no others."""
        pipelines = tuple(self._orders(trial).pipelines)
        if trial.schedule is not None or not pipelines or trains_alike(trial.placed.shard):  # each holds others
            return None
        if pipelines not in self._stand_ins:
            self._stand_ins[pipelines] = stand_ins(self.case.cluster, pipelines)
        found = self._stand_ins[pipelines]
        return found if len(found) < len(pipelines) else None

    def _order(self, trial: Trial, only: Sequence[int] | None = None) -> Schedule:
        """Of all ranks, or those of `only` these pipelines."""
        orders = self._orders(trial)
        if trial.schedule is not None or not orders.pipelines:
            return trial.schedule or orders.named()
        return orders.of_all(trial.of_one or orders.of_one, only, trial.placed.scattered)

    def _orders(self, trial: Trial) -> Orders:
        staged, candidate = trial.placed.sharing("none"), trial.candidate
        key = staged, candidate.microbatches, candidate.ahead
        if key not in self._orders_of:
            self._orders_of[key] = Orders(self.case, staged, candidate.microbatches, candidate.ahead)
        return self._orders_of[key]

    def _place(self, trial: Trial) -> Iterator[Trial]:
        shape, case = trial.candidate.shape, self.case
        for staged in self._stages(trial):
            if not shape.hard and staged.collocated and self.request.collocation != "soft":
                continue  # free skips that all stay on their ranks: the hard placement
            recompute = self.request.runs(staged.boundaries)
            placed = replace(
                staged, schedule=shape.schedule, recompute=recompute, offloaded=bool(self.request.offload_optimizer)
            )
            for found in self._shared_out(placed, trial.sizes(case)):
                sums = reduction_seconds(case, found, trial.candidate.microbatches)
                bounds = trial.bound_seconds, self._of_stages(staged, trial), sums
                yield replace(trial, staged=found, bound_seconds=max(bounds))

    def _of_stages(self, staged: Staged, trial: Trial) -> float:
        """The bound that stages on ranks have in whatever order, computed once."""
        sizes = trial.sizes(self.case)
        key = id(staged), len(sizes)  # one of `_placed`
        if key not in self._bounds:
            self._bounds[key] = placed_seconds(self.case, staged, sizes)
        return self._bounds[key]

    def _shared_out(self, staged: Staged, sizes: Sequence[int]) -> Sequence[Staged]:
        """What replicas of a stage share out; several where that is open and may be slower. Weights, and gradients of
        every micro-batch, only where that is asked for, and all replicas have as many micro-batches."""
        asked, nothing, states = self.request.shard, staged, staged.sharing("optimizer")
        if staged.replicas == 1 or asked == "none":
            return (nothing,)
        if asked is not None and trains_alike(asked):
            even = staged.pipelines and len(sizes) % staged.replicas == 0
            return (staged.sharing(asked).summed_for(len(sizes)),) if even else ()
        return (states, nothing) if asked is None and shares_may_slow(self.case, staged, sizes[-1]) else (states,)

    def _stages(self, trial: Trial) -> Sequence[Staged]:
        """The stages of the trial's shape: as `place` has them; lines also balanced by time alone, single ranks also in
        buckets."""
        shape, case, size = trial.candidate.shape, self.case, trial.sizes(self.case)[0]
        key = (replace(shape, schedule=""), shape.is_folded, shape.is_opposite, size)
        if key not in self._placed:
            times = case.costs.at(size)
            found = place(case.graph, case.costs, times, shape, case.cluster, trial.candidate.microbatches)
            even = balanced(case.graph, case.costs, times, shape)
            others = [*([] if even is None else [even]), *self._bucketed(shape, found)]
            self._placed[key] = tuple({staged.boundaries: staged for staged in (*reversed(others), found)}.values())
        return self._placed[key]

    def _bucketed(self, shape: Shape, staged: Staged) -> Iterator[Staged]:
        """For pipelines of one rank: stages of equal gradients, and as data parallel training has them; none of both
        passes, of which the first may be left out."""
        costs, asked = self.case.costs, self.request
        if shape.places > 1 or shape.stages == 1 or asked.stages is not None or not asked.is_open:
            return
        for size in (sum(costs.trained_bytes) / shape.stages, buckets.BUCKET_BYTES):
            boundaries = tuple(sorted({*buckets.buckets(costs, size), first_pass(self.case.graph, costs)}))
            yield replace(staged, boundaries=boundaries, stage_ranks=staged.stage_ranks[:1] * (len(boundaries) - 1))

    def _ordered(self, trial: Trial) -> Iterator[Trial]:
        """In the order that the placement is named after."""
        orders, candidate, seconds = self._orders(trial), trial.candidate, trial.bound_seconds
        if orders.pipelines:
            seconds = max(seconds, ordered_seconds(self.case, trial.placed, orders.named_alone))
            if not isinstance(self.request.recompute, bool):
                least = trial.placed.sharing("all") if self._ways_to_share(trial) else trial.placed
                again = again_seconds(self.case, least, orders.of_one, trial.sizes(self.case)[-1])
                with_it = compute_seconds(self.case, candidate.shape, candidate.microbatches, candidate.ahead, again)
                seconds = max(seconds, with_it)
        yield replace(trial, is_ordered=True, bound_seconds=seconds)

    def too_large(self, trial: Trial, unseen: int = 0) -> Trial:
        """A trial that does not fit, whose placement may be had in less memory; `unseen` bytes are left, of messages in
        flight and frozen work. Its bound is that of a step in which replicas add up shares of gradients, if they may.
        """
        if self.case.limit_bytes is None or trial.is_thrifty:
            return trial
        saved = self._saved_seconds(trial) if self._ways_to_share(trial) else 0.0
        bound = trial.bound_seconds - saved
        return replace(trial, done=False, bound_seconds=bound, too_large=TooLarge(unseen, saved_seconds=saved))

    def _saved_seconds(self, trial: Trial) -> float:
        """What replicas may save that add up shares of their micro-batches' gradients, in all stages of a pipeline."""
        staged, sums = trial.placed, trial.candidate.microbatches // trial.placed.replicas - 1
        sizes = (sum(self.case.costs.trained_bytes[b] for b in staged.blocks(s)) for s in range(staged.num_stages))
        return sums * sum(self.case.adding_seconds(size) for size in sizes) if sums else 0.0

    def scattered(self, trial: Trial, below: float) -> Trial | None:
        """The same step with gradients of every micro-batch summed as they come; None where that may not be, does not
        fit, or is not `below` as many seconds."""
        placed = trial.placed
        may = self.request.shard is None and trial.candidate.microbatches > placed.replicas > 1
        if not may or placed.scattered or not self._orders(trial).pipelines:
            return None
        if trial.bound_seconds - self._saved_seconds(trial) >= below:
            return None
        staged = placed.sharing("all" if placed.gathered else "gradients")
        return self._fitting(Trial(trial.candidate, 0.0, staged, True, trial.of_one, method=trial.method), below)

    def _ways_to_share(self, trial: Trial) -> tuple[str, ...]:
        """What replicas may yet share out, of `SHARDS`, the fastest first; of one micro-batch each, weights.

        The other one is for what the first leaves open: of gradients of every micro-batch that are summed while the
        next is computed all, or without gathers, if there is room; of those that are not only if there is none.
        """
        placed, count = trial.placed, trial.candidate.microbatches
        is_open = self.request.shard is None and placed.replicas > 1 and not trains_alike(placed.shard)
        if not is_open or not self._orders(trial).pipelines:
            return ()
        if count == placed.replicas:
            return ("weights",)
        return ("all", "gradients") if sums_are_hidden(self.case, placed, count) else ("weights", "all")

    def unseen(self, trial: Trial) -> int:
        """Bytes that a trial needs beside those of its training: of messages, frozen work, or its plain step."""
        return max(0, (trial.needs or 0) - most(self._peaks(trial)(trial.placed)[1]))

    def _peaks(self, trial: Trial) -> Peaks:
        """Bytes per rank of the trial's shape with other stages."""

        def peaks(staged: Staged) -> tuple[Schedule, list[Needs]]:
            key = staged, trial.candidate.microbatches, trial.candidate.ahead
            if key not in self._needs:
                named = Trial(trial.candidate, 0.0, staged)
                only = self._first(named)
                schedule = self._order(named, only)
                ops = self._ops(named, schedule, only)
                self._needs[key] = schedule, needs_of(self.case, staged, schedule, ops, trial.candidate.ahead)
            return self._needs[key]

        return peaks

    def _walked(self, trial: Trial) -> Iterator[Trial]:
        """The ranks of pipelines that stand for all; if what they hold does not fit, in ways to need less, too."""
        only = self._first(trial)
        schedule = self._order(trial, only)
        ops = self._ops(trial, schedule, only)
        of_ranks = needs_of(self.case, trial.placed, schedule, ops, trial.candidate.ahead)
        if trial.of_one is None and trial.schedule is None:
            self._needs[trial.placed, trial.candidate.microbatches, trial.candidate.ahead] = schedule, of_ranks
        needs = most(of_ranks)
        found, known = simulated(self.case, schedule, ops), trial.bound_seconds
        if not self.case.fits(needs):
            yield self.too_large(replace(trial, needs=needs, bound_seconds=self._if_it_fitted(trial, found)))
            return
        trial = _known(trial, found, done=only is None and not trial.candidate.ahead)
        if not self.fits(trial):
            bound = self._if_it_fitted(trial, found)
            yield self.too_large(replace(trial, bound_seconds=bound), found.peak_bytes - needs)
        elif trial.candidate.ahead:
            yield from self._to_fill(trial, found)
        else:
            yield trial
            yield from self._at_home(trial, known)

    def _if_it_fitted(self, trial: Trial, training: Simulated) -> float:
        """The bound on a step, were there memory enough: what needs less takes no less time."""
        ahead = trial.candidate.ahead
        filled = self._filled_seconds(trial, training, Room.everywhere(training.clock)) if ahead else training.seconds
        return max(trial.bound_seconds, filled)

    def _to_fill(self, trial: Trial, training: Simulated) -> Iterator[Trial]:
        """The next batch's frozen work, in whichever idle time there is room for as many samples at once as promise
        most; "after" the training only the last idle time counts."""
        how = no_fill if self.request.fill == "after" else per_device
        for room in self._rooms(trial, training)[:_MOST_ROOMS]:
            bound = self._filled_seconds(trial, training, room, how)
            yield replace(trial, way=Way(how, room), bound_seconds=max(trial.bound_seconds, bound))

    def _filled_seconds(self, trial: Trial, training: Simulated, room: Room, how: Filler = per_device) -> float:
        idle = room.idle_seconds if how is per_device else (0.0,) * self.case.world_size
        walked = [*groups(trial.placed, trial.sizes(self.case), training.schedule)]
        return filled_seconds(self.case, walked, training.seconds, idle, room.most)

    def _rooms(self, trial: Trial, training: Simulated) -> list[Room]:
        """Idle time by what frozen work may take in it, that which promises the shortest step first."""
        case, staged, limit = self.case, trial.placed, self.case.limit_bytes
        if limit is None:
            return [Room.everywhere(training.clock)]
        weights, made = case.costs.component_bytes, made_bytes(case, staged, case.batch_size)
        left = [
            limit - made[rank] - sum(w for c, w in enumerate(weights) if staged.may_run(c, rank))
            for rank in range(staged.world_size)
        ]
        sizes = [case.batch_size, *(2**k for k in reversed(range((case.batch_size - 1).bit_length())))]
        rooms = [Room.within(training.clock, left, case.frozen.most_bytes(size)) for size in sizes]
        fitting = [room for room in rooms if room is not None] or [Room.everywhere(training.clock, 0.0)]
        return sorted(fitting, key=lambda room: self._filled_seconds(trial, training, room))

    def _filled(self, trial: Trial) -> Iterator[Trial]:
        """By the trial's way; in ways that need less, if it does not fit."""
        assert trial.simulated is not None
        assert trial.way is not None
        found = self._with(trial, trial.simulated, trial.way, self._first(trial))
        if self.fits(found):
            yield found
            yield from self._at_home(found, trial.bound_seconds)
        else:
            yield self.too_large(replace(trial, needs=found.needs), self.unseen(found))

    def with_its_step(self, trial: Trial) -> Trial:
        """With what a step on the same stages needs that does its own frozen work, where memory is limited."""
        if self.case.limit_bytes is None or not trial.candidate.ahead or not self.fits(trial):
            return trial
        alone = Orders(self.case, trial.placed, trial.candidate.microbatches, ahead=False).named()
        needs = simulate(self.case, trial.placed, alone, trial.sizes(self.case)).peak_bytes
        return replace(trial, needs=max(needs, trial.needs or 0))

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

    def _with(self, trial: Trial, training: Simulated, way: Way, only: Sequence[int] | None) -> Trial:
        """Frozen work on as many samples at once as there is room for, of `only` these pipelines."""
        case, staged, sizes = self.case, trial.placed, trial.sizes(self.case)
        before = replace(training.training, idle=way.room.idle)
        schedule = filled(before, case.frozen, staged, sizes, way.how, way.room.most, not case.divisible)
        found = simulated(case, schedule, self._ops(trial, schedule, only))
        return _known(replace(trial, is_filled=True), found, done=only is None)

    def _whole(self, trial: Trial) -> Trial:
        """What is known of some pipelines, of all."""
        schedule, way = self._order(trial), trial.way
        step = simulated(self.case, schedule, self._ops(trial, schedule))
        if way is None:
            return _known(trial, step, done=True)
        room = next((room for room in self._rooms(trial, step) if room.most == way.room.most), None)
        return self._with(trial, step, replace(way, room=room or Room.everywhere(step.clock, 0.0)), None)


def _known(trial: Trial, found: Simulated, done: bool) -> Trial:
    bound = max(trial.bound_seconds, found.seconds)
    return replace(trial, simulated=found, needs=found.peak_bytes, done=done, bound_seconds=bound)
