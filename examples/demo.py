"""A tour: one Stable Diffusion training step, compiled for several ranks, shown, checked and trained in this process.

    make demo
    python examples/demo.py --world-size 4 --steps 30

Everything random is seeded: two runs print the same numbers.
"""

import argparse
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.text import Text

import fxpipe
from examples.demo_tables import columns, legend, num_skips, picture, stages, traffic_kinds, traffic_matrix
from examples.stable_diffusion import StableDiffusionStep, step
from examples.text_to_image import pipe
from fxpipe.program import Program

SAMPLING_RANKS = 4
WIDTH = 100  # columns at most; less in a narrow terminal


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=8, help="ranks, all in this process")
    parser.add_argument("--batch-size", type=int, default=8, help="samples in a step, each a micro-batch of its own")
    parser.add_argument("--steps", type=int, default=15, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the compiled program")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the ranks are threads already
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)

    model = step().double()  # in float64 rounding errors are tiny: a wrong gradient would stand out
    batch = model.example_inputs(options.batch_size)
    title(console, f"A small Stable Diffusion training step, for {options.world_size} ranks")
    introduce(console, model)
    program = compile_aloud(console, model, batch, options)
    title(console, "Who computes what: stages")
    console.print(stages(program))
    title(console, "When: the schedule, time to the right, a digit is a micro-batch")
    console.print(legend(), "", *picture(program, console.width), sep="\n")
    begins = " ".join(map(str, program.schedule.ranks[0][:6]))
    console.print("Drawn with every forward as one unit of time and every backward as two.")
    console.print(f"As text, rank 0 begins [bold]{begins}[/]\n(0F1 is stage 0's forward of micro-batch 1).")
    title(console, "What travels")
    console.print(traffic_matrix(program), "", traffic_kinds(program), sep="\n")
    title(console, "Is it right: one step on all ranks against one device, in float64")
    check(console, program, batch)
    title(console, f"Training on {program.world_size} ranks, as threads of this process")
    train(console, program, batch, options.steps)
    title(console, f"Sampling on {SAMPLING_RANKS} ranks: a pipeline as it is, its denoiser spread over them")
    sample(console)
    title(console, f"To read on: {options.out}/")
    show_files(console, program.dump(options.out), program)


def title(console: Console, text: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{text}", align="left"))


def introduce(console: Console, model: StableDiffusionStep) -> None:
    table = columns("", "", "", "", right=(2,))
    parts = {"vae": "image to latents", "text_encoder": "caption to states", "unet": "predicts the noise"}
    for name, what in parts.items():
        weights = list(model.get_submodule(name).parameters())
        how = "trained" if weights[0].requires_grad else "frozen"
        table.add_row(name, what, f"{sum(w.numel() for w in weights):,} weights", how)
    console.print(table, "")


def compile_aloud(console: Console, model: StableDiffusionStep, batch: Any, options: argparse.Namespace) -> Program:
    """Compiles, with a line for every step of the compiler."""
    tell: dict[str, Callable[[Any], str]] = {
        "capture": lambda a: f"{sum(n.op == 'call_function' for n in a.graph.nodes):,} operations, one graph",
        "batch": lambda a: f"the loss is a {a.loss_scale} over samples: the batch may be cut",
        "blocks": lambda a: f"{len(a.blocks)} blocks, {len(a.components)} frozen components, {num_skips(a)} skips",
        "costs": lambda a: "what every block takes and keeps, by batch size",
        "plan": lambda a: f"{a.staged.num_stages} stages, there and back; {sum(map(len, a.step.ranks))} actions",
        "programs": lambda a: f"{len(a)}, a graph per rank; no timing can deadlock them",
    }
    started = last = time.perf_counter()
    with console.status("compiling"):

        def observe(name: str, artefact: Any) -> None:
            nonlocal last
            now = time.perf_counter()
            if name in tell:
                console.print(f"[cyan]{name:<13}[/] {tell[name](artefact)} [dim]({now - last:.1f} s)[/]")
                last = now

        sizes = {"example_inputs": batch, "microbatches": options.batch_size}
        program = fxpipe.compile(model, options.world_size, **sizes, schedule="wave", observe=observe)
    console.print(f"compiled in {time.perf_counter() - started:.1f} s")
    return program


def check(console: Console, program: Program, batch: Any) -> None:
    with console.status("running both"):
        report = program.verify(**batch)
    table = columns("", "")
    table.add_row(f"loss on {program.world_size} ranks", f"{report.loss:.15f}")
    table.add_row("loss on one device", f"{report.reference_loss:.15f}")
    table.add_row("largest gradient difference", f"{report.max_grad_error:.1e} relative, of {len(report.gradients)}")
    console.print(table)
    console.print("[bold green]exact[/], up to rounding" if report.ok else f"[bold red]NOT EXACT[/]\n{report}")


def train(console: Console, program: Program, batch: Any, num_steps: int) -> None:
    engine = program.local_engine()
    optimizer = torch.optim.AdamW(program.model.parameters(), lr=2e-3)
    losses: list[float] = []
    parts = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"), TimeElapsedColumn())
    with Progress(*parts, console=console) as progress:
        task = progress.add_task("training", total=num_steps, loss=float("nan"))
        for _ in range(num_steps):
            losses.append(float(engine.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
            progress.update(task, advance=1, loss=losses[-1])
    console.print(f"loss {losses[0]:.4f} [cyan]{sparkline(losses)}[/] {losses[-1]:.4f}")


def sample(console: Console) -> None:
    """Six steps of a pipeline: on one device, then with the image's rows in two halves and both prompts apart."""
    one, call = pipe()
    one.unet.double()
    one.vae.double()
    call |= {name: value.double() for name, value in call.items() if isinstance(value, torch.Tensor)}
    with console.status("sampling on one device and on several"):
        sampler = fxpipe.compile_sampler(one, SAMPLING_RANKS, example=call, patches=2)

        def images(made: Any) -> torch.Tensor:
            noise = torch.Generator().manual_seed(0)
            found: torch.Tensor = made(**call, num_inference_steps=6, output_type="pt", generator=noise).images
            return found

        difference = float((images(sampler.pipeline()) - images(one)).abs().max())
    table = columns("", "")
    table.add_row(
        "every rank has", f"1 of {sampler.grid.groups} parts of the samples, 1 of {sampler.grid.patches} of the rows"
    )
    table.add_row("largest difference", f"{difference:.1e} of 1, after 6 steps and the VAE")
    console.print(table)
    console.print("images: [bold green]exact[/], up to rounding" if difference < 1e-10 else "[bold red]NOT EXACT[/]")


def sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low or 1))] for v in values)


def show_files(console: Console, out: Path, program: Program) -> None:
    """Quotes one action of the last rank's program, and says what each file holds."""
    last = program.world_size - 1
    lines = (out / f"rank_{last}.py").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f'begin(transport, "{last}F0")' in line)
    stop = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    console.print(f"rank_{last}.py, from line {start + 1}, the last rank's first forward:\n")
    for line in textwrap.dedent("\n".join(lines[start:stop])).splitlines()[:12]:
        console.print(Text(line, "cyan"), no_wrap=True, overflow="ellipsis")
    table = columns("", "")
    table.add_row("rank_*.py", "every rank's program, then its stage graphs")
    table.add_row("plan.txt", "stages, ranks, orders: to edit and compile; blocks.txt: the blocks")
    table.add_row("grid.txt", "the schedule, drawn; schedule.txt: its text")
    table.add_row("traffic.txt", "bytes of every channel, by kind")
    console.print("", table, sep="\n")


if __name__ == "__main__":
    main()
