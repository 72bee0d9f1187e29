"""`fxpipe sample`: a pipeline's images on several ranks; `fxpipe tune --sample`: how they would be made."""

import inspect
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fxpipe.cli.options import DEVICE_MODEL, Backend, planned, print_wide, ranks_asked
from fxpipe.cli.user_model import load_pipeline, load_sampled
from fxpipe.errors import CompileError

if TYPE_CHECKING:
    from fxpipe.sampler import Sampler

Save = Annotated[Path | None, typer.Option(dir_okay=False, help="file for the plan")]
_LATENCY: Literal["latency", "throughput"] = "latency"


@dataclass(frozen=True)
class Sampling:
    """The pipeline, its call, and how it is spread; what is left out is chosen."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory of a pipeline; to tune, of a denoiser")]
    world_size: Annotated[int | None, typer.Option(min=1, help="ranks; torchrun's where left out")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="num_inference_steps of the call")] = None
    height: Annotated[int | None, typer.Option(min=1, help="of an image, in pixels")] = None
    width: Annotated[int | None, typer.Option(min=1, help="of an image, in pixels")] = None
    cfg: Annotated[int | None, typer.Option(min=1, help="groups of samples; chosen where left out")] = None
    stages: Annotated[int | None, typer.Option(min=1, help="columns of ranks with a part of the denoiser each")] = None
    patches: Annotated[str | None, typer.Option(help="how many of the rows, or bounds in units: 0,3,8")] = None
    displaced: Annotated[bool, typer.Option(help="patches may read what the others had a step before")] = False
    warmup: Annotated[int, typer.Option(min=1, help="exact steps before displaced ones")] = 4
    attention: Annotated[
        Literal["auto", "gather", "ulysses", "ring"], typer.Option(help="how patches get others' keys and values")
    ] = "auto"
    cluster: Annotated[str | None, typer.Option(help="devices and links to predict for, such as 2x4xA100")] = None
    memory_limit: Annotated[str | None, typer.Option(help="what a rank may hold, as 40GiB")] = None

    def call(self, of_model: Mapping[str, Any], **own: Any) -> dict[str, Any]:
        """The arguments of the pipeline's call."""
        given = {**own, "num_inference_steps": self.steps, "height": self.height, "width": self.width}
        return {**of_model, **{name: value for name, value in given.items() if value is not None}}

    def compiled(self, model: Any, call: Mapping[str, Any] | None, **own: Any) -> "Sampler":
        """The sampler, with a command's `own` options, too."""
        from fxpipe.sample_compiler import compile_sampler

        return compile_sampler(
            model, ranks_asked(self.world_size), example=call, cfg=self.cfg, stages=self.stages,
            patches=_patches(self.patches), mode="displaced" if self.displaced else "exact", warmup=self.warmup,
            attention=self.attention, cluster=self.cluster, memory_limit=self.memory_limit, **own,
        )  # fmt: skip


@planned
def tune_sampling(
    sampling: Sampling,
    objective: Annotated[
        Literal["latency", "throughput"], typer.Option(help="of one call, or of many requests joined in calls")
    ] = _LATENCY,
    cost_model: Annotated[str | None, typer.Option("--device-model", help=DEVICE_MODEL)] = None,
    top: Annotated[int | None, typer.Option(min=1, help="rows of the table; all where left out")] = None,
    save: Save = None,
) -> None:
    """Print all layouts for sampling MODEL, the best first, what every other loses by, and the plan.

    A denoiser's call is made from its config; weights may be on the meta device. The chosen plan is lowered and
    checked; nothing runs.
    """
    from fxpipe.plan.sample_outcome import SampleOutcome, sample_table

    made, call = load_sampled(sampling.model)
    if call is None and (sampling.height or sampling.width):
        raise CompileError(
            f"--height and --width are of a pipeline's image; {sampling.model} is a denoiser, give its call"
        )
    looked_at: list[tuple[SampleOutcome, ...]] = []

    def observe(name: str, artefact: Any) -> None:
        if name == "layouts":
            looked_at.append(artefact)

    own = {"cost_model": cost_model, "steps": sampling.steps, "objective": objective, "observe": observe}
    sampler = sampling.compiled(made, None if call is None else sampling.call(call), **own)
    print_wide(sample_table(looked_at[-1], top))
    print(sampler.plan.summary())
    if save is not None:
        print(f"plan in {sampler.plan.save(save)}")


