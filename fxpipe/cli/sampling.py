"""`fxpipe sample`: a pipeline's images on several ranks."""

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from fxpipe.cli.options import print_wide, ranks_asked
from fxpipe.cli.user_model import load_pipeline
from fxpipe.errors import CompileError


def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory or module:factory of a pipeline")],
    world_size: Annotated[int | None, typer.Option(min=1, help="ranks; torchrun's where left out")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="of an image; once for each")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="num_inference_steps of the call")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="of an image, in pixels")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="of an image, in pixels")] = None,
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    cfg: Annotated[int | None, typer.Option(min=1, help="groups of samples; as many as fit where left out")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="columns of ranks with a part of the denoiser each")] = None,
    patches: Annotated[str | None, typer.Option(help="how many of the rows, or bounds in units: 0,3,8")] = None,
    plan: Annotated[Path | None, typer.Option(dir_okay=False, help="lower the plan of this file")] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="file for the plan")] = None,
    displaced: Annotated[bool, typer.Option(help="patches read what the others had a step before")] = False,
    warmup: Annotated[int, typer.Option(min=1, help="exact steps before displaced ones")] = 4,
    cluster: Annotated[str | None, typer.Option(help="devices and links to predict for, such as 2x4xA100")] = None,
    memory_limit: Annotated[str | None, typer.Option(help="what a rank may hold, as 40GiB")] = None,
    plan_only: Annotated[bool, typer.Option(help="print all layouts and the plan; sample nothing")] = False,
    verify: Annotated[bool, typer.Option(help="hold one call of the denoiser against one device")] = False,
    dump: Annotated[Path | None, typer.Option(file_okay=False, help="folder for every rank's graph")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="image file for all images in a row")] = None,
) -> None:
    """Sample from the pipeline MODEL: under torchrun one rank a process, else all ranks in this process.

    The factory returns the pipeline, or the pipeline and keyword arguments of its call.
    """
    import torch

    from fxpipe.plan.sample_outcome import sample_table
    from fxpipe.sample_compiler import compile_sampler

    pipe, call = load_pipeline(model)
    given = {"prompt": prompt, "num_inference_steps": steps, "height": height, "width": width}
    call |= {name: value for name, value in given.items() if value is not None}
    console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False, markup=False, soft_wrap=True)
    mode: Literal["exact", "displaced"] = "displaced" if displaced else "exact"
    layout = {"cfg": cfg, "stages": stages, "patches": _patches(patches), "plan": plan}
    how = {**layout, "mode": mode, "warmup": warmup, "cluster": cluster, "memory_limit": memory_limit}
    layouts: list[Any] = []

    def observe(name: str, artefact: Any) -> None:
        if name == "layouts":
            layouts.append(artefact)

    ranks = ranks_asked(world_size)
    sampler = compile_sampler(pipe, ranks, example=call, observe=observe, **how)  # type: ignore[arg-type]
    if plan_only and layouts and not console.quiet:
        print_wide(sample_table(layouts[-1]))
    console.print(str(sampler))
    if plan_only:
        if save is not None:
            console.print(f"plan in {sampler.plan.save(save)}")
        return
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
