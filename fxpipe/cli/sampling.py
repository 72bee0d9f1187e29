"""`fxpipe sample`: a pipeline's images on several ranks; `fxpipe tune --sample`: how they would be made."""

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from fxpipe.cli.options import DEVICE_MODEL, print_wide, ranks_asked
from fxpipe.cli.user_model import load_pipeline, load_sampled
from fxpipe.errors import CompileError

Ranks = Annotated[int | None, typer.Option("--world-size", min=1, help="ranks; torchrun's where left out")]
Steps = Annotated[int | None, typer.Option(min=1, help="num_inference_steps of the call")]
Height = Annotated[int | None, typer.Option(min=1, help="of an image, in pixels")]
Width = Annotated[int | None, typer.Option(min=1, help="of an image, in pixels")]
Groups = Annotated[int | None, typer.Option(min=1, help="groups of samples; chosen where left out")]
Stages = Annotated[int | None, typer.Option(min=1, help="columns of ranks with a part of the denoiser each")]
Patches = Annotated[str | None, typer.Option(help="how many of the rows, or bounds in units: 0,3,8")]
Save = Annotated[Path | None, typer.Option(dir_okay=False, help="file for the plan")]
Displaced = Annotated[bool, typer.Option(help="patches may read what the others had a step before")]
Warmup = Annotated[int, typer.Option(min=1, help="exact steps before displaced ones")]
Attention = Annotated[
    Literal["auto", "gather", "ulysses", "ring"], typer.Option(help="how patches of an exact step attend to each other")
]
On = Annotated[str | None, typer.Option("--cluster", help="devices and links to predict for, such as 2x4xA100")]
Limit = Annotated[str | None, typer.Option("--memory-limit", help="what a rank may hold, as 40GiB")]
_LATENCY: Literal["latency", "throughput"] = "latency"
_AUTO: Literal["auto", "gather", "ulysses", "ring"] = "auto"


def tune_sampling(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory of a pipeline, or of a denoiser")],
    world_size: Ranks = None,
    objective: Annotated[
        Literal["latency", "throughput"], typer.Option(help="of one call, or of many requests joined in calls")
    ] = _LATENCY,
    steps: Steps = None,
    height: Height = None,
    width: Width = None,
    cfg: Groups = None,
    stages: Stages = None,
    patches: Patches = None,
    displaced: Displaced = False,
    warmup: Warmup = 4,
    attention: Attention = _AUTO,
    cluster: On = None,
    cost_model: Annotated[str | None, typer.Option("--device-model", help=DEVICE_MODEL)] = None,
    memory_limit: Limit = None,
    top: Annotated[int | None, typer.Option(min=1, help="rows of the table; all where left out")] = None,
    save: Save = None,
) -> None:
    """Print all layouts for sampling MODEL, the best first, what every other loses by, and the plan.

    A denoiser's call is made from its config; weights may be on the meta device. The chosen plan is lowered and
    checked; nothing runs.
    """
    from fxpipe.plan.sample_outcome import SampleOutcome, sample_table
    from fxpipe.sample_compiler import compile_sampler

    made, call = load_sampled(model)
    given = {"num_inference_steps": steps, "height": height, "width": width}
    call = call if call is None else call | {name: value for name, value in given.items() if value is not None}
    if call is None and (height or width):
        raise CompileError(f"--height and --width are of a pipeline's image; {model} is a denoiser, give its call")
    looked_at: list[tuple[SampleOutcome, ...]] = []

    def observe(name: str, artefact: Any) -> None:
        if name == "layouts":
            looked_at.append(artefact)

    mode: Literal["exact", "displaced"] = "displaced" if displaced else "exact"
    sampler = compile_sampler(
        made, ranks_asked(world_size), example=call, cfg=cfg, stages=stages, patches=_patches(patches), mode=mode,
        warmup=warmup, attention=attention, cluster=cluster, cost_model=cost_model, memory_limit=memory_limit,
        steps=steps, objective=objective, observe=observe,
    )  # fmt: skip
    print_wide(sample_table(looked_at[-1], top))
    print(sampler.plan.summary())
    if save is not None:
        print(f"plan in {sampler.plan.save(save)}")


def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory or module:factory of a pipeline")],
    world_size: Ranks = None,
    prompt: Annotated[list[str] | None, typer.Option(help="of an image; once for each")] = None,
    steps: Steps = None,
    height: Height = None,
    width: Width = None,
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    cfg: Groups = None,
    stages: Stages = None,
    patches: Patches = None,
    plan: Annotated[Path | None, typer.Option(dir_okay=False, help="lower the plan of this file")] = None,
    save: Save = None,
    displaced: Displaced = False,
    warmup: Warmup = 4,
    attention: Attention = _AUTO,
    cluster: On = None,
    memory_limit: Limit = None,
    verify: Annotated[bool, typer.Option(help="hold one call of the denoiser against one device")] = False,
    dump: Annotated[Path | None, typer.Option(file_okay=False, help="folder for every rank's graph")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="image file for all images in a row")] = None,
) -> None:
    """Sample from the pipeline MODEL: under torchrun one rank a process, else all ranks in this process.

    The factory returns the pipeline, or the pipeline and keyword arguments of its call.
    """
    import torch

    from fxpipe.sample_compiler import compile_sampler

    pipe, call = load_pipeline(model)
    given = {"prompt": prompt, "num_inference_steps": steps, "height": height, "width": width}
    call |= {name: value for name, value in given.items() if value is not None}
    console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False, markup=False, soft_wrap=True)
    mode: Literal["exact", "displaced"] = "displaced" if displaced else "exact"
    layout = {"cfg": cfg, "stages": stages, "patches": _patches(patches), "plan": plan}
    how: dict[str, Any] = {**layout, "mode": mode, "warmup": warmup, "attention": attention}
    how |= {"cluster": cluster, "memory_limit": memory_limit}
    sampler = compile_sampler(pipe, ranks_asked(world_size), example=call, **how)
    console.print(str(sampler))
    console.print(str(sampler.simulate()))
    if verify:
        console.print(str(sampler.verify()))
    if dump is not None:
        sampler.dump(dump)
    if save is not None and os.environ.get("RANK", "0") == "0":
        console.print(f"plan in {sampler.plan.save(save)}")
    started = time.perf_counter()
    made = sampler.pipeline()(**call, generator=torch.Generator().manual_seed(seed))
    console.print(f"sampled in {time.perf_counter() - started:.1f} s")
    if out is not None and os.environ.get("RANK", "0") == "0":
        _row(made).save(out)
        console.print(f"images in {out}")
    sampler.close()


def _patches(text: str | None) -> int | list[int] | None:
    """A count, or bounds."""
    try:
        numbers = [] if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise CompileError(f"--patches {text}: give a count (4), or bounds in units from 0 on (0,3,8)") from None
    return None if text is None else numbers[0] if len(numbers) == 1 else numbers


def _row(made: Any) -> Any:
    """The images of a pipeline's output side by side."""
    from PIL import Image

    images = getattr(made, "images", None)
    if not isinstance(images, list) or not all(isinstance(image, Image.Image) for image in images):
        raise CompileError(f"--out: the pipeline returns {type(made).__name__}, no list of images; leave it out")
    row = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)))
    at = 0
    for image in images:
        row.paste(image, (at, 0))
        at += image.width
    return row
