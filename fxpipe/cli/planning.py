"""`fxpipe tune`, `compare`, `fillers`, `simulate`, `explain`, `trace` and `report`: plans, and what they will cost."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fxpipe.cli.options import Planning, planned, print_wide
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.timeline import human_seconds
from fxpipe.show.progress import followed, progress

if TYPE_CHECKING:
    from fxpipe.compiler import Requested

Out = Annotated[Path, typer.Option(dir_okay=False, help="file to write")]
Filled = Annotated[bool, typer.Option(help="the step that does the next batch's frozen work in its idle time")]


@planned
def tune(
    planning: Planning,
    top: Annotated[int, typer.Option(min=1, help="rows of the table")] = 15,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="file to write the plan to, for --plan")] = None,
) -> None:
    """Print the ways to use the ranks, the best first, and what every other loses by.

    Captures MODEL and costs its blocks; no stage is traced, no program made.
    """
    from fxpipe.plan.tuning import outcome_table

    asked = _asked(planning)
    with progress():
        plan = asked.planned(asked.analysed(followed(None)))
    print(_head(asked))
    print_wide(outcome_table(plan.outcomes, top))
    if save is not None:
        print(plan.save(save))


@planned
def compare(planning: Planning) -> None:
    """Print what a step of MODEL takes by DDP, ZeRO-3, GPipe, 1F1B and fxpipe, all on one simulator.

    Every contestant by its best number of micro-batches that fits into memory. No stage is traced, no program made.
    """
    from fxpipe.show.comparison import comparison_table
    from passes.comparison import compare as contest
    from passes.comparison.baselines import require_samples

    asked = _asked(planning)
    require_samples(asked.request.batch_size, asked.request.world_size)
    limit = _limit(asked)
    with progress():
        case, request = asked.case(asked.analysed(followed(None)))
        contestants = contest(replace(case, limit_bytes=limit), request)
    print(_head(asked))
    print_wide(comparison_table(contestants, limit))


@planned
def fillers(planning: Planning) -> None:
    """Print what a step of MODEL takes by every way to put the next batch's frozen work into its idle time.

    One plan, the one that is chosen for frozen work in idle time. No stage is traced, no program made.
    """
    from passes.comparison import fillers as filled_by

    asked = _asked(planning)
    with progress():
        case, request = asked.case(asked.analysed(followed(None)))
        setting, bound, found = filled_by(replace(case, limit_bytes=_limit(asked)), request)
    print(_head(asked))
    print(f"{setting}; no filling is shorter than {human_seconds(bound)}")
    table = Table("filler")
    for name in ("step", "over bound", "after the pipeline", "bubbles", "samples change ranks"):
        table.add_column(name, justify="right")
    for name, fill in found.items():
        step = fill.iteration_seconds
        numbers = human_seconds(step), f"{step / bound - 1:.1%}", human_seconds(fill.tail_seconds)
        table.add_row(name, *numbers, f"{fill.bubble_ratio:.1%}", "no" if fill.stays else "between layers")
    print_wide(table)


def _asked(planning: Planning) -> "Requested":
    if planning.schedule.endswith(".txt"):
        raise CompileError(f"--schedule {planning.schedule} is an order already; fxpipe simulate tells what it takes")
    if planning.plan is not None:
        raise CompileError(f"--plan {planning.plan} is a plan already; fxpipe simulate tells what it takes")
    return planning.requested()


def _limit(asked: "Requested") -> int | None:
    """The memory limit: the user's, else the device's."""
    from passes.tuner.plans import usable_bytes

    limit, known = asked.request.memory_limit_bytes, asked.cost_model.memory_bytes
    return usable_bytes(known) if limit is None and known else limit


def _head(asked: "Requested") -> str:
    limit, request = _limit(asked), asked.request
    within = f", {human_bytes(limit)} a rank" if limit else ""
    return f"{request.batch_size} samples on {request.world_size} ranks of {asked.cluster}{within}"


@planned
def simulate(planning: Planning) -> None:
    """Print what a step of MODEL will take, and with the next batch's frozen work in its idle time."""
    program, _ = planning.compiled()
    print(program.simulate())
    if program.filled is not None:
        print("with the next batch's frozen work:")
        print(program.simulate(filled=True))


@planned
def explain(planning: Planning) -> None:
    """Print why the plan for MODEL is what it is, and what would make a step faster, in predicted seconds."""
    Console(highlight=False).print(planning.compiled()[0].explain())


@planned
def trace(
    planning: Planning,
    out: Out = Path("trace.json"),
    filled: Filled = False,
    measured: Annotated[bool, typer.Option(help="run it, too, and write its second step beside the predicted")] = False,
) -> None:
    """Write the predicted step as a Chrome trace, for Perfetto.

    With --measured MODEL trains for two steps, under torchrun a rank a process, else all ranks in this one.
    """
    program, batch = planning.compiled()
    if measured and filled:
        raise CompileError("--measured runs a step that does its own frozen work: leave --filled out")
    if not measured:
        print(program.trace(out, filled=filled))
        return
    engine = program.engine() if "WORLD_SIZE" in os.environ else program.local_engine()
    engine.step(batch)
    with engine.trace(out):
        engine.step(batch)
    engine.close()
    if os.environ.get("RANK", "0") == "0":
        print(out)


@planned
def report(planning: Planning, out: Out = Path("report.html")) -> None:
    """Write the plan and the predicted step as one HTML page that needs no network."""
    from fxpipe.options import given_bytes

    print(planning.compiled()[0].report(out, given_bytes(planning.memory_limit)))
