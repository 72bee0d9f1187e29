"""The back half of the sampling compiler: of one traced call the programs of ranks, for so many samples.

rows        where the image's rows lie in every value                              -> RowPlan
plan        samples in groups, stages, patches of the rows; given, or made here    -> SamplePlan, rank 0's on all ranks
programs    patches in turn through stages, or beside each other, group by group   -> SampleProgram, of own ranks
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import fx

from fxpipe.analysis import Observe
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError, RunError
from fxpipe.plan.rank_program import Message, Traffic
from fxpipe.plan.sample_outcome import SampleOutcome
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.sample_program import SampleProgram, StepForm
from fxpipe.plan.unroll import in_sequence
from fxpipe.run.ranks import LocalRanks, Ranks, shapes_of
from fxpipe.sampling.attention import require_attention, with_attention
from fxpipe.sampling.candidates import Ranked, Setting
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import ranked
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.planning import (
    Choices,
    SampleRequest,
    choices_of,
    chosen,
    is_of,
    is_text_first,
    line_for,
    planned,
    require_equal,
    require_warm,
)
from fxpipe.sampling.programs import programs_of
from fxpipe.sampling.seconds import operation_seconds
from fxpipe.sampling.step import SampleStep, Traced
from fxpipe.sampling.trace import Tracing
from fxpipe.simulate.op_lists import StepOps
from fxpipe.simulate.sample_ops import sample_ops
from passes.rows.follow import Note
from passes.sampling.text import Text

_log = logging.getLogger(__name__)

_TOLD_SHARE = 0.01
"""Of an exact step's traffic: what is gathered for want of a rule, and is more than that, is a warning."""

Mode = Literal["exact", "displaced"]
Proposed = tuple[SamplePlan, tuple[SampleOutcome, ...]]
"""A plan, and what it was chosen from."""


