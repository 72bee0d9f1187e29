"""Time to place real backbones on 64 devices, in all shapes that `fxpipe.compile` chooses from, on one core.

    python benchmarks/planning.py sd21                     Stable Diffusion 2.1's U-Net at 512x512
    python benchmarks/planning.py sd21 sdxl sd3 hunyuan    the others at 1024x1024
    python benchmarks/planning.py sdxl --cluster 16xH100 --batch-size 256

The models are at full size on the meta device: no weights, no arithmetic. Capture and costs are timed apart. Planning
is seconds of the process on a core, the least of several runs: other work on the machine counts little. DiffusionPipe
(Tian et al., MLSys 2024) states 0.5 s on 64 cores for Stable Diffusion 2.1.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import diffusers
import torch
from compile_sd21 import StableDiffusion21Step
from rich.console import Console
from rich.table import Table
from torch import nn

from cost_models.devices import device
from fxpipe.analysis import StepCut, costed_step, example_of
from fxpipe.cluster import Cluster
from fxpipe.models.backbones import PredictionStep
from fxpipe.plan.block_graph import BlockGraph
from passes.case import Case
from passes.placement.place import place
from passes.placement.shape import Shape, shape
from passes.schedules.policies import FOLDED, LOOPED, PLAIN

RUNS = 7

# huggingface.co/stabilityai/stable-diffusion-xl-base-1.0, unet/config.json
SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
# huggingface.co/stabilityai/stable-diffusion-3-medium-diffusers, transformer/config.json
SD3 = {
    "sample_size": 128,
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "in_channels": 16,
    "out_channels": 16,
    "pos_embed_max_size": 192,
}
# huggingface.co/Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers, transformer/config.json
HUNYUAN = {
    "sample_size": 128,
    "num_layers": 40,
    "num_attention_heads": 16,
    "attention_head_dim": 88,
    "hidden_size": 1408,
    "in_channels": 4,
    "patch_size": 2,
    "mlp_ratio": 4.3637,
    "learn_sigma": True,
    "cross_attention_dim": 1024,
    "cross_attention_dim_t5": 2048,
    "pooled_projection_dim": 1024,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": False,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sd21": lambda: StableDiffusion21Step().unet,
    "sdxl": lambda: diffusers.UNet2DConditionModel(**SDXL),
    "sd3": lambda: diffusers.SD3Transformer2DModel(**SD3),
    "hunyuan": lambda: diffusers.HunyuanDiT2DModel(**HUNYUAN),
}


SHAPES = {"lines": PLAIN, "loops": LOOPED, "waves": FOLDED}
"""By column: a schedule whose stages have this shape."""


@dataclass(frozen=True)
class Prepared:
    """A backbone's step with its costs, and the seconds that took on a core."""

    case: Case
    capture_seconds: float
    cost_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; all if left out")
    parser.add_argument("--cluster", default="8x8xA100-80GB+EFA")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=48, help="no block takes more than this part of the time")
    options = parser.parse_args()
    if unknown := sorted(set(options.models) - set(MODELS)):
        parser.error(f"unknown model {unknown[0]!r}; choose from {', '.join(MODELS)}")
    torch.set_num_threads(1)
    cluster, console = Cluster.parse(options.cluster), Console(width=120)
    table = Table("model", "blocks", "(S, M)", *(f"{name}, ms" for name in SHAPES), "capture, s", "costs, s")
    for name in options.models or MODELS:
        prepared = prepare(MODELS[name], cluster, options.blocks)
        table.add_row(name, *row(prepared, cluster, options.batch_size))
    console.print(f"all pipelines and micro-batches on {cluster}, batch {options.batch_size}")
    console.print(table)


def prepare(make: Callable[[], nn.Module], cluster: Cluster, num_blocks: int) -> Prepared:
    with torch.device("meta"):
        step = PredictionStep(make())
    example, ends = example_of(step, None, 8), {"": time.process_time()}
    found = costed_step(
        example, device(cluster.device), StepCut(num_blocks, or_whole=True),
        see=lambda phase, made: ends.update({phase: time.process_time()}),
    )  # fmt: skip
    case = found.on(cluster, cluster.num_ranks)
    return Prepared(case, ends["batch"] - ends[""], time.process_time() - ends["batch"])


def row(prepared: Prepared, cluster: Cluster, batch_size: int) -> list[str]:
    """Blocks, shapes times micro-batches, milliseconds by kind of shape, and the seconds before."""
    milliseconds, count = [], 0
    for name in SHAPES.values():
        wanted = list(shapes(name, prepared.case.graph, cluster, batch_size))
        place_all = partial(placed, prepared.case, batch_size, wanted)
        _, *seconds = (timed(place_all)[1] for _ in range(1 + RUNS))  # the first asks for the seconds of all sizes
        milliseconds.append(f"{min(seconds) * 1e3:.0f}")
        count = max(count, len(wanted))
    before = f"{prepared.capture_seconds:.1f}", f"{prepared.cost_seconds:.1f}"
    return [str(len(prepared.case.blocks)), str(count), *milliseconds, *before]


def shapes(name: str, graph: BlockGraph, cluster: Cluster, batch_size: int) -> Iterator[tuple[Shape, int]]:
    """Every number of pipelines with every number of micro-batches, all of one size."""
    for count in (2**k for k in range(cluster.num_ranks.bit_length() - 1)):
        found = shape(name, cluster.num_ranks, None, count)
        if found.stages <= len(graph.blocks):
            for microbatches in range(1, batch_size // count + 1):
                if batch_size % (count * microbatches) == 0:
                    yield found, count * microbatches


def placed(case: Case, batch_size: int, wanted: Sequence[tuple[Shape, int]]) -> None:
    for found, microbatches in wanted:
        place(case, case.costs.at(batch_size // microbatches), found, microbatches)


T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Its result, and the seconds of the process on a core."""
    started = time.process_time()
    result = run()
    return result, time.process_time() - started


if __name__ == "__main__":
    main()
