"""`fxpipe cost` and `fxpipe profile`: what a model costs, before any plan."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxpipe.errors import CompileError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory or module:factory")]
BatchSize = Annotated[int, typer.Option(min=1, help="samples in one step, over all ranks")]
DeviceModel = Annotated[
    str | None,
    typer.Option(help="device whose times to plan by, as H100@bfloat16; measured; or a profile's .json file"),
]
Blocks = Annotated[int, typer.Option(min=1, help="about how many blocks to cut the model into")]


def cost(model: Model, batch_size: BatchSize = 8, device: DeviceModel = "A100-80GB", blocks: Blocks = 24) -> None:
    """Print what every block of MODEL costs: formulas in the batch b, seconds on a device."""
    from fxpipe.costing import cost_table, costed, given_cost_model
    from fxpipe.user_model import example_inputs, load_model

    seconds_of = given_cost_model(device or "A100-80GB")
    step = load_model(model)
    found = costed(step, example_inputs(step, batch_size), batch_size, seconds_of, blocks)
    table = cost_table(found, seconds_of, batch_size)
    console = Console()
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)  # formulas are read unfolded
    console.print(table)


def profile(
    model: Model,
    out: Annotated[Path, typer.Option(dir_okay=False, help="JSON file; reused where it holds for model and device")],
    batch_sizes: Annotated[str, typer.Option(help="samples of a micro-batch to time at, as 1,2,4")] = "1,2,4",
    device: Annotated[str, typer.Option(help="device to time on, cpu or cuda:0")] = "cpu",
    blocks: Blocks = 24,
) -> None:
    """Time every block of MODEL on the device at hand, for compile --device-model FILE."""
    import torch

    from cost_models import devices, profiled
    from fxpipe.costing import costed, part_count
    from fxpipe.costing import profile as measure
    from fxpipe.options import given_device
    from fxpipe.user_model import example_inputs, load_model

    sizes = _sizes(batch_sizes)
    where: torch.device = given_device(device)
    step, base = load_model(model), devices.device()
    found = costed(step, example_inputs(step, max(sizes)), max(sizes), base, blocks)
    if out.exists():
        old = profiled.load(out, base)
        profiled.require_key(old.key, profiled.key_of(found.captured.graph, where))
        if all(set(sizes) <= set(entry.samples) for entry in old.entries):
            print(f"{out} holds already: {old.key.device}, {len(old.entries)} parts at {batch_sizes} samples")
            return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("timing", total=part_count(found, sizes))
        made = measure(found, sizes, where, lambda name: bar.update(task, advance=1, description=name[-40:]))
    made.save(out)
    print(f"{out}: {len(made.entries)} parts at {batch_sizes} samples on {made.key.device}")


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise CompileError(f"--batch-sizes {text!r} is not a list of numbers such as 1,2,4") from None
