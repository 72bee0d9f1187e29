"""The command line: `fxpipe compile`, `show`, `run`; what costs and plans without running, and what samples, is beside.

MODEL is `file.py:factory` or `module:factory`: an nn.Module, or a callable without arguments that returns one. A module
that is not a diffusers backbone says what it trains on by a method `example_inputs(batch_size)`: a tuple or dict of
forward's arguments. Wrong input ends with one line on stderr and exit code 2.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Never

import typer
from rich.console import Console
from rich.rule import Rule
from typer.core import TyperGroup

import fxpipe
from fxpipe.cli.costing import cost, profile
from fxpipe.cli.options import Planning, planned, read
from fxpipe.cli.planning import compare, explain, fillers, report, simulate, trace, tune
from fxpipe.cli.sampling import sample, tune_sampling
from fxpipe.errors import CompileError, FxpipeError, RunError
from fxpipe.plan.plan import Plan


class OneLineErrors(TyperGroup):
    """A command group whose errors, its parser's and fxpipe's, are one line on stderr and exit code 2; `--sample` among
    a command's words makes it the one for samplers."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        if args and f"{args[0]} --sample" in self.commands and "--sample" in args:
            args = [f"{args[0]} --sample", *(word for word in args[1:] if word != "--sample")]
        return super().parse_args(context, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Never:
        extra["standalone_mode"] = False
        logging.disable(logging.CRITICAL)  # torch logs pages about what the one line says
        try:
            code = super().main(args, *rest, **extra)
        except (FxpipeError, typer.TyperException) as error:
            _fail(error.format_message() if isinstance(error, typer.TyperException) else str(error))
        except RunError as error:
            if error.__cause__ is not None:  # raised in this process: where is of use
                raise
            _fail(str(error))
        except OSError as error:
            _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False)

for command in (cost, profile, tune, compare, fillers, simulate, explain, trace, report, sample):
    app.command()(command)


app.command("tune --sample")(tune_sampling)


def main() -> None:
    """The console script."""
    app(prog_name="fxpipe")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print it, and no more")] = False
) -> None:
    """Compiles a diffusion training step for several ranks: one FX graph per rank."""
    if version:
        print(fxpipe.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        known = "compile, show, run, cost, profile, tune, compare, fillers, simulate, explain, trace, report, sample"
        raise CompileError(f"no command given; one of {known} (fxpipe --help tells more)")


@app.command("compile")
@planned
def compile_command(
    planning: Planning,
    dump: Annotated[
        Path | None, typer.Option(file_okay=False, help="folder for plan, schedule and rank graphs")
    ] = None,
    filled: Annotated[bool, typer.Option(help="with --dump: the steps that do frozen work ahead, too")] = False,
) -> None:
    """Compile MODEL; print its plan and schedule, and leave every rank's graph in the dump folder."""
    if filled and dump is None:
        raise CompileError("--filled says what to dump: add --dump DIR, or leave it out")
    program, _ = planning.compiled()
    if dump is None:
        _print_plan(program.plan)
        return
    program.dump(dump, filled)
    show(dump)


@app.command()
def show(directory: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that compile --dump wrote")]) -> None:
    """Print the plan, its schedules, drawn, and the traffic of a dumped program."""
    remedy = f"fxpipe compile MODEL --world-size N --dump {directory} writes it"
    _, traffic = (read(directory / name, remedy) for name in ("plan.txt", "traffic.txt"))
    _print_plan(Plan.load(directory / "plan.txt"))
    _print_text("bytes per step", traffic)


@app.command()
@planned
def run(
    planning: Planning,
    steps: Annotated[int, typer.Option(min=1, help="training steps")],
    lr: Annotated[float, typer.Option(min=0.0, help="AdamW's learning rate")] = 1e-4,
    seed: Annotated[int, typer.Option(help="of the weights, the example inputs and the random draws")] = 0,
    device: Annotated[str | None, typer.Option(help="device of this rank, such as cuda:0")] = None,
) -> None:
    """Train MODEL on its example inputs: under torchrun one rank a process, else all ranks in this process."""
    import torch

    torch.manual_seed(seed)
    program, batch = planning.compiled(device)
    engine = program.engine(device, seed) if "WORLD_SIZE" in os.environ else program.local_engine(seed)
    optimizer, scaler = torch.optim.AdamW(engine.parameters(), lr=lr), engine.scaler()
    with engine.live(steps, every=1) as live:
        for _ in range(steps):
            loss = engine.step(batch, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            live(loss)
    engine.close()


def _print_plan(plan: Plan) -> None:
    """What it says but for the orders, which are drawn."""
    _print_text("plan", plan.summary())
    _print_text("schedule", str(plan.step))
    if plan.steady is not None:
        _print_text("schedule with the next batch's frozen work", str(plan.steady))


def _print_text(title: str, text: str) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)  # grids are wider than some terminals
    console.print(Rule(title, align="left"))
    console.print(text.rstrip())


def _fail(message: str) -> Never:
    # A message may go on with the artefact at fault, marked: that is output to read, the error stays one line.
    head, _, artefact = message.strip().partition("\n")
    if artefact:
        print(artefact)
    print(f"fxpipe: {head}", file=sys.stderr)
    sys.exit(2)
