"""Time to capture a denoiser and to plan its sampling on 4 to 16 devices, and for a new size from one capture.

    python benchmarks/sampling_planning.py                      SDXL with guidance, Flux: minutes, most of it capture
    python benchmarks/sampling_planning.py --models Flux --ranks 16 --cached
    python benchmarks/sampling_planning.py --tiny               whether it runs; no measurement

The models are at full size on the meta device: no weights, no arithmetic. A plan is what `compile_sampler` decides of
50 steps at 1024 x 1024 on L40s over PCIe, eight in a node, where all is left open; nothing is known before but the
capture. Its sizes are free: "new size" is 1280 x 768 put into it, and the plan for that. All are seconds of the process
on a core.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.sampling_published import sdxl
from cost_models.devices import device
from fxpipe.capture.cache import cache_folder
from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.models.backbones import row_inputs
from fxpipe.plan.sample_plan import EXACT, How
from fxpipe.sampling.candidates import Setting
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import ranked
from fxpipe.sampling.planning import SampleRequest, planned
from fxpipe.sampling.step import Traced
from fxpipe.sampling.trace import Tracing

Call = dict[str, Any]
Size = tuple[int, int]
HOWS = {"exact": EXACT, "displaced": How("displaced", 4, "corrected", True)}
CLUSTERS = {2: "2xL40-PCIe", 4: "4xL40-PCIe", 8: "8xL40-PCIe", 16: "2x8xL40-PCIe"}
T = TypeVar("T")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], choices=list(CLUSTERS))
    parser.add_argument("--cached", action="store_true", help="take captures from the cache, and keep them there")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(args)
    table = Table(title="seconds of a core", title_justify="left")
    for column in ("model", "what", "ranks", "mode", "seconds", "plan"):
        table.add_column(column, justify="right" if column in ("ranks", "seconds") else "left")
    for name in options.models:
        for row in rows(name, options.ranks, options.tiny, options.cached):
            table.add_row(name, *row)
        table.add_section()
    Console(width=110).print(table)


def rows(name: str, ranks: Sequence[int], tiny: bool, cached: bool) -> Iterator[tuple[str, str, str, str, str]]:
    make, call = MODELS[name]
    model, size, other = make(tiny), *(((16, 16), (24, 16)) if tiny else ((128, 128), (160, 96)))
    given, samples = call(model, *size)
    tracing = Tracing(row_inputs, "any", cache_folder(cached), lambda name, artefact: None)
    traced, seconds = timed(lambda: tracing.traced(model, (), given, free=True))
    yield "capture", "", "", f"{seconds:.1f}", ""
    for world_size in ranks:
        for mode in HOWS:
            plan, seconds = timed(lambda n=world_size, mode=mode: planned_for(traced, samples, n, mode))  # type: ignore[misc]
            yield "plan", str(world_size), mode, f"{seconds:.2f}", plan
    given, _ = call(model, *other)
    for world_size in ranks:
        for mode in HOWS:

            @held_collector()  # as calls do
            def anew(n: int = world_size, mode: str = mode) -> str:
                return planned_for(tracing.resized(traced, (), given), samples, n, mode)

            plan, seconds = timed(anew)
            yield "new size", str(world_size), mode, f"{seconds:.2f}", plan


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Its result, and the seconds of this process on a core."""
    begin = time.process_time()
    return work(), time.process_time() - begin


def planned_for(traced: Traced, samples: int, world_size: int, mode: str) -> str:
    """The layout that is chosen, and what it is expected to take."""
    case = SampleCase(traced, samples, device("L40"))
    setting = Setting(Cluster.parse(CLUSTERS[world_size]), 50)
    request = SampleRequest(world_size, None, None, None, None, HOWS[mode])
    best = ranked(case, request, setting).best
    assert best.made is not None
    planned(case, best.made, "", "")
    return f"{best}: {best.seconds:.3g} s"


def _unet(tiny: bool) -> nn.Module:
    if not tiny:
        return sdxl(1024)
    with torch.device("meta"):
        return UNet2DConditionModel(
            sample_size=16, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2, norm_num_groups=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time",
            addition_time_embed_dim=8, projection_class_embeddings_input_dim=64,
        ).half()  # fmt: skip


def _unet_call(model: nn.Module, height: int, width: int) -> tuple[Call, int]:
    """With a prompt and without."""
    config: Any = model.config
    ids, text = config.addition_time_embed_dim * 6, config.cross_attention_dim
    added = {"text_embeds": _of(2, config.projection_class_embeddings_input_dim - ids), "time_ids": _of(2, 6)}
    given = {"sample": _of(2, 4, height, width), "timestep": _of(2), "encoder_hidden_states": _of(2, 77, text)}
    return {**given, "added_cond_kwargs": added}, 2


def _flux(tiny: bool) -> nn.Module:
    small = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
             "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)}  # fmt: skip
    with torch.device("meta"):
        return FluxTransformer2DModel(guidance_embeds=True, **(small if tiny else {})).half()


def _flux_call(model: nn.Module, height: int, width: int) -> tuple[Call, int]:
    """Of the model whose guidance is an input."""
    config: Any = model.config
    tokens = height * width // 4
    given = {"hidden_states": _of(1, tokens, config.in_channels), "timestep": _of(1), "guidance": _of(1)}
    given |= {"encoder_hidden_states": _of(1, 512, config.joint_attention_dim), "txt_ids": _of(512, 3)}
    return {**given, "pooled_projections": _of(1, config.pooled_projection_dim), "img_ids": _of(tokens, 3)}, 1


def _of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


MODELS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[nn.Module, int, int], tuple[Call, int]]]] = {
    "SDXL": (_unet, _unet_call), "Flux": (_flux, _flux_call),
}  # fmt: skip


if __name__ == "__main__":
    main()