@dataclass(frozen=True)
class SampleLowering:
    """What `compile_sampler` was asked for, to be done for every kind of call; `plan` is for one of them.

    `cluster` and `priced` are what predictions are for, by their texts; in a `setting` what is left open is chosen,
    else groups of samples and patches of rows are as many as there can be. `looked_at` has the candidates for one kind
    of call.
    """

    request: SampleRequest
    tracing: Tracing
    device: torch.device
    cost_model: CostModel
    observe: Observe
    cluster: str = ""
    priced: str = ""
    plan: SamplePlan | None = None
    setting: Setting | None = None
    looked_at: Ranked | None = None

    def case(self, traced: Traced, batch_size: int) -> SampleCase:
        """What planning asks of a call."""
        return SampleCase(traced, batch_size, self.cost_model)

    def looking(self, traced: Traced, num_samples: int) -> "SampleLowering":
        """Knowing all candidates for calls of some requests with so many samples each."""
        assert self.setting is not None
        return replace(self, looked_at=ranked(self.case(traced, num_samples), self.request, self.setting))

    def step(self, traced: Traced, batch_size: int, ranks: Ranks | None = None) -> SampleStep:
        """The programs for so many samples: of this rank of a launch, by rank 0's plan; of all ranks where there is
        none. Collective over a launch.

        Raises:
            CompileError: there are none; on all ranks alike.
        """
        ranks = ranks or LocalRanks()
        # rows: where they lie, what each operation needs of other patches
        case = self.case(traced, batch_size)
        self.observe("rows", case.rows(batch_size))

        plans, errors = self._plans(case), list[CompileError]()
        with ranks.compiling(self.compared(case)):
            while True:
                # plan: groups of samples, stages, patches of the rows; the next best where one cannot be lowered
                plan, outcomes = ranks.of_rank_zero(lambda: _next(plans, errors))
                if outcomes:
                    self.observe("layouts", outcomes)
                self.observe("plan", plan)

                # programs: patches that follow each other, or groups of patches beside each other; every form checked
                made = ranks.agreed(self._tried(case, plan, ranks.rank))
                if isinstance(made, SampleStep):
                    self.observe("programs", made.programs)
                    return made
                errors.append(made)

    def compared(self, case: SampleCase) -> dict[str, object]:
        """What all ranks of a launch must ask for alike, by name."""
        asked = {**vars(self.request), **vars(self.request.how)}
        del asked["how"]
        given: dict[str, object] = {"plan": str(self.plan), "cluster": self.cluster, "cost_model": self.priced}
        if self.setting is not None:
            asked |= {name: value for name, value in vars(self.setting).items() if name != "cluster"}
        return shapes_of(case.likes) | given | asked

    def _tried(self, case: SampleCase, plan: SamplePlan, rank: int | None) -> SampleStep | CompileError:
        """The programs, or why there are none.

        Raises:
            RunError: the plan of another rank is of a call that this one does not make.
        """
        try:
            if rank and not is_of(plan, case):
                raise RunError(
                    f"rank 0 has planned call {plan.fingerprint} with {plan.num_samples} samples, which rank {rank} "
                    "does not make: its model is another one; give every rank the same"
                )
            if (line := line_for(case, plan)) is not None:
                self.observe("stages", line)
            return self._lowered(case, plan, rank)
        except CompileError as error:
            return error

    def _plans(self, case: SampleCase) -> Iterator[Proposed]:
        """The given one, or the best first."""
        if self.plan and is_of(self.plan, case):
            require_warm(self.plan)
            require_attention(case, choices_of(self.plan))
            require_equal(self.plan, planned(case, choices_of(self.plan), self.cluster, self.priced)[0])
            yield self.plan, ()
        elif self.setting is None:
            yield planned(case, self._chosen(case, self.request, None), self.cluster, self.priced)[0], ()
        elif (found := self.looked_at) is not None and any(found.fallbacks(case.num_samples)):
            yield from self._best_first(case, self.setting, found)
        else:
            setting = replace(self.setting, objective="latency")
            found = ranked(case, self.request, setting)
            yield from self._best_first(case, setting, found)
            if found.narrowed:
                yield from self._best_first(case, setting, ranked(case, self.request, setting, anew=True))

    def _best_first(self, case: SampleCase, setting: Setting, found: Ranked) -> Iterator[Proposed]:
        todo = [*found.fallbacks(case.num_samples)]
        while todo:
            one = todo.pop(0)
            assert one.made is not None, "what a call can fall back on is known"
            made, warm = self._chosen(case, one.request, setting.cluster), one.made.warm
            if warm is not None and (not warm.text_first or is_text_first(case, warm)):
                made = replace(made, warm=warm)
            if (made.text_first, made.warm) != (one.made.text_first, warm):
                told = estimate(case, made, setting.cluster, setting.steps, one.request.speeds)
                text: Text = "first" if made.text_first else "all"
                other = replace(one, request=replace(one.request, text=text), made=made, found=told)
                found = replace(found, candidates=tuple(other if c is one else c for c in found.candidates))
                todo = sorted([other, *todo], key=lambda one: one.seconds)
                continue
            plan, _ = planned(case, one.made, self.cluster, self.priced)
            notes = *plan.notes, *found.notes(case, one)
            plan = replace(plan, notes=notes, expects=found.expected(one), considered=found.considered(one))
            yield plan, tuple(found.outcomes(one))

    def _chosen(self, case: SampleCase, request: SampleRequest, cluster: Cluster | None) -> Choices:
        """What a request leaves open, decided; attention gathers where no cluster says what is better."""

        def told(asked: SampleRequest) -> Choices:
            return with_attention(case, chosen(case, asked), request.attention, cluster, request.speeds)

        made = told(request)
        if not made.text_first or is_text_first(case, made):
            return made
        made = told(replace(request, text="all"))
        note = "text='first': other patches read it beside its keys and values, too; every patch has it"
        return replace(made, notes=(*made.notes, note))

    def _lowered(self, case: SampleCase, plan: SamplePlan, rank: int | None = None) -> SampleStep:
        """The programs of one plan, of this rank or of all."""
        if plan.how.fresh and (plan.in_turn or plan.how.mode == "exact"):
            raise CompileError(
                f"the plan keeps {plan.how.fresh[0]!r} fresh, which only displaced patches beside each other can; "
                "leave the line out"
            )
        wanted = range(plan.world_size) if rank is None else (rank,)
        programs, messages = programs_of(case, plan, line_for(case, plan), self.device, wanted)
        rows, again = case.rows(case.num_samples), partial(self._all_ranks, case.traced, case.num_samples)
        warned = _warned(plan, case.rows(case.group_size(plan.grid)).notes, messages["fresh"])
        new = [note for note in warned.notes if note not in plan.notes]
        if new and not rank:
            _log.warning("%s%s", new[0], f"; and {len(new) - 1} more, see the plan's notes" * (len(new) > 1))
        return SampleStep(case.traced, warned, rows.inputs, case.likes, programs, messages, str(rows), again)

    def _all_ranks(self, traced: Traced, batch_size: int, plan: SamplePlan) -> SampleStep:
        """The programs of all ranks, in this process alone."""
        return replace(self, plan=plan, observe=lambda name, artefact: None).step(traced, batch_size)

    def ops(
        self, step: SampleStep, num_steps: int, cost_model: CostModel | None = None, keeps_sent: bool = False
    ) -> StepOps:
        """What every rank does in so many steps of a call, for how long, and in how many bytes; those of what is sent
        as long as a transport `keeps_sent`."""
        step = step.whole
        rows, sent = in_sequence(step.programs, step.messages_of, step.sequence(num_steps), whole=True)
        forms = [{"fresh": StepForm(row.graph)} for row in rows]
        programs = [replace(p, forms=form) for p, form in zip(step.programs, forms, strict=True)]
        by = cost_model or self.cost_model
        # of a plan that was given the request has those that do not watch
        speeds = self.request.speeds if self.setting is None else self.setting.cluster.speeds
        return sample_ops(programs, sent, step.likes, partial(_seconds_of, by, speeds), keeps_sent)


def _warned(plan: SamplePlan, notes: Sequence[Note], sent: Sequence[Message]) -> SamplePlan:
    """Notes of operations without a rule are warnings where what these gather is a good part of what is sent."""
    total = Traffic(tuple(sent)).total_bytes
    told = dict[str, str]()
    for note in notes:
        own = sum(message.num_bytes for message in sent if message.kind == "gather" and message.value in note.values)
        if own > _TOLD_SHARE * total:
            told[str(note)] = f"warning, {own / total:.0%} of an exact step's traffic: {note}"
    return replace(plan, notes=tuple(told.get(note, note) for note in plan.notes))


def _next(plans: Iterator[Proposed], errors: Sequence[CompileError]) -> Proposed:
    """The next best plan; where there is no other, the first one's error."""
    for proposed in plans:
        return proposed
    raise errors[0]


def _seconds_of(model: CostModel, speeds: Sequence[float], programs: Sequence[SampleProgram]) -> dict[fx.Node, float]:
    found = operation_seconds(model, (node for program in programs for node in program.graph.nodes))
    if speeds:
        for program in programs:
            found |= {node: found[node] / speeds[program.rank] for node in program.graph.nodes if node in found}
    return found
