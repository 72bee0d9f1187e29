"""The back half of the sampling compiler: of one traced call the programs of all ranks, for so many samples.

grid        samples in groups, groups over stages and patches           -> Grid
rows        where the image's rows lie in every value                   -> RowPlan
programs    patches beside each other, or in turn through stages        -> SampleProgram per rank, with its forms
groups      the same on other ranks, for other samples
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from fxpipe.analysis import Observe
from fxpipe.costs.model import CostModel
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.sample_grid import Grid, grid_for
from fxpipe.plan.sample_program import Form, SampleProgram
from fxpipe.plan.unroll import in_sequence, require_sequence
from fxpipe.sampler import SampleStep, Traced
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.seconds import operation_seconds
from fxpipe.sampling.trace import RowsOf, traced
from fxpipe.simulate.op_lists import StepOps
from fxpipe.simulate.sample_ops import sample_ops
from passes.rows import RowPlan
from passes.sampling.displaced import Norms
from passes.sampling.forms import displaced_programs
from passes.sampling.fresh import fresh_programs
from passes.sampling.groups import Alone, Span, grouped
from passes.sampling.patch_graph import patch_graph
from passes.sampling.patches import even_bounds, patches_of, require_units
from passes.sampling.piped import Piped
from passes.sampling.piped_rank import piped_programs
from passes.sampling.staged import Staged, staged_programs

Mode = Literal["exact", "displaced"]


@dataclass(frozen=True)
class SampleLowering:
    """What `compile_sampler` was asked for, to be done for every kind of call; `patches` may be bounds in units."""

    world_size: int
    cfg: int | None
    stages: int | None
    fold: bool | None
    patches: int | Sequence[int] | None
    mode: Mode
    warmup: int
    norms: Norms
    advance: bool
    rows_of: RowsOf
    device: torch.device
    cost_model: CostModel
    observe: Observe

    def traced(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The call as one flat graph, and which inputs have rows."""
        return traced(module, args, kwargs, self.rows_of, self.observe)

    def step(self, traced: Traced, batch_size: int) -> SampleStep:
        """The programs of all ranks for so many samples."""
        case = SampleCase(traced, batch_size, self.cost_model)

        # grid: samples in groups, groups over stages and patches
        grid = self._grid(case)
        spans = grid.spans(batch_size)

        # rows: where they lie, what each operation needs of other patches
        rows = case.rows(spans[0][1] - spans[0][0])
        bounds = self._bounds(rows, grid)
        self.observe("rows", rows)

        # programs: patches that follow each other, or groups of patches beside each other
        if self._in_turn:
            grid = replace(grid, turns=len(bounds) - 1)
            programs, messages = self._piped(case, grid, spans, bounds)
        else:
            programs, messages = self._grouped(case, grid, spans, bounds)
        self.observe("programs", programs)
        notes = (*traced.captured.notes, *map(str, rows.notes))
        of_inputs = traced, batch_size, grid, rows.inputs, case.likes
        return SampleStep(*of_inputs, tuple(programs), messages, str(rows), notes, self.warmup)

    def ops(self, step: SampleStep, num_steps: int) -> StepOps:
        """What every rank does in so many steps of a call, for how long, and in how many bytes."""
        programs, messages = step.programs, step.messages
        if num_steps > 1:
            rows, sent = in_sequence(programs, step.messages_of, step.sequence(num_steps), whole=True)
            forms = [{"fresh": Form(row.graph)} for row in rows]
            programs = tuple(replace(p, forms=form) for p, form in zip(programs, forms, strict=True))
            messages = tuple(sent)
        return sample_ops(programs, messages, step.likes, partial(_seconds_of, self.cost_model))

    @property
    def _in_turn(self) -> bool:
        """Whether patches follow each other through stages."""
        return self.mode == "displaced" and self.stages is not None

    def _grid(self, case: SampleCase) -> Grid:
        """Of samples that need each other, as perturbed attention's halves do, one group; unless more are asked for."""
        asked = self.patches if isinstance(self.patches, int | None) else len(self.patches) - 1
        patches = 1 if self._in_turn else asked
        grid = grid_for(self.world_size, case.num_samples, self.cfg, patches, self.stages)
        if grid.groups == 1 or case.dependent is None:
            return grid
        if self.cfg is not None or asked is not None:
            raise case.dependent
        return grid_for(self.world_size, case.num_samples, 1, patches, self.stages)

    def _bounds(self, rows: RowPlan, grid: Grid) -> tuple[int, ...]:
        """Of patches, in units; of those in turn twice as many as stages where that is left open."""
        if isinstance(self.patches, Sequence):
            return tuple(self.patches)
        count = grid.patches
        if self._in_turn:
            count = self.patches or min(2 * grid.stages, rows.units.count)
        require_units(rows, count)
        return even_bounds(rows.units.count, count)

    def _piped(self, case: SampleCase, grid: Grid, spans: Sequence[Span], bounds: Sequence[int]) -> Alone:
        """Patches that follow each other through stages."""
        groups = [case.runs(*span) for span in spans]
        plans = case.rows_of([run for runs in groups for run in runs])
        line = case.line(next(iter(plans)), grid.stages, self.fold)
        self.observe("stages", line)
        piped = Piped(line, plans, groups, bounds, case.batched, self.norms, self.device)
        programs, messages = piped_programs(piped)
        require_sequence(programs, messages, ("fresh", "fresh", "displaced", "displaced", "displaced"))
        return programs, messages

    def _grouped(self, case: SampleCase, grid: Grid, spans: Sequence[Span], bounds: Sequence[int]) -> Alone:
        """Every group as if it were alone; then the groups together."""
        sizes = [stop - start for start, stop in spans]
        alone = {size: self._alone(case, size, grid, bounds) for size in dict.fromkeys(sizes)}
        programs, messages = alone[sizes[0]]
        if grid.groups > 1:
            programs, messages = grouped([alone[size] for size in sizes], spans, case.batched, self.device)
        _require(programs, messages)
        return programs, messages

    def _alone(self, case: SampleCase, size: int, grid: Grid, bounds: Sequence[int]) -> Alone:
        """One group's programs: patches beside each other; with stages, samples after each other."""
        rows = case.rows(size)
        if grid.stages > 1:
            runs = case.runs(0, size)
            plans = case.rows_of(runs)
            line = case.line(next(iter(plans)), grid.stages, self.fold)
            self.observe("stages", line)
            programs, messages = staged_programs(Staged(line, plans, runs, bounds, case.batched, self.device))
            return programs, {"fresh": messages}
        patches = patches_of(rows, bounds)
        graphs = [patch_graph(rows, patch) for patch in patches]
        self.observe("patch graphs", graphs)
        if self.mode == "displaced":
            return displaced_programs(rows, patches, graphs, self.device, self.norms, self.advance)
        programs, messages = fresh_programs(rows, patches, graphs, self.device)
        return programs, {"fresh": messages}


def _require(programs: Sequence[SampleProgram], messages: Any) -> None:
    """Raise CompileError unless the programs are right, in every form and from step to step."""
    if "displaced" not in messages:
        require_programs(programs, messages["fresh"])
        return
    require_sequence(programs, messages)
    if "again" in messages:
        require_sequence(programs, messages, ("fresh", "again", "again", "displaced", "again", "last"))


def _seconds_of(model: CostModel, programs: Sequence[SampleProgram]) -> dict[fx.Node, float]:
    return operation_seconds(model, (node for program in programs for node in program.graph.nodes))
