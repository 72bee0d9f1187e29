"""The back half of the sampling compiler: of one traced call the programs of all ranks, for so many samples.

rows        where the image's rows lie in every value                              -> RowPlan
plan        samples in groups, stages, patches of the rows; made here, or given    -> SamplePlan
programs    patches in turn through stages, or beside each other, group by group   -> SampleProgram per rank
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from fxpipe.analysis import Observe
from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.sample_program import Form, SampleProgram
from fxpipe.plan.unroll import in_sequence, require_sequence
from fxpipe.sampling.attention import require_attention, with_attention
from fxpipe.sampling.candidates import Ranked, Setting
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import ranked
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.planning import Choices, Request, choices_of, chosen, is_of, planned, require_equal
from fxpipe.sampling.seconds import operation_seconds
from fxpipe.sampling.step import SampleStep, Traced
from fxpipe.sampling.trace import Tracing
from fxpipe.simulate.op_lists import StepOps
from fxpipe.simulate.sample_ops import sample_ops
from passes.sampling.attention import Shared
from passes.sampling.forms import displaced_programs
from passes.sampling.fresh import fresh_programs
from passes.sampling.groups import Alone, copied, grouped
from passes.sampling.once import with_once
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import patches_of
from passes.sampling.piped import Piped
from passes.sampling.piped_rank import piped_programs
from passes.sampling.staged import Staged, staged_programs
from passes.sampling.stages import Line
from passes.sampling.text import Cut
from passes.sampling.times import inputs_of_call

Mode = Literal["exact", "displaced"]


@dataclass(frozen=True)
class SampleLowering:
    """What `compile_sampler` was asked for, to be done for every kind of call; `plan` is for one of them.

    `cluster` and `priced` are what predictions are for, by their texts; in a `setting` what is left open is chosen,
    else groups of samples and patches of rows are as many as there can be. `looked_at` has the candidates for one kind
    of call.
    """

    request: Request
    tracing: Tracing
    device: torch.device
    cost_model: CostModel
    observe: Observe
    cluster: str = ""
    priced: str = ""
    plan: SamplePlan | None = None
    setting: Setting | None = None
    looked_at: Ranked | None = None

    def traced(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_free: int) -> Traced:
        """The call as one flat graph, and which inputs have rows."""
        return self.tracing.traced(module, args, kwargs, num_free)

    def resized(self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The graph with free sizes at another call's."""
        return self.tracing.resized(traced, args, kwargs)

    def case(self, traced: Traced, batch_size: int) -> SampleCase:
        """What planning asks of a call."""
        return SampleCase(traced, batch_size, self.cost_model)

    def looking(self, traced: Traced, num_samples: int) -> "SampleLowering":
        """Knowing all candidates for calls of some requests with so many samples each."""
        assert self.setting is not None
        return replace(self, looked_at=ranked(self.case(traced, num_samples), self.request, self.setting))

    @held_collector()
    def step(self, traced: Traced, batch_size: int) -> SampleStep:
        """The programs of all ranks for so many samples."""
        # rows: where they lie, what each operation needs of other patches
        case = self.case(traced, batch_size)
        self.observe("rows", case.rows(batch_size))

        # plan: groups of samples, stages, patches of the rows; the next best where one cannot be lowered after all
        errors: list[CompileError] = []
        for plan, line in self._plans(case):
            try:
                return self._lowered(case, plan, line)
            except CompileError as error:
                errors.append(error)
        raise errors[0]

    def _plans(self, case: SampleCase) -> Iterator[tuple[SamplePlan, Line | None]]:
        """The given one, or the best first."""
        if self.plan and is_of(self.plan, case):
            require_attention(case, choices_of(self.plan))
            remade, line = planned(case, choices_of(self.plan), self.cluster, self.priced)
            require_equal(self.plan, remade)
            yield self.plan, line
        elif self.setting is None:
            yield planned(case, self._chosen(case, self.request, None), self.cluster, self.priced)
        elif (found := self.looked_at) is not None and any(found.fallbacks(case.num_samples)):
            yield from self._best_first(case, self.setting, found)
        else:
            setting = replace(self.setting, objective="latency")
            found = ranked(case, self.request, setting)
            yield from self._best_first(case, setting, found)
            if found.narrowed:
                yield from self._best_first(case, setting, ranked(case, self.request, setting, anew=True))

    def _best_first(
        self, case: SampleCase, setting: Setting, found: Ranked
    ) -> Iterator[tuple[SamplePlan, Line | None]]:
        todo = [*found.fallbacks(case.num_samples)]
        while todo:
            one = todo.pop(0)
            made = self._chosen(case, one.request, setting.cluster)
            if made.text_first != (one.made is not None and one.made.text_first):
                told = estimate(case, made, setting.cluster, setting.steps, one.request.speeds)
                other = replace(one, request=replace(one.request, text="all"), made=made, found=told)
                found = replace(found, candidates=tuple(other if c is one else c for c in found.candidates))
                todo = sorted([other, *todo], key=lambda one: one.seconds)
                continue
            self.observe("layouts", tuple(found.outcomes(one)))
            plan, line = planned(case, one.made or made, self.cluster, self.priced)
            notes = *plan.notes, *found.notes(case, one)
            yield replace(plan, notes=notes, expects=found.expected(one), considered=found.considered(one)), line

    def _chosen(self, case: SampleCase, request: Request, cluster: Cluster | None) -> Choices:
        """What a request leaves open, decided; attention gathers where no cluster says what is better."""

        def told(asked: Request) -> Choices:
            return with_attention(case, chosen(case, asked), request.attention, cluster, request.speeds)

        made = told(request)
        sizes = {stop - start for start, stop in made.grid.spans(case.num_samples)}
        if not made.text_first or all(case.first_has_text(size, made.bounds, made.attention) for size in sizes):
            return made
        made = told(replace(request, text="all"))
        note = "text='first': other patches read it beside its keys and values, too; every patch has it"
        return replace(made, notes=(*made.notes, note))

    def _lowered(self, case: SampleCase, plan: SamplePlan, line: Line | None) -> SampleStep:
        """The programs of one plan."""
        if plan.how.fresh and (plan.in_turn or plan.how.mode == "exact"):
            raise CompileError(
                f"the plan keeps {plan.how.fresh[0]!r} fresh, which only displaced patches beside each other can; "
                "leave the line out"
            )
        self.observe("plan", plan)
        if line is not None:
            self.observe("stages", line)

        # programs: patches that follow each other, or groups of patches beside each other; every form checked
        lowered = _piped if plan.in_turn else _grouped
        programs, messages = copied(lowered(case, plan, line, self.device), plan.copies)
        programs = with_once(programs, inputs_of_call(case.rows(case.num_samples), case.traced.rows))
        self.observe("programs", programs)

        rows = case.rows(case.num_samples)
        return SampleStep(case.traced, plan, rows.inputs, case.likes, tuple(programs), messages, str(rows))

    def ops(self, step: SampleStep, num_steps: int, cost_model: CostModel | None = None) -> StepOps:
        """What every rank does in so many steps of a call, for how long, and in how many bytes."""
        rows, sent = in_sequence(step.programs, step.messages_of, step.sequence(num_steps), whole=True)
        forms = [{"fresh": Form(row.graph)} for row in rows]
        programs = [replace(p, forms=form) for p, form in zip(step.programs, forms, strict=True)]
        by = cost_model or self.cost_model
        return sample_ops(programs, sent, step.likes, partial(_seconds_of, by, self.request.speeds))


