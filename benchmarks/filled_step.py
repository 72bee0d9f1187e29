"""Frozen work in idle time, measured: two real ranks over gloo, a thread each, against the prediction.

    python benchmarks/filled_step.py
    python benchmarks/filled_step.py --rounds 20

A step whose frozen encoder takes about 40 % of its backbone's time. Three ways, in turns, in the same run:

    frozen first    each micro-batch's frozen work, then the pipeline, as one step
    after           the next batch's frozen work after the pipeline, shared out over the ranks
    filled          the next batch's frozen work in the pipeline's idle time

Both ranks time their share of the blocks at once, so that they slow each other down as they do in a step; the link is
measured too. Rounds of the profile and of steps take turns; the prediction from the whole profile is held against the
steps' mean, without the slowest and the fastest tenth; gains are over "frozen first".
"""

import argparse
import copy
import os
import time
from typing import Any

import torch
from predicted import TogetherProfiler, launch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxpipe
from cost_models.profiled import Profile
from cost_models.timing import expected
from fxpipe.run.engine import Engine

BATCH_SIZE, MICROBATCHES, WIDTH = 16, 2, 64
WAYS = ("frozen first", "after", "filled")


class Step(nn.Module):
    """Images [B, 3, 32, 32]; a frozen convolutional encoder, a trained stack of residual convolutions."""

    def __init__(self, frozen_layers: int = 14, layers: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.encoder = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(frozen_layers))
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(layers))
        for part in (self.inward, self.encoder):
            part.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.inward(images)
        for layer in self.encoder:
            features = torch.tanh(layer(features))
        y = features
        for layer in self.layers:
            y = y + nn.functional.silu(layer(y))
        return nn.functional.mse_loss(self.outward(y), images)

    def example_inputs(self, batch_size: int) -> dict[str, Tensor]:
        return {"images": torch.randn(batch_size, 3, 32, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="of so many steps of each way")
    parser.add_argument("--cluster", help="TOML of the link; measured where left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        measure(options.rounds, options.cluster)
        return
    launch(__file__, "--rounds", str(options.rounds))


def measure(rounds: int, cluster: str | None) -> None:
    """What one rank does; rank 0 prints."""
    model = Step()
    profiler = TogetherProfiler(model, BATCH_SIZE, [1, 2, 4, BATCH_SIZE // MICROBATCHES, BATCH_SIZE])
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    options |= {"cost_model": profiler.round(), "cluster": cluster}
    filled, after = (fxpipe.compile(copy.deepcopy(model), 2, fill=fill, **options) for fill in ("idle", "after"))
    taken, seconds_of = _taken(filled, after, rounds, profiler)
    predicted = {
        "frozen first": filled.simulate(seconds_of).makespan_seconds,
        "after": after.simulate(seconds_of, filled=True).makespan_seconds,
        "filled": filled.simulate(seconds_of, filled=True).makespan_seconds,
    }
    if os.environ["RANK"] == "0":
        _print(filled, predicted, {way: expected(seconds) for way, seconds in taken.items()})


def _taken(
    filled: fxpipe.Program, after: fxpipe.Program, rounds: int, profiler: TogetherProfiler
) -> tuple[dict[str, list[float]], Profile]:
    """Seconds of steps of all three ways in turns, the first round left out; the profile at the end."""
    batch = filled.model.example_inputs(BATCH_SIZE)  # type: ignore[operator]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 1):
        for way in WAYS:
            engine = (after if way == "after" else filled).engine()
            engine.check_batches = False
            seconds = _steps(engine, batch, None if way == "frozen first" else batch)
            engine.close()
            if index:
                found[way] += seconds
        seconds_of = profiler.round()
    return found, seconds_of


def _steps(engine: Engine, batch: dict[str, Tensor], following: dict[str, Tensor] | None) -> list[float]:
    """Five steps on, the first two left out: they do frozen work that no step before did."""
    found = []
    for _ in range(7):
        started = time.perf_counter()
        engine.step(batch, following)
        found.append(time.perf_counter() - started)
        for parameter in engine.parameters():
            parameter.grad = None
    return found[2:]


def _print(program: fxpipe.Program, predicted: dict[str, float], measured: dict[str, float]) -> None:
    timeline = program.simulate()
    frozen = sum(event.seconds for event in timeline.actions if event.kind == "T")
    trained = sum(timeline.busy_seconds) - frozen
    share = f"frozen work {frozen / trained:.0%} of the backbone's time"
    title = f"{BATCH_SIZE} samples on 2 ranks, 1F1B, {MICROBATCHES} micro-batches; {share}"
    table = Table("", title=title, title_justify="left")
    for column in ("predicted ms", "gain", "measured ms", "gain", "gain, measured / predicted"):
        table.add_column(column, justify="right")
    for way in WAYS:
        gains = [times[WAYS[0]] / times[way] for times in (predicted, measured)]
        table.add_row(
            way, f"{predicted[way] * 1e3:.1f}", f"{gains[0]:.3f}x", f"{measured[way] * 1e3:.1f}", f"{gains[1]:.3f}x",
            f"{gains[1] / gains[0] - 1:+.1%}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
