"""Predicted against measured: the step time of three models under three schedules, on 2 ranks of this machine.

    python benchmarks/predicted.py                       all
    python benchmarks/predicted.py dit                   one model

Two processes over gloo, one thread each. Both time their share of the blocks at the same time, so that they slow each
other down as they do in a step; the link is measured too. A machine that others use is now faster, now slower, for
seconds at a time: so rounds of a profile and of steps take turns, and the prediction from the whole profile is held
against the steps' mean, without the slowest and the fastest tenth. Programs are compiled after the first round. Memory
is the most bytes of tensors alive at once in a step, on each rank; without an optimizer.
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxpipe
from cost_models import devices
from cost_models.profiled import Profile
from cost_models.timing import expected
from examples import dit, stable_diffusion, unconditional_unet
from fxpipe.analysis import costed
from fxpipe.capture.inputs import call_of
from fxpipe.profiling import Profiler, gathered
from fxpipe.run.engine import Engine
from fxpipe.run.transport.distributed import DistributedTransport
from tests.live_bytes import LiveBytes

MODELS: dict[str, Callable[[], nn.Module]] = {
    "stable_diffusion": stable_diffusion.step,
    "unconditional_unet": unconditional_unet.step,
    "dit": dit.model,
}
SCHEDULES = ("gpipe", "1f1b", "wave")
BATCH_SIZES = {"stable_diffusion": 16, "unconditional_unet": 128, "dit": 128}  # steps of half a second
MICROBATCHES, WARM_UP, STEPS = 4, 2, 4

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
    parser.add_argument("--rounds", type=int, default=10, help="of steps under every schedule, and a profile")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        measure(options.models or list(MODELS), options.cluster, options.rounds)
        return
    launch(__file__, *options.models, "--rounds", str(options.rounds))


def launch(script: str, *arguments: str) -> None:
    """Measure the link, then run the script on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "link.toml")
        here = Path(__file__).parent
        link.write_text(subprocess.check_output([sys.executable, str(here / "network.py")], text=True, env=ENVIRONMENT))
        command = [*LAUNCHER, script, *arguments, "--cluster", str(link)]
        subprocess.run(command, check=True, env=ENVIRONMENT)


def measure(models: list[str], cluster: str, rounds: int) -> None:
    """What one rank does; rank 0 prints."""
    table = Table(title=f"{MICROBATCHES} micro-batches on 2 ranks, predicted / measured", title_justify="left")
    for column in ("model", "schedule", "batch", "step, ms", "error", "rank 0, MiB", "error", "rank 1, MiB", "error"):
        table.add_column(column, justify="left" if column in ("model", "schedule") else "right")
    for name in models:
        torch.manual_seed(0)
        model, batch_size = MODELS[name](), BATCH_SIZES[name]
        profiler = TogetherProfiler(model, batch_size, [batch_size // MICROBATCHES])
        options: dict[str, Any] = {"batch_size": batch_size, "microbatches": MICROBATCHES, "cluster": cluster}
        options["cost_model"] = profiler.round()
        programs = {  # of a model each: those of one model would share its parameters
            schedule: fxpipe.compile(copy.deepcopy(model), 2, schedule=schedule, **options) for schedule in SCHEDULES
        }
        taken: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
        for _ in range(rounds):
            for schedule, program in programs.items():
                taken[schedule] += _step_seconds(program)
            seconds_of = profiler.round()
        for schedule, program in programs.items():
            predicted = program.simulate(seconds_of, optimizer_bytes=0)
            cells = _compared(predicted.makespan_seconds * 1e3, expected(taken[schedule]) * 1e3)
            for rank, measured in enumerate(_peak_bytes(program)):
                cells += _compared(predicted.peak_bytes[rank] / 2**20, measured / 2**20)
            table.add_row(name, schedule, str(batch_size), *cells)
    if os.environ["RANK"] == "0":
        Console(width=110).print(table)


class TogetherProfiler:
    """Both ranks time their share of the blocks at once."""

    def __init__(self, model: nn.Module, batch_size: int, sizes: list[int]) -> None:
        step = costed(model, None, batch_size, devices.device(), 24)
        share = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._mine = Profiler(step, sizes, torch.device("cpu"), share)

    def round(self) -> Profile:
        """The profile after one more round."""
        self._mine.round()
        return gathered(_together(self._mine.profile()))


def _compared(predicted: float, measured: float) -> list[str]:
    return [f"{predicted:.1f} / {measured:.1f}", f"{predicted / measured - 1:+.1%}"]


def _step_seconds(program: fxpipe.Program) -> list[float]:
    """Seconds of some steps."""
    engine, batch = _engine(program)
    taken = []
    for index in range(WARM_UP + STEPS):
        started = time.perf_counter()
        engine.step(batch)
        if index >= WARM_UP:
            taken.append(time.perf_counter() - started)
        for parameter in engine.parameters():
            parameter.grad = None
    engine.close()
    return taken


def _peak_bytes(program: fxpipe.Program) -> list[int]:
    """Of every rank, in one step; all ranks find the same."""
    engine, batch = _engine(program)
    with LiveBytes() as live:
        live.see(list(engine.parameters()))
        engine.step(batch)
    engine.close()
    return _together(live.peak)


def _engine(program: fxpipe.Program) -> tuple[Engine, Any]:
    """An engine of this rank, and a batch."""
    engine = program.engine()
    engine.check_batches = False
    args, kwargs = call_of(program.model.example_inputs(program.step.batch_size))  # type: ignore[operator]
    return engine, kwargs or args


def _together(mine: Any) -> list[Any]:
    """What every rank has."""
    ranks = DistributedTransport("cpu")
    found: list[Any] = ranks.broadcast_object(ranks.gather_object(mine))
    ranks.close()
    return found


if __name__ == "__main__":
    main()