@planned
def sample(
    sampling: Sampling,
    prompt: Annotated[list[str] | None, typer.Option(help="of an image; once for each")] = None,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**64 - 1, help="of the noise")] = 0,
    backend: Backend = "eager",
    plan: Annotated[Path | None, typer.Option(dir_okay=False, help="lower the plan of this file")] = None,
    save: Save = None,
    verify: Annotated[bool, typer.Option(help="hold one call of the denoiser against one device")] = False,
    dump: Annotated[Path | None, typer.Option(file_okay=False, help="folder for every rank's graph")] = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="for all images in a row, videos in a row each")
    ] = None,
) -> None:
    """Sample from the pipeline MODEL: under torchrun one rank a process, else all ranks in this process.

    The factory returns the pipeline, or the pipeline and keyword arguments of its call.
    """
    import torch

    is_first = os.environ.get("RANK", "0") == "0"
    if out is not None and is_first:
        _require_image_file(out)
    pipe, of_model = load_pipeline(sampling.model)
    call = sampling.call(of_model, prompt=prompt)
    console = Console(quiet=not is_first, highlight=False, markup=False, soft_wrap=True)
    sampler = sampling.compiled(pipe, call, plan=plan, backend=backend)
    console.print(str(sampler))
    console.print(str(sampler.simulate()))
    if verify:
        console.print(str(sampler.verify()))
    if dump is not None and is_first:
        sampler.dump(dump)
    if save is not None and is_first:
        console.print(f"plan in {sampler.plan.save(save)}")
    started = time.perf_counter()
    torch.manual_seed(seed)  # for pipelines that draw of themselves
    taken = inspect.signature(type(pipe).__call__).parameters
    if "generator" in taken:
        call["generator"] = torch.Generator().manual_seed(seed)
    if out is not None and "output_type" in taken:
        call.setdefault("output_type", "pil")
    made = sampler.pipeline()(**call)
    console.print(f"sampled in {time.perf_counter() - started:.1f} s")
    if out is not None and is_first:
        _grid(made).save(out)
        console.print(f"images in {out}")
    sampler.close()


def _patches(text: str | None) -> int | list[int] | None:
    """A count, or bounds."""
    try:
        numbers = [] if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise CompileError(f"--patches {text}: give a count (4), or bounds in units from 0 on (0,3,8)") from None
    return None if text is None else numbers[0] if len(numbers) == 1 else numbers


def _require_image_file(path: Path) -> None:
    """Refuse, before there are images, what they cannot be saved as."""
    from PIL import Image

    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise CompileError(f"--out {path}: {path.suffix or 'no suffix'} is no kind of image; name it .png or .jpg")
    if not path.parent.is_dir():
        raise CompileError(f"--out {path}: there is no folder {path.parent}; make it first")


def _grid(made: Any) -> Any:
    """The images of a pipeline's output side by side; of videos the frames, a video in a row."""
    from PIL import Image

    found = getattr(made, "images", getattr(made, "frames", None))
    rows: list[Any] = found if isinstance(found, list) and all(isinstance(one, list) for one in found) else [found]
    images = [one for row in rows for one in (row if isinstance(row, list) else [None])]
    if not images or not all(isinstance(one, Image.Image) for one in images):
        raise CompileError(f"--out: the pipeline returns {type(made).__name__}, no list of images; leave it out")
    sizes = [(sum(image.width for image in row), max((image.height for image in row), default=0)) for row in rows]
    grid, top = Image.new("RGB", (max(width for width, _ in sizes), sum(height for _, height in sizes))), 0
    for row, (_, height) in zip(rows, sizes, strict=True):
        left = 0
        for image in row:
            grid.paste(image, (left, top))
            left += image.width
        top += height
    return grid
