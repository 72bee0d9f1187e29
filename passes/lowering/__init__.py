"""Lowering: from a schedule to one straight-line program per rank. Nothing is decided here.

    rank 0: 0F0 0B0         begin 0F0; h, saved = stage_0_forward(x); send h; begin 0B0; g = wait; stage_0_backward(...)
    rank 1: 1F0 1B0   ->    begin 1F0; h = wait; loss, saved = stage_1_forward(h); begin 1B0; g = ...; send g

    borders          what every unit reads, gives and trains, told from the capture; nothing is traced
    layout           who runs what, and what follows the last action; messages before it are `passes.step_ops.messages`
    stage_graphs     forward and explicit backward of the units that the wanted ranks run, traced
    state_updates    what forward writes into the model's own tensors, which runs before and after the programs
    program_writer   one rank's actions as a graph; receives and sums are those of plans, `passes.step_ops.exchange`
    moments          an order of all sends that no rank can hold up, which every program is checked against

A step has four forms: a "step" has its frozen work among its actions; where that is done in the step before there are a
"prologue" (frozen work of the first batch), "steady" (training, and frozen work of the next batch) and an "epilogue"
(training on the last batch).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

from fxpipe.plan.actions import Action, Work
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.rank_program import Gathering, Message, RankProgram, Reduction
from fxpipe.plan.schedule import Schedule
from passes.lowering.frozen import FrozenWork
from passes.lowering.layout import (
    Exchanged,
    UnitLayout,
    closing,
    later_turns,
    own_parameters,
    plan_gatherings,
    plan_reductions,
    tied_gradients,
)
from passes.lowering.moments import by_arrival, moments
from passes.lowering.program_writer import ProgramWriter
from passes.lowering.rank_writer import RankMail, RankWriter, sorted_mail
from passes.lowering.step_graphs import StepGraphs
from passes.step_ops.exchange import TiedGradient
from passes.step_ops.messages import Routes
from passes.step_ops.sharding import owners
from passes.step_ops.turns import RankTurns, turns

Form = Literal["step", "prologue", "steady", "epilogue"]


@dataclass(frozen=True)
class Lowered:
    """Programs of the ranks that were wanted, in order; all messages, the reductions of gradients over replicas, and
    the gatherings of parameters that these share out.

    `sends` is an order in which all can be sent, `without` the same without the stages that may be left out.
    """

    programs: tuple[RankProgram, ...]
    messages: tuple[Message, ...]
    reductions: tuple[Reduction, ...]
    sends: SendOrder
    without: "Lowered | None" = None
    gatherings: tuple[Gathering, ...] = ()


def lower_form(
    step: StepGraphs,
    schedule: Schedule,
    form: Form = "step",
    ranks: Sequence[int] | None = None,
    optional: Collection[int] = (),
    following: Schedule | None = None,
    planned: Schedule | None = None,
) -> Lowered:
    """The programs of one form of a step.

    Args:
        schedule: every rank's actions: of a prologue pieces alone, of a steady step both, else training alone.
        ranks: those whose programs are wanted; all where left out.
        optional: stages of a first pass, which some steps leave out.
        following: of a prologue, the schedule of the step after it, whose stages read what is made here; where left
            out, micro-batches take turns on the replicas of a stage.
        planned: of a smaller batch, the order of the whole one: replicas gather the parameters that they share out as
            they do there, also where one has no samples.

    Raises:
        ScheduleError: the ranks of the schedule wait for each other.
        CompileError: a program is not what the messages say, which should be reported.
    """
    layout = _layout(step, schedule, form, following, planned)
    lowered = _Form(step, layout, layout, schedule, form).lower(ranks)
    if optional and form != "prologue":
        less = layout.without(optional)
        without = _Form(step, less, layout, less.schedule, form, frozenset(optional)).lower(ranks)
        return replace(lowered, without=without)
    return lowered


def _layout(
    step: StepGraphs, schedule: Schedule, form: Form, following: Schedule | None, planned: Schedule | None
) -> UnitLayout:
    """Who trains what: where frozen work is done in the step before, components are no units of this one."""
    units = {key: unit for key, unit in step.units.items() if form == "step" or key[0] == "F"}
    if form == "prologue":
        schedule = following or _in_turn(step)
    return UnitLayout(units, step.border, schedule, step.sizes, step.capture.result.name, planned or schedule)


def _in_turn(step: StepGraphs) -> Schedule:
    """The forwards alone, micro-batches in turn on the replicas of their stage."""
    staged, ranks = step.staged, list[list[Action]]([] for _ in range(step.staged.world_size))
    for _, stage in (key for key in step.units if key[0] == "F"):
        for microbatch in range(len(step.sizes)):
            replicas = staged.stage_ranks[stage]
            ranks[replicas[microbatch % len(replicas)]].append(Action(stage, "F", microbatch))
    return Schedule(staged.schedule, staged.num_stages, len(step.sizes), tuple(map(tuple, ranks)))


@dataclass(frozen=True, eq=False)
class _Form:
    """One form of a step, without the stages in `gone`. The step after it may have them: what is made for that one is
    what the stages of `whole` read."""

    step: StepGraphs
    layout: UnitLayout
    whole: UnitLayout
    schedule: Schedule
    form: Form
    gone: frozenset[int] = frozenset()

    @property
    def trains(self) -> bool:
        return self.form != "prologue"

    def lower(self, wanted: Sequence[int] | None) -> Lowered:
        frozen = None if self.form == "step" else FrozenWork.of(self.step, self.schedule, self.whole.schedule)
        staged, every = self.step.staged, own_parameters(self.whole, self.step.staged.gathered)
        trainers = owners(every, self.whole.summing.stage_ranks) if staged.sharded else {}  # whatever is `gone`
        own = {stage: of for stage, of in every.items() if of and stage not in self.gone} if self.trains else {}
        reduced = {name for of in own.values() for name in of}
        tied = tied_gradients(self.layout, self.whole, reduced) if self.trains else []
        messages = self._messages(tied, frozen)
        reductions = plan_reductions(self.layout, own, len(messages), trainers, staged.gathered)
        planned = self.layout.planned
        all_turns = turns(planned, self.step.gathered.keys() - self.gone) if self.trains else []
        first = len(messages) + 2 * len(self.schedule.stage_ranks)
        gatherings = plan_gatherings(all_turns, self.step.gathered, self.step.state, first)
        orders = enumerate(zip(planned.ranks, self.schedule.ranks, strict=True)) if gatherings else ()
        reductions += (*later_turns(reductions, planned, first + len(gatherings)),)
        of_rank = {rank: RankTurns.within(all_turns, rank, *order) for rank, order in orders}
        mail = sorted_mail(messages, range(len(self.schedule.ranks)) if wanted is None else wanted)
        exchanged = Exchanged(tied, reductions, gatherings, of_rank)
        programs = tuple(self._program(rank, mine, exchanged, frozen) for rank, mine in mail.items())
        order = moments(self.schedule, self._work(), self.layout, messages, exchanged)
        sends = SendOrder.of(messages, by_arrival(order))
        require_programs(programs, messages, sends.positions, [*reductions, *gatherings])
        return Lowered(programs, messages, reductions, sends, gatherings=gatherings)

    def _work(self) -> Work:
        """What the actions wait for."""
        work = self.step.work
        if self.form != "step":
            work = replace(work, num_components=0, frozen_edges=frozenset())
        edges, grad_edges = (
            frozenset(pair for pair in pairs if not self.gone & {*pair}) for pairs in (work.edges, work.grad_edges)
        )
        return replace(work, edges=edges, grad_edges=grad_edges)

    def _messages(self, tied: Sequence[TiedGradient], frozen: FrozenWork | None) -> tuple[Message, ...]:
        """All messages, those of actions first, rank by rank as they are sent."""
        messages: list[Message] = []
        last = list(closing(self.layout, tied)) if self.trains else []
        routes = Routes(self.step.crossing, self.schedule)
        for rank, actions in enumerate(self.schedule.ranks):
            for place, action in enumerate(actions):
                if action.is_piece:
                    assert frozen is not None, f"{action}: a step that trains on its own frozen work does no other"
                    sends = enumerate(frozen.ahead.sends(rank, action), start=len(messages))
                    messages += [frozen.message(edge, rank, action, *send) for edge, send in sends]
                for dst, name, kind in routes.sends(rank, place, action):
                    value, of = self.layout.value(name, action.microbatch), (name, action.microbatch, kind)
                    messages.append(Message(len(messages), rank, dst, action, *of, value.shape, value.dtype))
        for rank, dst, name, kind in sorted(last, key=itemgetter(0)):
            like = self.step.told if kind == "loss" else self.step.state[name]
            messages.append(Message(len(messages), rank, dst, None, name, -1, kind, tuple(like.shape), like.dtype))
        return tuple(messages)

    def _program(self, rank: int, mail: RankMail, exchanged: Exchanged, frozen: FrozenWork | None) -> RankProgram:
        step, actions = self.step, self.schedule.ranks[rank]
        units = {(a.kind, a.stage) for a in actions if a.kind in "FT" and not a.is_piece}
        inputs = step.inputs_for({name for key in units for name in step.unit(key).reads})
        carried, nexts = {}, None
        if frozen is not None and self.trains:
            carried = {(n, m): frozen.value(n, step.sizes[m]) for n, m in frozen.ahead.kept[rank]}
        works = frozen if self.form in ("prologue", "steady") else None
        if works is not None:
            nexts = step.inputs_for({name for piece in works.ahead.pieces[rank] for name in works.reads(piece)})
        scaled = self.trains and step.has_half_gradients
        writer = RankWriter(rank, self.layout, step, mail, inputs, nexts, carried, scaled)
        return ProgramWriter(writer, exchanged, works).write(actions, self.trains)
