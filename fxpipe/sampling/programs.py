"""From a plan to programs: of the ranks that are wanted, while all ranks' messages are told.

patches beside each other   one group as if it were alone, its patches' graphs   -> groups together -> copies
patches in turn             all groups, column by column                         -> copies
first steps                 where they have another layout: its programs are one more form

Every patch exchanges the same in the same order, so a rank's own graph tells what all send; what crosses between stages
is told by where the rows lie. A program is right where it sends and receives what is told in its order, and waits for
earlier messages only before it sends: then no rank waits forever, whoever has lowered it.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.plan.unroll import STEADY, require_sequence
from fxpipe.sampling.case import SampleCase
from passes.sampling.attention import Shared
from passes.sampling.forms import displaced_programs
from passes.sampling.fresh import fresh_programs
from passes.sampling.groups import Alone, copied, grouped
from passes.sampling.once import with_once
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import Patch, patches_of
from passes.sampling.piped import Piped
from passes.sampling.piped_rank import piped_programs
from passes.sampling.staged import StagedSamples
from passes.sampling.staged_rank import staged_programs
from passes.sampling.stages import StageLine
from passes.sampling.times import inputs_of_call
from passes.sampling.warm import with_warm
from passes.sampling.watching import only, watched


def programs_of(
    case: SampleCase, plan: SamplePlan, line: StageLine | None, device: torch.device, ranks: Collection[int]
) -> tuple[tuple[SampleProgram, ...], Mapping[str, tuple[Message, ...]]]:
    """The programs of these ranks, every form checked; all ranks' messages, by form.

    Raises:
        CompileError: there are none for this plan.
    """
    size = plan.staged.world_size
    rows = case.rows(case.num_samples)
    active, like = {rank if rank < size else 0 for rank in ranks}, rows.sized.result.meta["val"]

    def shown(alone: Alone) -> Alone:
        return only(watched(alone, size, plan.watching, like, device), ranks) if plan.watching else alone

    programs, messages = _lowered(case, plan, line, device, ranks if plan.in_turn else active)
    if plan.warm is not None:
        exact = _lowered(case, plan.warm, None, device, active)
        programs, messages = with_warm((programs, messages), shown(exact) if plan.in_turn else exact)
        require_sequence(programs, messages, ("warm", "warm", "fresh", "displaced", _last(messages)))
    programs = with_once(programs, inputs_of_call(rows, case.traced.rows))
    if plan.watching and not plan.in_turn:
        programs, messages = shown((programs, messages))
        _require(programs, messages)
    return tuple(programs), messages


def _lowered(
    case: SampleCase, plan: SamplePlan, line: StageLine | None, device: torch.device, ranks: Collection[int]
) -> Alone:
    """The programs of one layout."""
    size = plan.grid.of_copy
    lowered = _piped if plan.in_turn else _grouped
    own = ranks if plan.copies == 1 else {rank % size for rank in ranks}
    return copied(lowered(case, plan, line, device, own), plan.copies, size, ranks)


def _piped(
    case: SampleCase, plan: SamplePlan, line: StageLine | None, device: torch.device, ranks: Collection[int]
) -> Alone:
    """Patches that follow each other through stages."""
    assert line is not None
    groups = [case.runs(*span) for span in plan.grid.spans(plan.num_samples)]
    rows = case.rows_of([run for runs in groups for run in runs])
    given = plan.bounds, plan.grid, case.batched, device
    piped = Piped(line, rows, groups, *given, norms=plan.how.norms, watching=plan.watching)
    programs, messages = piped_programs(piped, ranks)
    require_sequence(programs, messages, ("fresh", "fresh", "displaced", "displaced", "displaced"))
    return programs, messages


def _grouped(
    case: SampleCase, plan: SamplePlan, line: StageLine | None, device: torch.device, ranks: Collection[int]
) -> Alone:
    """Every group as if it were alone; then the groups together."""
    spans = plan.grid.spans(plan.num_samples)
    sizes = [stop - start for start, stop in spans]
    of_group = plan.grid.of_copy // plan.groups
    places = {rank % of_group for rank in ranks}
    alone = {size: _alone(case, size, plan, line, device, places) for size in dict.fromkeys(sizes)}
    programs, messages = alone[sizes[0]]
    if plan.groups > 1:
        groups = [alone[size] for size in sizes]
        programs, messages = grouped(groups, spans, case.batched, device, of_group, ranks)
    _require(programs, messages)
    return programs, messages


def _alone(
    case: SampleCase, size: int, plan: SamplePlan, line: StageLine | None, device: torch.device, ranks: Collection[int]
) -> Alone:
    """Of one group: patches beside each other; with stages, samples after each other."""
    rows = case.rows(size)
    if line is not None:
        runs = case.runs(0, size)
        given = plan.bounds, plan.grid, case.batched, device, plan.attention
        staged = StagedSamples(line, case.rows_of(runs), [runs], *given)
        programs, sent = staged_programs(staged, ranks)
        return programs, {"fresh": sent}
    patches, graphs = _cut(case, size, plan, ranks)
    if plan.how.mode == "displaced":
        return displaced_programs(rows, patches, graphs, device, plan.how)
    programs, sent = fresh_programs(rows, patches, graphs, device)
    return programs, {"fresh": sent}


def _cut(
    case: SampleCase, size: int, plan: SamplePlan, ranks: Collection[int]
) -> tuple[list[Patch], dict[int, fx.Graph]]:
    """Patches beside each other, and what those of these ranks compute."""
    rows, places = case.rows(size), sorted(ranks)
    if not plan.text_first:
        patches = patches_of(rows, plan.bounds)
        attended, exact = Shared.of(rows, patches, plan.attention), plan.how.mode == "exact"
        return patches, {place: patch_graph(rows, patches[place], attended=attended, exact=exact) for place in places}
    patches, graphs = patches_of(rows, plan.bounds, "first"), dict[int, fx.Graph]()
    for place in places:
        graph = case.text_graph(size, plan.bounds, place, plan.attention)
        if graph is None:
            raise CompileError(
                f"the plan gives the text to the first of the patches between {list(plan.bounds)}, of {size} samples, "
                "and others read it beside its keys and values, too; make a plan with text='all' (leave plan out)"
            )
        graphs[place] = graph
    return patches, graphs


def _last(messages: Mapping[str, Sequence[Message]]) -> str:
    """The form of a step after which nothing is on its way, where there is one."""
    return "last" if "last" in messages else "displaced"


def _require(programs: Sequence[SampleProgram], messages: Mapping[str, Sequence[Message]]) -> None:
    """Raise CompileError unless the programs are right, in every form and from step to step."""
    if "displaced" not in messages:
        require_sequence(programs, messages, ("fresh",))
        return
    require_sequence(programs, messages, STEADY)
    if "again" in messages:
        require_sequence(programs, messages, ("fresh", "again", "again", "displaced", "again", "last"))