def _piped(case: SampleCase, plan: SamplePlan, line: Line | None, device: torch.device) -> Alone:
    """Patches that follow each other through stages."""
    assert line is not None
    groups = [case.runs(*span) for span in plan.grid.spans(plan.num_samples)]
    rows = case.rows_of([run for runs in groups for run in runs])
    norms: Any = plan.how.norms
    programs, messages = piped_programs(Piped(line, rows, groups, plan.bounds, case.batched, norms, device))
    require_sequence(programs, messages, ("fresh", "fresh", "displaced", "displaced", "displaced"))
    return programs, messages


def _grouped(case: SampleCase, plan: SamplePlan, line: Line | None, device: torch.device) -> Alone:
    """Every group as if it were alone; then the groups together."""
    spans = plan.grid.spans(plan.num_samples)
    sizes = [stop - start for start, stop in spans]
    alone = {size: _alone(case, size, plan, line, device) for size in dict.fromkeys(sizes)}
    programs, messages = alone[sizes[0]]
    if plan.groups > 1:
        programs, messages = grouped([alone[size] for size in sizes], spans, case.batched, device)
    _require(programs, messages)
    return programs, messages


def _alone(case: SampleCase, size: int, plan: SamplePlan, line: Line | None, device: torch.device) -> Alone:
    """One group's programs: patches beside each other; with stages, samples after each other."""
    rows = case.rows(size)
    if line is not None:
        runs = case.runs(0, size)
        programs, sent = staged_programs(
            Staged(line, case.rows_of(runs), runs, plan.bounds, case.batched, plan.attention, device)
        )
        return programs, {"fresh": sent}
    patches, graphs = _cut(case, size, plan)
    if plan.how.mode == "displaced":
        norms: Any = plan.how.norms
        return displaced_programs(rows, patches, graphs, device, norms, plan.how.advance, plan.how.fresh)
    programs, sent = fresh_programs(rows, patches, graphs, device)
    return programs, {"fresh": sent}


def _cut(case: SampleCase, size: int, plan: SamplePlan) -> Cut:
    """Patches beside each other, and what each computes."""
    if not plan.text_first:
        patches = patches_of(case.rows(size), plan.bounds)
        attended = Shared.of(case.rows(size), patches, plan.attention)
        exact = plan.how.mode == "exact"
        return patches, [patch_graph(case.rows(size), patch, attended=attended, exact=exact) for patch in patches]
    cut = case.first_has_text(size, plan.bounds, plan.attention)
    if cut is None:
        raise CompileError(
            f"the plan gives the text to the first of the patches between {list(plan.bounds)}, of {size} samples, and "
            "others read it beside its keys and values, too; make a plan with text='all' (leave plan out)"
        )
    return cut


def _require(programs: Sequence[SampleProgram], messages: Any) -> None:
    """Raise CompileError unless the programs are right, in every form and from step to step."""
    if "displaced" not in messages:
        require_programs(programs, messages["fresh"])
        return
    require_sequence(programs, messages)
    if "again" in messages:
        require_sequence(programs, messages, ("fresh", "again", "again", "displaced", "again", "last"))


def _seconds_of(model: CostModel, speeds: Sequence[float], programs: Sequence[SampleProgram]) -> dict[fx.Node, float]:
    found = operation_seconds(model, (node for program in programs for node in program.graph.nodes))
    if speeds:
        for program in programs:
            found |= {node: found[node] / speeds[program.rank] for node in program.graph.nodes if node in found}
    return found
