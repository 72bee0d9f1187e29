"""Predicted against measured: the step time of three models under three schedules, on 2 ranks of this machine.

    python benchmarks/predicted.py                       all
    python benchmarks/predicted.py dit                   one model

Two processes over gloo, one thread each. Both time their share of the blocks at the same time, so that they slow each
other down as they do in a step; the link is measured too. Then every step is compiled with that profile, predicted, and
run; a low decile of its steps, to which other work on the machine has added least, is held against the prediction. Peak
memory is the largest of the ranks, as predicted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxpipe
from cost_models import devices
from cost_models.profiled import Profile
from examples import dit, stable_diffusion, unconditional_unet
from fxpipe.block_graph import human_bytes
from fxpipe.capture.inputs import call_of
from fxpipe.costing import costed, gathered, profile
from fxpipe.transport.distributed import DistributedTransport

MODELS: dict[str, Callable[[], nn.Module]] = {
    "stable_diffusion": stable_diffusion.step,
    "unconditional_unet": unconditional_unet.step,
    "dit": dit.model,
}
SCHEDULES = ("gpipe", "1f1b", "wave")
BATCH_SIZES = {"stable_diffusion": 16, "unconditional_unet": 128, "dit": 128}  # steps of half a second
MICROBATCHES, WARM_UP, STEPS = 4, 3, 25

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Freed memory stays with the process: page faults of fresh memory would be most of the noise.
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1]),
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="all where left out")
    parser.add_argument("--cluster", help="TOML of the link; measured where left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        measure(options.models or list(MODELS), options.cluster)
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "link.toml")
        here = Path(__file__).parent
        link.write_text(subprocess.check_output([sys.executable, str(here / "network.py")], text=True, env=ENVIRONMENT))
        command = [*LAUNCHER, __file__, *options.models, "--cluster", str(link)]
        subprocess.run(command, check=True, env=ENVIRONMENT)


def measure(models: list[str], cluster: str) -> None:
    """What one rank does; rank 0 prints."""
    table = Table(title=f"{MICROBATCHES} micro-batches on 2 ranks", title_justify="left")
    for column in ("model", "schedule", "batch", "predicted ms", "measured ms", "error", "predicted peak"):
        table.add_column(column, justify="left" if column in ("model", "schedule") else "right")
    for name in models:
        torch.manual_seed(0)
        model = MODELS[name]()
        batch_size = BATCH_SIZES[name]
        seconds_of = profiled(model, batch_size, [batch_size // MICROBATCHES])
        for schedule in SCHEDULES:
            program = fxpipe.compile(
                model, 2, batch_size=batch_size, microbatches=MICROBATCHES, schedule=schedule, cluster=cluster,
                cost_model=seconds_of,
            )  # fmt: skip
            predicted, taken = program.simulate(), _step_seconds(program)
            error = predicted.makespan_seconds / taken - 1
            times = f"{predicted.makespan_seconds * 1e3:.1f}", f"{taken * 1e3:.1f}", f"{error:+.1%}"
            table.add_row(name, schedule, str(batch_size), *times, human_bytes(max(predicted.peak_bytes)))
    if os.environ["RANK"] == "0":
        Console(width=110).print(table)


def profiled(model: nn.Module, batch_size: int, sizes: list[int]) -> Profile:
    """Both ranks time their share of the blocks at once."""
    ranks = DistributedTransport.from_environment("cpu")
    step = costed(model, None, batch_size, devices.device(), 24)
    mine = profile(step, sizes, torch.device("cpu"), share=(ranks.rank, ranks.world_size))
    parts = ranks.gather_object(mine)
    found = ranks.broadcast_object(gathered(parts) if parts else None)
    ranks.close()
    return found


def _step_seconds(program: fxpipe.Program) -> float:
    engine = program.engine()
    engine.check_batches = False
    args, kwargs = call_of(program.model.example_inputs(program.step.batch_size))  # type: ignore[operator]
    batch = kwargs or args
    taken = []
    for index in range(WARM_UP + STEPS):
        started = time.perf_counter()
        engine.step(batch)
        if index >= WARM_UP:
            taken.append(time.perf_counter() - started)
        for parameter in engine.parameters():
            parameter.grad = None
    engine.close()
    return typical(taken)


def typical(seconds: list[float]) -> float:
    """The lowest decile: what is above has waited for something else."""
    return statistics.quantiles(seconds, n=10)[0]


if __name__ == "__main__":
    main()
