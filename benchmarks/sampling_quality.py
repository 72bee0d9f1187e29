"""How far displaced sampling is from one device's, on models that have learnt something: PSNR and digits recognised.

    python benchmarks/sampling_quality.py                  minutes to train, once, and minutes to sample
    python benchmarks/sampling_quality.py --models DiT --steps 20 10

A U-Net and a DiT trained on digits are sampled by DDIM, without and with noise added (eta 0 and 1), on one device and
on ranks of this process, from the same noise: exact, and displaced after two exact steps, by every kind of norm
("displaced" is "corrected"), with values moved on by their own last change ("advanced", which pipelines have not) and
without. Cells say the images' PSNR against one device's, in decibels (the more, the nearer), and how many digits a
classifier trained on real ones recognises. What must hold is printed below the tables, and the command fails where it
does not.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxpipe
from benchmarks.digit_denoisers import MODELS, SIDE, ddim, share_recognised, trained

_PLAIN = {"mode": "displaced", "advance": False, "warmup": 2}
_ADVANCED = {"mode": "displaced", "advance": True}
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "sync": _PLAIN | {"norms": "sync"},
    "displaced": _PLAIN | {"norms": "corrected"},
    "merged": _PLAIN | {"norms": "merged"},
    "separate": _PLAIN | {"norms": "separate"},
    "advanced": _ADVANCED | {"warmup": 2},
    "advanced after 1": _ADVANCED | {"warmup": 1},
    "advanced after 4": _ADVANCED | {"warmup": 4},
}
NORMS = ("sync", "displaced", "merged", "separate")  # the best first; a DiT has none over rows
TIE = 0.2  # decibels
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows of 2": {"world_size": 2, "patches": 2},
    "rows of 4": {"world_size": 4, "patches": 4},
    "PipeFusion of 4": {"world_size": 2, "patches": 4, "stages": 2},
}
SHOWN = ("rows of 4", "PipeFusion of 4")  # as images


class Score(NamedTuple):
    """PSNR in decibels, and the share of digits recognised."""

    decibels: float
    recognised: float

    def __str__(self) -> str:
        return f"{self.decibels:.1f} {self.recognised:.0%}"


Key = tuple[float, str, str]  # eta, layout, mode
Predict = Callable[..., Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-steps", type=int, default=3000)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 20, 10], help="of a sampling loop")
    parser.add_argument("--samples", type=int, default=2, help="of every digit")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("out"), help="for weights, which are used again, and images")
    parser.add_argument("--report", metavar="CLUSTER", help="also draw them against latency on 4 such devices, 4xCPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=130)
    failed = False
    labels = torch.arange(10).repeat_interleave(options.samples)
    for name in options.models:
        model = trained(name, options.training_steps, options.out, console.print)
        ways = dict(predictions(model, name, len(labels)))
        for steps in options.steps:
            images, scores = measured(model, ways, labels, steps)
            save_grid(
                {way: some[:: options.samples] for way, some in images.items()}, options.out / f"{name}_{steps}.png"
            )
            console.print(table(f"{name}, {steps} steps", scores))
            if options.report:
                console.print(report(model, name, steps, options.report, options.out / f"{name}_{steps}.html"))
            for what, holds in gates(scores):
                failed |= not holds
                console.print(f"{'holds' if holds else 'FAILS'}: {name}, {steps} steps, {what}", highlight=False)
    if failed:
        raise SystemExit(1)


def measured(
    model: nn.Module, ways: dict[tuple[str, str], Predict], labels: Tensor, steps: int
) -> tuple[dict[str, Tensor], dict[Key, Score]]:
    """Every layout in every mode that it has; and images, made without noise added."""
    scores: dict[Key, Score] = {}
    shown: dict[str, Tensor] = {}
    for eta in (0.0, 1.0):
        noise = torch.randn(steps + 1, len(labels), 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        wanted = sampled(model, labels, noise, eta)
        shown.setdefault("one device", wanted)
        scores[eta, "one device", ""] = Score(math.inf, share_recognised(wanted, labels))
        for (layout, mode), images_of in ways.items():
            found = images_of(labels, noise, eta)
            if layout in SHOWN:
                shown.setdefault(f"{layout}, {mode}", found)
            scores[eta, layout, mode] = Score(psnr(found, wanted), share_recognised(found, labels))
    return shown, scores


def predictions(model: nn.Module, name: str, num_samples: int) -> Iterator[tuple[tuple[str, str], Predict]]:
    """How every layout in every mode makes images. Through stages samples go by themselves, so each has its call."""
    for layout, ranks in LAYOUTS.items():
        for mode, how in MODES.items():
            if (name == "DiT" and mode in NORMS and mode != "displaced") or ("stages" in ranks and mode != "displaced"):
                continue
            size = 1 if "stages" in ranks else num_samples
            sampler = fxpipe.compile_sampler(model, example=example(name, size), cfg=1, **ranks, **how)
            yield (layout, mode), lambda *args, sampler=sampler, size=size: in_calls(sampler, size, *args)


def example(name: str, num_samples: int) -> dict[str, Tensor]:
    """A call of the denoiser."""
    picture = "hidden_states" if name == "DiT" else "sample"
    numbers = torch.zeros(num_samples, dtype=torch.long)
    return {picture: torch.zeros(num_samples, 1, SIDE, SIDE), "timestep": numbers, "class_labels": numbers.clone()}


def report(model: nn.Module, name: str, steps: int, cluster: str, page: Path) -> Path:
    """Decibels against predicted latency of the ways to sample a digit that the planner considers, on a page."""
    noise = torch.randn(steps + 1, 1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    sampler = fxpipe.compile_sampler(
        model, 4, example=example(name, 1), mode="displaced", warmup=2, steps=steps, cluster=cluster
    )
    quality = sampler.measure(lambda predict: sampled(predict, torch.tensor([3]), noise, 0.0))
    return sampler.report(page, steps, quality)


def in_calls(sampler: fxpipe.Sampler, size: int, labels: Tensor, noise: Tensor, eta: float) -> Tensor:
    """Images made `size` at a time."""
    found = []
    for of_labels, of_noise in zip(labels.split(size), noise.split(size, 1), strict=True):
        with sampler.call():
            found.append(sampled(sampler.predict, of_labels, of_noise, eta))
    return torch.cat(found)


@torch.no_grad()
def sampled(predict: Predict, labels: Tensor, noise: Tensor, eta: float) -> Tensor:
    """Images [B, 1, 16, 16] in [-1, 1]. `noise` [steps + 1, B, 1, 16, 16]: the first, and what steps add times eta."""
    scheduler = ddim()
    scheduler.set_timesteps(len(noise) - 1)
    images = noise[0]
    for time, added in zip(scheduler.timesteps, noise[1:], strict=True):
        predicted = predict(images, timestep=time.expand(len(labels)), class_labels=labels).sample
        images = scheduler.step(predicted, time, images, eta=eta, variance_noise=added).prev_sample
    return images.clamp(-1, 1)


def psnr(found: Tensor, wanted: Tensor) -> float:
    """In decibels, for values in [-1, 1]."""
    error = float((found - wanted).square().mean())
    return math.inf if error == 0 else 10 * math.log10(4 / error)


def table(title: str, scores: dict[Key, Score]) -> Table:
    modes = list(dict.fromkeys(mode for *_, mode in scores if mode))
    shown = Table(title=f"{title}: PSNR against one device in dB, digits recognised", title_justify="left")
    for column in ("noise", "layout", *modes):
        shown.add_column(column, justify="left" if column == "layout" else "right", no_wrap=column == "layout")
    for eta, layout in dict.fromkeys(key[:2] for key in scores):
        known = {mode: str(scores[eta, layout, mode]) for mode in modes if (eta, layout, mode) in scores}
        if layout == "one device":
            known["exact"] = f"{scores[eta, layout, ''].recognised:.0%}"
        shown.add_row(f"{eta:.0f}", layout, *(known.get(mode, "") for mode in modes))
    return shown


def gates(scores: dict[Key, Score]) -> Iterator[tuple[str, bool]]:
    """What must hold, and whether it does."""
    for eta, layout in dict.fromkeys(key[:2] for key in scores):
        decibels = {mode: score.decibels for (*where, mode), score in scores.items() if where == [eta, layout]}
        where = f"{'noise added' if eta else 'no noise'}, {layout}"
        if "exact" in decibels:
            yield f"{where}: exact is one device's, {decibels['exact']:.0f} dB", decibels["exact"] > 80
        if "advanced" in decibels:
            gained, least = decibels["advanced"] - decibels["displaced"], -TIE if eta else 3.0
            yield f"{where}: advanced {gained:+.1f} dB, at least {least:+.1f}", gained >= least
        if not eta and "sync" in decibels:
            values = [decibels[mode] for mode in NORMS]
            ordered = all(better > worse - TIE for better, worse in pairwise(values))
            yield f"{where}: {' > '.join(f'{mode} {decibels[mode]:.1f}' for mode in NORMS)}", ordered
        if layout.startswith("PipeFusion"):
            rows = scores[eta, "rows of 4", "displaced"].decibels
            yield f"{where}: {decibels['displaced']:.1f} dB, above rows of 4, {rows:.1f}", decibels["displaced"] > rows


def save_grid(rows: dict[str, Tensor], path: Path, scale: int = 3) -> None:
    """A PNG with a row per way, its name before it, and a column per image."""
    side, margin = scale * (SIDE + 1), 190
    grid = Image.new("L", (margin + side * len(next(iter(rows.values()))), side * len(rows)))
    for row, (name, images) in enumerate(rows.items()):
        ImageDraw.Draw(grid).text((4, row * side + side // 3), name, fill=255)
        for column, image in enumerate(images):
            pixels = Image.fromarray(((image[0] + 1) * 127.5).round().byte().numpy())
            pixels = pixels.resize((scale * SIDE, scale * SIDE), Image.Resampling.BICUBIC)
            grid.paste(pixels, (margin + column * side, row * side))
    grid.quantize(16).save(path, optimize=True)


if __name__ == "__main__":
    main()
