"""`fxpipe tune`, `compare`, `fillers`, `simulate`, `trace` and `report`: plans, and what they will cost."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fxpipe.block_graph import human_bytes
from fxpipe.cli.options import Planning, planned
from fxpipe.errors import CompileError
from fxpipe.timeline import human_seconds

if TYPE_CHECKING:
    from fxpipe.cluster import Cluster
    from fxpipe.costs import CostModel
    from fxpipe.costs.rows import Costed
    from passes.plan import Planned
    from passes.rehearsal.case import Case
    from passes.tuner.candidates import Wishes

Out = Annotated[Path, typer.Option(dir_okay=False, help="file to write")]
Filled = Annotated[bool, typer.Option(help="the step that does the next batch's frozen work in its idle time")]


@dataclass(frozen=True, eq=False)
class _Question:
    """What a tuner needs: the costs of a step's blocks, machines, and what the user leaves open."""

    step: "Costed"
    model: "CostModel"
    cluster: "Cluster"
    wishes: "Wishes"
    budget: float

    @cached_property
    def plan(self) -> "Planned":
        """As `fxpipe.compile` chooses it."""
        from passes.plan import make_plan

        return make_plan(self.case, self.wishes, self.device_bytes, self.budget)

    @cached_property
    def case(self) -> "Case":
        """The step and the machines, without a memory limit."""
        from passes.frozen_layers import frozen_layers
        from passes.rehearsal.case import Case

        step, wishes = self.step, self.wishes
        layers = frozen_layers(step.captured, step.graph, step.costs, self.model)
        return Case(step.graph, step.blocks, layers, self.model, self.cluster, wishes.world_size, wishes.batch_size)

    @property
    def device_bytes(self) -> int | None:
        """Devices by name know their memory."""
        return getattr(self.model, "memory_bytes", None)


def _question(planning: Planning) -> _Question:
    """Capture the model and cost its blocks, cut as `fxpipe.compile` cuts them."""
    from fxpipe.costing import costed, given_cost_model, num_blocks
    from fxpipe.options import asked_microbatches, check_collocation, check_fill, given_bytes, given_cluster
    from fxpipe.self_conditioning import SelfConditioning
    from passes.tuner.candidates import Wishes

    if planning.schedule.endswith(".txt"):
        raise CompileError(f"--schedule {planning.schedule} is an order already; fxpipe simulate tells what it takes")
    check_collocation(planning.collocation)
    check_fill(planning.fill)
    num_ranks, batch_size, name = planning.num_ranks, planning.batch_size, planning.schedule
    cluster = given_cluster(planning.cluster, num_ranks)
    model = given_cost_model(planning.device_model or cluster.device)
    limit = given_bytes(planning.memory_limit)
    count = asked_microbatches(planning.microbatches, batch_size, num_ranks, name)
    samples = -(-batch_size // (count or 2 * num_ranks))
    module, batch = planning.loaded()
    conditioning = module.probability if isinstance(module, SelfConditioning) else None
    module = module.step if isinstance(module, SelfConditioning) else module
    step = costed(module, batch, batch_size, model, num_blocks(planning.stages, num_ranks), samples)
    copies = planning.data_parallel if name == "auto" else planning.data_parallel or 1
    wishes = Wishes(
        name, num_ranks, batch_size, copies, planning.stages, count if step.captured.batch else 1,
        planning.collocation, planning.recompute, limit, conditioning,
        filled=planning.fill != "none" and bool(step.graph.components),
    )  # fmt: skip
    return _Question(step, model, cluster, wishes, planning.budget)


def _limited(planning: Planning) -> tuple[_Question, int | None]:
    """The question, and the memory limit: the user's, else the device's."""
    from passes.plan import usable_bytes

    asked = _question(planning)
    limit = asked.wishes.memory_limit_bytes
    return asked, usable_bytes(asked.device_bytes) if limit is None and asked.device_bytes else limit


def _head(planning: Planning, asked: _Question, limit_bytes: int | None) -> str:
    within = f", {human_bytes(limit_bytes)} a rank" if limit_bytes else ""
    return f"{planning.batch_size} samples on {asked.wishes.world_size} ranks of {asked.cluster}{within}"


@planned
def tune(planning: Planning, top: Annotated[int, typer.Option(min=1, help="rows of the table")] = 15) -> None:
    """Print the ways to use the ranks, the best first, and what every other loses by.

    Captures MODEL and costs its blocks; no stage is traced, no program made.
    """
    from fxpipe.tuning import outcome_table

    asked = _question(planning)
    plan = asked.plan
    print(_head(planning, asked, plan.limit_bytes))
    print_wide(outcome_table(plan.outcomes, top))


@planned
def compare(planning: Planning) -> None:
    """Print what a step of MODEL takes by DDP, ZeRO-3, GPipe, 1F1B and fxpipe, all on one simulator.

    Every contestant by its best number of micro-batches that fits into memory. No stage is traced, no program made.
    """
    from fxpipe.comparison import comparison_table
    from passes.comparison import compare as contest

    asked, limit = _limited(planning)
    case = replace(asked.case, limit_bytes=limit)
    print(_head(planning, asked, limit))
    print_wide(comparison_table(contest(case, asked.wishes, planning.budget), limit))


@planned
def fillers(planning: Planning) -> None:
    """Print what a step of MODEL takes by every way to put the next batch's frozen work into its idle time.

    One plan, the one that is chosen for frozen work in idle time. No stage is traced, no program made.
    """
    from passes.comparison import fillers as filled_by

    asked, limit = _limited(planning)
    setting, bound, found = filled_by(replace(asked.case, limit_bytes=limit), asked.wishes, planning.budget)
    print(_head(planning, asked, limit))
    print(f"{setting}; no filling is shorter than {human_seconds(bound)}")
    table = Table("filler")
    for name in ("step", "over bound", "after the pipeline", "bubbles", "samples change ranks"):
        table.add_column(name, justify="right")
    for name, fill in found.items():
        step = fill.iteration_seconds
        numbers = human_seconds(step), f"{step / bound - 1:.1%}", human_seconds(fill.tail_seconds)
        table.add_row(name, *numbers, f"{fill.bubble_ratio:.1%}", "no" if fill.stays else "between layers")
    print_wide(table)


@planned
def simulate(planning: Planning) -> None:
    """Print what a step of MODEL will take, and with the next batch's frozen work in its idle time."""
    program, _ = planning.compiled()
    print(program.simulate())
    if program.filled is not None:
        print(f"with the next batch's frozen work in idle time ({planning.fill}):")
        print(program.simulate(filled=True))


@planned
def trace(planning: Planning, out: Out = Path("trace.json"), filled: Filled = False) -> None:
    """Write the predicted step as a Chrome trace, for Perfetto."""
    print(planning.compiled()[0].trace(out, filled=filled))


@planned
def report(planning: Planning, out: Out = Path("report.html")) -> None:
    """Write the plan and the predicted step as one HTML page that needs no network."""
    from fxpipe.options import given_bytes

    print(planning.compiled()[0].report(out, given_bytes(planning.memory_limit)))


def print_wide(table: Table) -> None:
    """Print a table as wide as its columns need: numbers are read unfolded."""
    console = Console()
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, min(180, Measurement.get(console, wide, table).maximum))
    console.print(table)
