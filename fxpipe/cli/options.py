"""What the commands that plan have in common: one set of options, those of `fxpipe.compile`.

@planned                                   fxpipe tune MODEL --world-size 8 --memory-limit 40GiB ... --top 5
def tune(planning: Planning, top: Top)  ->     planning = Planning("MODEL", world_size=8, ...), top = 5
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fxpipe.errors import CompileError

if TYPE_CHECKING:
    from torch import nn

    from fxpipe.compiler import Requested
    from fxpipe.plan.plan import Plan
    from fxpipe.program import Program

Model = Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory or module:factory")]
Precision = Annotated[
    str | None, typer.Option(help="bf16 or fp16: forward runs under autocast; as the model computes if left out")
]
Backend = Annotated[str, typer.Option(help="what graphs run by: eager, inductor, or cudagraphs on a GPU")]
DEVICE_MODEL = "device whose times to plan by, as H100@bfloat16; measured; or a profile's .json file"
_SAMPLES = 8


def ranks_asked(world_size: int | None, otherwise: int | None = None) -> int:
    """The number of ranks asked for, torchrun's, or the `otherwise` one.

    Raises:
        CompileError: none is given, or torchrun has started another number.
    """
    launched = os.environ.get("WORLD_SIZE")  # set by torchrun
    if launched is None:
        if world_size is None and otherwise is None:
            raise CompileError("--world-size is missing; give it, or start under torchrun")
        return cast(int, world_size or otherwise)
    if world_size not in (None, int(launched)):
        raise CompileError(f"--world-size {world_size} differs from torchrun's {launched} processes; leave it out")
    return int(launched)


@dataclass(frozen=True)
class Planning:
    """The model, and the options of `fxpipe.compile`; what is left out is chosen."""

    model: Model
    world_size: Annotated[int | None, typer.Option(min=1, help="number of ranks; under torchrun, its own")] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"samples in one step, over all ranks; {_SAMPLES} if left out")
    ] = None
    microbatches: Annotated[int | None, typer.Option(min=1, help="micro-batches in one step")] = None
    stages: Annotated[int | None, typer.Option(min=1, help="stages of a pipeline")] = None
    data_parallel: Annotated[int | None, typer.Option(min=1, help="pipelines that share the batch")] = None
    schedule: Annotated[str, typer.Option(help="a schedule's name, or a .txt file with its text")] = "auto"
    memory_limit: Annotated[str | None, typer.Option(help="what a rank may need, as 40GiB")] = None
    recompute: Annotated[
        bool | None, typer.Option(help="compute forwards again in the backward; only where needed if left out")
    ] = None
    collocation: Annotated[
        str | None, typer.Option(help="both ends of a skip on one rank: hard, or soft where balance allows")
    ] = None
    shard: Annotated[
        str | None,
        typer.Option(
            help="what replicas of a stage share out: none, optimizer (states); with them gradients, weights or all"
        ),
    ] = None
    offload_optimizer: Annotated[
        bool | None, typer.Option(help="the host keeps optimizer states; if nothing fits otherwise where left out")
    ] = None
    budget: Annotated[float, typer.Option(min=0.0, help="seconds to look for a better schedule")] = 2.0
    fill: Annotated[
        str, typer.Option(help="the next batch's frozen work: auto, idle (in idle time), after (training), none")
    ] = "auto"
    precision: Precision = None
    backend: Backend = "eager"
    cluster: Annotated[
        str | None, typer.Option(help="machines to plan for, as 2x8xV100+Ethernet-10, or a .toml file")
    ] = None
    cost_model: Annotated[str | None, typer.Option("--device-model", help=DEVICE_MODEL)] = None
    cache: Annotated[bool, typer.Option(help="use captures of earlier runs, and keep this one's")] = True
    plan: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="a plan of tune --save or plan.txt of a dump: nothing is planned"),
    ] = None

    @cached_property
    def made(self) -> "Plan | None":
        """The plan that was made before."""
        from fxpipe.plan.plan import Plan

        return None if self.plan is None else Plan.load(self.plan)

    @property
    def num_ranks(self) -> int:
        """The number of ranks asked for, torchrun's, or the plan's.

        Raises:
            CompileError: none is given, or torchrun has started another number.
        """
        planned = None if self.made is None else self.made.staged.world_size
        return ranks_asked(self.world_size, planned)

    def loaded(self, batch_size: int) -> "tuple[nn.Module, Any]":
        """The model, and a batch of its example inputs."""
        from fxpipe.cli.user_model import example_inputs, load_model

        step = load_model(self.model)
        return step, example_inputs(step, batch_size)

    def options(self) -> "tuple[nn.Module, Any, dict[str, Any]]":
        """The model, a batch of its example inputs, and what `fxpipe.compile` is to be called with beside them."""
        num_ranks, schedule, made = self.num_ranks, self.schedule, self.made
        if schedule.endswith(".txt"):
            schedule = read(Path(schedule), "give --schedule a schedule's name or the file of its text")
        batch_size = self.batch_size or (_SAMPLES if made is None else made.batch_size)
        step, batch = self.loaded(batch_size if made is None else made.batch_size)
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        completed = {"world_size": num_ranks, "batch_size": batch_size, "schedule": schedule, "plan": made}
        return step, batch, {**options, **completed, "example_inputs": batch}

    def requested(self) -> "Requested":
        """What is to be planned, checked."""
        from fxpipe.compiler import requested

        step, _, options = self.options()
        return requested(step, **options)

    def compiled(self, device: str | None = None) -> "tuple[Program, Any]":
        """The program, for the model's device unless one is named, and the example inputs it was compiled for."""
        import fxpipe

        step, batch, options = self.options()
        return fxpipe.compile(step, **options, device=device), batch


def planned(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are those of its first parameter's class, such as `Planning`, and then its own."""
    hints = get_type_hints(function, include_extras=True)
    first, *rest = inspect.signature(function).parameters.values()
    own, options = [p.replace(annotation=hints[p.name]) for p in rest], hints[first.name]
    shared = list(inspect.signature(options).parameters.values())

    @wraps(function)
    def command(**given: Any) -> None:
        function(options(**{p.name: given.pop(p.name) for p in shared}), **given)

    every = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    return command


def read(path: Path, remedy: str) -> str:
    """A file's text; CompileError with what to do where there is none."""
    if not path.is_file():
        raise CompileError(f"no file {path}; {remedy}")
    return path.read_text()


def print_wide(table: Table, most: int = 180) -> None:
    """Print a table as wide as its columns need, up to so many characters: numbers are read unfolded."""
    console = Console()
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, min(most, Measurement.get(console, wide, table).maximum))
    console.print(table)
