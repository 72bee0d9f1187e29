"""What the commands that plan have in common: one set of options, those of `fxpipe.compile`.

@planned                                   fxpipe tune MODEL --world-size 8 --memory-limit 40GiB ... --top 5
def tune(planning: Planning, top: Top)  ->     planning = Planning("MODEL", world_size=8, ...), top = 5
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fxpipe.errors import CompileError

if TYPE_CHECKING:
    from torch import nn

    from fxpipe.program import Program

Model = Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory or module:factory")]
BatchSize = Annotated[int, typer.Option(min=1, help="samples in one step, over all ranks")]
DeviceModel = Annotated[
    str | None,
    typer.Option(help="device whose times to plan by, as H100@bfloat16; measured; or a profile's .json file"),
]


@dataclass(frozen=True)
class Planning:
    """The model, and the options of `fxpipe.compile`; what is left out is chosen."""

    model: Model
    world_size: Annotated[int | None, typer.Option(min=1, help="number of ranks; under torchrun, its own")] = None
    batch_size: BatchSize = 8
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
    budget: Annotated[float, typer.Option(min=0.0, help="seconds to look for a better schedule")] = 2.0
    fill: Annotated[str, typer.Option(help="of idle time by frozen work: per-device, greedy, exact, none")] = (
        "per-device"
    )
    cluster: Annotated[
        str | None, typer.Option(help="machines to plan for, as 2x8xV100+Ethernet-10, or a .toml file")
    ] = None
    device_model: DeviceModel = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks asked for, or torchrun's.

        Raises:
            CompileError: neither is given, or they differ.
        """
        launched = os.environ.get("WORLD_SIZE")  # set by torchrun
        if launched is None:
            if self.world_size is None:
                raise CompileError("--world-size is missing; give it, or start under torchrun")
            return self.world_size
        if self.world_size not in (None, int(launched)):
            raise CompileError(
                f"--world-size {self.world_size} differs from torchrun's {launched} processes; leave it out"
            )
        return int(launched)

    def loaded(self) -> "tuple[nn.Module, Any]":
        """The model, and a batch of its example inputs."""
        from fxpipe.cli.user_model import example_inputs, load_model

        step = load_model(self.model)
        return step, example_inputs(step, self.batch_size)

    def compiled(self) -> "tuple[Program, Any]":
        """The program, and the example inputs it was compiled for."""
        import fxpipe

        num_ranks, schedule = self.num_ranks, self.schedule
        if schedule.endswith(".txt"):
            schedule = read(Path(schedule), "give --schedule a schedule's name or the file of its text")
        step, batch = self.loaded()
        program = fxpipe.compile(
            step, num_ranks, example_inputs=batch, batch_size=self.batch_size, microbatches=self.microbatches,
            stages=self.stages, data_parallel=self.data_parallel, schedule=schedule, memory_limit=self.memory_limit,
            collocation=self.collocation, recompute=self.recompute, budget=self.budget, fill=self.fill,
            cluster=self.cluster, cost_model=self.device_model,
        )  # fmt: skip
        return program, batch


def planned(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are those of `Planning` and the function's own, which follow its first parameter."""
    hints = get_type_hints(function, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(function).parameters.values())[1:]]
    shared = list(inspect.signature(Planning).parameters.values())
    names = {field.name for field in fields(Planning)}

    @wraps(function)
    def command(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in names}
        function(Planning(**chosen), **given)

    every = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    return command


def read(path: Path, remedy: str) -> str:
    """A file's text; CompileError with what to do where there is none."""
    if not path.is_file():
        raise CompileError(f"no file {path}; {remedy}")
    return path.read_text()
