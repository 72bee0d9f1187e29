"""Seconds of a sampling step on 2 processes of this machine over gloo, a thread each, against one, and as predicted.

    python benchmarks/sampling.py                       the link as it is
    python benchmarks/sampling.py --rate 100mbit        throttled both ways (network namespaces and tc: needs root)
    python benchmarks/sampling.py --models unet --rounds 5

A U-Net and a DiT whose step takes a core a third of a second and more. "overhead" is the program of one rank against
the model as it is. Rounds of all ways take turns, since the machine's speed drifts; medians of the steps are shown, of
displaced ones those after the warm-up. Predicted from the machine's measured roofline, scaled so that one device's
step takes what it took, and the measured link.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from rich.console import Console
from rich.table import Table
from torch import nn

import fxpipe
from benchmarks.emulation.namespaces import two_namespaces

WARM_UP, STEPS = 2, 6
WAYS: dict[str, dict[str, Any]] = {
    "exact rows": {"mode": "exact"},
    "displaced rows": {"mode": "displaced", "warmup": WARM_UP, "advance": False},
    "displaced, advanced": {"mode": "displaced", "warmup": WARM_UP, "advance": True},
}


def unet() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=64, block_out_channels=(64, 128, 128), layers_per_block=1, cross_attention_dim=64,
        attention_head_dim=16, norm_num_groups=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    given = {"sample": torch.randn(1, 4, 64, 64), "encoder_hidden_states": torch.randn(1, 16, 64)}
    return model.eval(), {**given, "timestep": torch.tensor(500)}


def dit() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, in_channels=4, out_channels=4, num_layers=12, patch_size=2,
        sample_size=64,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(1, 4, 64, 64), "timestep": torch.tensor([500])}
    return model.eval(), {**given, "class_labels": torch.tensor([3])}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {"unet": unet, "dit": dit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rate", help="of the link, both ways, as tc writes it: 1gbit, 100mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cluster", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        measure(options.models, options.cluster, options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder, two_namespaces(options.rate) as start:
        link = Path(folder, "link.toml")
        link.write_text(start([str(Path(__file__).parent / "network.py")]))
        arguments = ["--models", *options.models, "--rounds", str(options.rounds), "--cluster", str(link)]
        print(start([__file__, *arguments]))


def measure(models: list[str], cluster: Path, rounds: int) -> None:
    """What one rank does; rank 0 prints."""
    console = Console(width=110, quiet=os.environ["RANK"] != "0")
    table = Table(title="median seconds of a step", title_justify="left")
    for column in ("model", "one device", "overhead", *WAYS):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in models:
        table.add_row(name, *cells(*MODELS[name](), cluster, rounds))
    console.print(table)


def cells(model: nn.Module, example: dict[str, Any], cluster: Path, rounds: int) -> list[str]:
    alone = fxpipe.compile_sampler(model, 1, example=example, cost_model="measured")
    samplers = {
        way: fxpipe.compile_sampler(
            model, 2, example=example, cfg=1, cluster=cluster.read_text(), cost_model="measured", **how
        )
        for way, how in WAYS.items()
    }
    taken: dict[str, list[float]] = {way: [] for way in ("eager", "alone", *WAYS)}
    for _ in range(rounds):
        taken["eager"] += eager_seconds(model, example)
        taken["alone"] += step_seconds(alone, example)
        for way, sampler in samplers.items():
            taken[way] += step_seconds(sampler, example)
    one, program = (statistics.median(taken[way]) for way in ("eager", "alone"))
    scale = program / alone.simulate().makespan_seconds
    found = [f"{one:.3f}", f"{program / one - 1:+.1%}"]
    for way, sampler in samplers.items():
        seconds, predicted = statistics.median(taken[way]), predicted_seconds(sampler) * scale
        found.append(f"{seconds:.3f}, {one / seconds:.2f}x; predicted {predicted:.3f}, {predicted / seconds - 1:+.0%}")
    for sampler in samplers.values():
        sampler.close()
    return found


def predicted_seconds(sampler: fxpipe.Sampler) -> float:
    """Of a step after the warm-up."""
    before, after = (sampler.simulate(count).makespan_seconds for count in (WARM_UP + 3, WARM_UP + 4))
    return after - before


@torch.no_grad()
def eager_seconds(model: nn.Module, example: dict[str, Any]) -> Iterator[float]:
    model(**example)
    for _ in range(STEPS):
        started = time.perf_counter()
        model(**example)
        yield time.perf_counter() - started


def step_seconds(sampler: fxpipe.Sampler, example: dict[str, Any]) -> Iterator[float]:
    """Of the steps of one call after the warm-up."""
    picture = "sample" if "sample" in example else "hidden_states"
    with sampler.call():
        for step in range(WARM_UP + STEPS):
            moved = {**example, picture: example[picture] + 0.01 * step, "timestep": example["timestep"] - step}
            started = time.perf_counter()
            sampler.predict(**moved)
            if step >= WARM_UP:
                yield time.perf_counter() - started


if __name__ == "__main__":
    main()
