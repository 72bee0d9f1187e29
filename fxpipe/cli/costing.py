"""`fxpipe cost` and `fxpipe profile`: what a model costs, before any plan."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fxpipe.cli.options import DEVICE_MODEL, Model, Precision, print_wide
from fxpipe.errors import CompileError

if TYPE_CHECKING:
    import torch

    from cost_models.profiled import Profile
    from fxpipe.analysis import CostedStep
    from fxpipe.plan.transport import Transport

Blocks = Annotated[int, typer.Option(min=1, help="about how many blocks to cut the model into")]


def cost(
    model: Model,
    batch_size: Annotated[int, typer.Option(min=1, help="samples in one step, over all ranks")] = 8,
    device: Annotated[str, typer.Option("--device-model", help=DEVICE_MODEL)] = "A100-80GB",
    blocks: Blocks = 24,
    precision: Precision = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="write everything to this file, formulas as strings")
    ] = None,
) -> None:
    """Print what every block of MODEL costs: formulas in the batch b, seconds on a device."""
    from fxpipe.analysis import costed, given_cost_model
    from fxpipe.cli.user_model import example_inputs, load_model
    from fxpipe.show.cost_report import cost_data, cost_table

    step = load_model(model)
    seconds_of = given_cost_model(device)
    found = costed(step, example_inputs(step, batch_size), batch_size, seconds_of, blocks, precision=precision)
    if json_file is not None:
        json_file.write_text(json.dumps(cost_data(found, batch_size), indent=1) + "\n")
    print_wide(cost_table(found, batch_size), 1000)


def profile(
    model: Model,
    out: Annotated[Path, typer.Option(dir_okay=False, help="JSON file; reused where it holds for model and device")],
    batch_sizes: Annotated[str, typer.Option(help="samples of a micro-batch to time at, as 1,2,4")] = "1,2,4",
    device: Annotated[str, typer.Option(help="device to time on, cpu or cuda:0")] = "cpu",
    blocks: Blocks = 24,
    precision: Precision = None,
) -> None:
    """Time every block of MODEL on the device at hand, for compile --device-model FILE.

    Under torchrun every rank times its share of the blocks on its own device, and rank 0 writes the file.
    """
    from fxpipe.options import given_device
    from fxpipe.run.transport.distributed import DistributedTransport

    sizes, where = _sizes(batch_sizes), given_device(device)
    if "RANK" not in os.environ:
        _profile(model, out, sizes, where, blocks, precision, None)
        return
    ranks = DistributedTransport(where)
    try:
        _profile(model, out, sizes, ranks.device, blocks, precision, ranks)
    except BaseException as error:
        ranks.abort(error)
        raise
    finally:
        ranks.close()


def _profile(
    model: str,
    out: Path,
    sizes: Sequence[int],
    where: "torch.device",
    blocks: int,
    precision: str | None,
    ranks: "Transport | None",
) -> None:
    """As rank 0 of one, or as one of many `ranks`."""
    from cost_models import devices, profile_files
    from fxpipe.analysis import costed
    from fxpipe.cli.user_model import example_inputs, load_model
    from fxpipe.profiling import ROUNDS, Profiler, gathered

    share = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    step, base = load_model(model), devices.device()
    batch = example_inputs(step, max(sizes))
    found = costed(step, batch, max(sizes), base, blocks, precision=precision, device=where)
    held = share[0] == 0 and out.exists() and _holds(profile_files.load(out, base), found, sizes, where)
    if held:
        print(f"{out} holds already: all parts at {', '.join(map(str, sizes))} samples")
    if held if ranks is None else ranks.broadcast_object(held):
        return
    with Progress(console=Console(stderr=True), disable=share[0] != 0) as bar:
        profiler = Profiler(found, sizes, where, share)
        task = bar.add_task("timing", total=ROUNDS * profiler.num_timings)
        for _ in range(ROUNDS):
            profiler.round(lambda name: bar.update(task, advance=1, description=name[-40:]))
    made = profiler.profile()
    shares = [made] if ranks is None else ranks.gather_object(made)
    if shares is not None:
        whole = gathered(shares)
        profile_files.save(whole, out)
        by = "" if ranks is None else f", by {ranks.world_size} ranks"
        print(f"{out}: {len(whole.entries)} parts at {', '.join(map(str, sizes))} samples on {whole.key.device}{by}")


def _holds(old: "Profile", found: "CostedStep", sizes: Sequence[int], where: "torch.device") -> bool:
    """Whether a profile has all sizes; CompileError where it is of another graph or device."""
    from cost_models import profiled

    profiled.require_key(old.key, profiled.key_of(found.costs, where))
    return all(set(sizes) <= set(entry.samples) for entry in old.entries)


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise CompileError(f"--batch-sizes {text!r} is not a list of numbers such as 1,2,4") from None
