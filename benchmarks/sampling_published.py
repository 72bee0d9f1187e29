"""Estimated latencies of sampling beside published ones.

    python benchmarks/sampling_published.py                      SDXL on A100s over NVLink, PixArt on PCIe: minutes
    python benchmarks/sampling_published.py --sides 1024

SDXL: 50 steps with guidance, 1 to 8 A100; from two on the guidance is split, rows are displaced, nothing is advanced
(Li et al., "DistriFusion", CVPR 2024, table 3). PixArt: 20 steps with guidance on 4 A100 (Wang et al., "PipeFusion",
2024, table 2), attention by heads (Ulysses) and in a ring exact. Nothing runs: the models have no weights, layouts are
those of the papers, seconds the planner's.

Flux.1-dev: 28 steps of one image on 1 to 4 H100 (xDiT's documentation, docs/performance/flux.md, eager torch), exact.
Nothing is fitted to it: an H100 is what its data sheet says, as `cost_models.devices` has it.

SANA 1.6B: 20 steps with guidance at 4096 x 4096 on 1 to 8 A100 (the same, docs/performance/sana.md), the guidance split
from two on, then rows: the best of each number of devices. These hold the text encoder and the decoder, too, which
every device runs whole; estimates hold the decoder alone, and are from two devices on 1.2 to 1.6 s less.

HunyuanVideo: 50 steps of 129 frames of 1280 x 720 on 1 to 8 H100, H20 and L20 (the same,
docs/performance/hunyuanvideo.md), attention by heads. These hold the decoder, too, which estimates do not. Devices are
what their data sheets say, with an A100's efficiencies, carried over as `cost_models.devices` says.

But for Flux and HunyuanVideo the device computes as under CUDA graphs, which DistriFusion uses. Its efficiencies are
fitted to SDXL's latencies on one device, its ramp to what two save of one's time; what is left are predictions.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from diffusers import (
    AutoencoderDC,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    PixArtTransformer2DModel,
    SanaTransformer2DModel,
    UNet2DConditionModel,
)
from rich.console import Console
from rich.table import Table
from torch import nn

from cost_models.devices import device
from fxpipe.capture.cache import cache_folder
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel
from fxpipe.models.backbones import example_inputs, image_rows, row_inputs
from fxpipe.plan.sample_plan import EXACT, How
from fxpipe.sampling.attention import with_attention
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.estimate import estimate
from fxpipe.sampling.planning import SampleRequest, chosen
from fxpipe.sampling.trace import Tracing

# A kernel of a CUDA graph starts a microsecond after the one before it. Half the samples take 67, 56 and 55 % of the
# time: that is what kernels take to fill the device, of which SDXL has 1,800.
DEVICE = replace(
    device("A100-80GB"), launch_seconds=1e-6, ramp_seconds=11e-6, matrix_efficiency=0.7, convolution_efficiency=0.76,
    attention_efficiency=0.486,
)  # fmt: skip
NVLINK, PCIE = "8xA100-80GB", "4xA100-80GB-PCIe"
SDXL = {
    1024: {1: 5.02, 2: 3.35, 4: 2.26, 8: 1.77},
    2048: {1: 23.7, 2: 13.3, 4: 7.60, 8: 4.81},
    3840: {1: 140.0, 2: 76.6, 4: 41.3, 8: 22.9},
}
PIXART = {
    1024: {"PipeFusion": 0.866, "Ulysses": 1.74, "DistriFusion": 2.33, "ring": 2.63},
    2048: {"PipeFusion": 5.37, "Ulysses": 7.93, "DistriFusion": 9.62, "ring": 11.1},
}
FLUX = {1024: {(1, "gather"): 6.71, (2, "ulysses"): 4.38, (2, "ring"): 5.31, (4, "ulysses"): 4.24, (4, "ring"): 5.11}}
SANA = {4096: {1: 17.551, 2: 8.365, 4: 5.599, 8: 3.991}}
HUNYUAN_VIDEO = {
    720: {
        "H100": {1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58},
        "H20": {1: 6639.17, 2: 3400.55, 4: 1762.86, 8: 940.97},
        "L20": {1: 6043.88, 2: 3271.44, 4: 2080.05},
    }
}
_ROWS, _IN_TURN = How("displaced", 4, "corrected", False), How("displaced", 1, "corrected", False)


@dataclass(frozen=True)
class Row:
    """One latency, in seconds."""

    model: str
    side: int
    way: str
    published: float
    estimated: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[*HUNYUAN_VIDEO, *SDXL, *SANA])
    parser.add_argument("--models", nargs="+", default=["SDXL", "PixArt", "Flux", "SANA", "HunyuanVideo"])
    options = parser.parse_args()
    table = Table(title="seconds of a call", title_justify="left")
    for column in ("model", "side", "way", "published", "estimated", "off by"):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for side in options.sides:
        for row in [
            *(sdxl_rows(side) if "SDXL" in options.models and side in SDXL else ()),
            *(pixart_rows(side) if "PixArt" in options.models and side in PIXART else ()),
            *(flux_rows(side) if "Flux" in options.models and side in FLUX else ()),
            *(sana_rows(side) if "SANA" in options.models and side in SANA else ()),
            *(video_rows(side) if "HunyuanVideo" in options.models and side in HUNYUAN_VIDEO else ()),
        ]:
            off = f"{row.estimated / row.published - 1:+.1%}"
            table.add_row(row.model, str(side), row.way, f"{row.published:.4g}", f"{row.estimated:.4g}", off)
        table.add_section()
    Console(width=100).print(table)


def sdxl_rows(side: int) -> Iterator[Row]:
    case = traced(sdxl(side))
    for ranks, published in SDXL[side].items():
        way = SampleRequest(ranks, min(ranks, 2), None, None, None, _ROWS if ranks > 2 else EXACT)
        found = estimate(case, chosen(case, way), Cluster.parse(NVLINK), 50)
        yield Row("SDXL", side, f"{ranks} A100", published, found.seconds)


def pixart_rows(side: int) -> Iterator[Row]:
    case, cluster = traced(pixart(side)), Cluster.parse(PCIE)
    ways = {
        "PipeFusion": [SampleRequest(4, 1, 4, False, patches, _IN_TURN) for patches in (4, 8)],
        "DistriFusion": [SampleRequest(4, 1, None, None, 4, _ROWS)],
        "Ulysses": [SampleRequest(4, 1, None, None, 4, EXACT, attention="ulysses")],
        "ring": [SampleRequest(4, 1, None, None, 4, EXACT, attention="ring")],
    }
    for name, published in PIXART[side].items():
        made = [with_attention(case, chosen(case, way), way.attention, cluster) for way in ways[name]]
        yield Row("PixArt", side, name, published, min(estimate(case, one, cluster, 20).seconds for one in made))


def flux_rows(side: int) -> Iterator[Row]:
    with torch.device("meta"):
        model, rows = FluxTransformer2DModel(guidance_embeds=True).bfloat16(), (side // 16) ** 2
        given = {
            "hidden_states": torch.empty(1, rows, 64), "encoder_hidden_states": torch.empty(1, 512, 4096),
            "pooled_projections": torch.empty(1, 768), "timestep": torch.empty(1), "guidance": torch.empty(1),
        }  # fmt: skip
        given = {name: value.bfloat16() for name, value in given.items()}
        given |= {"img_ids": torch.empty(rows, 3), "txt_ids": torch.empty(512, 3)}
    case, cluster = traced(model, given, 1, device("H100")), Cluster.parse("4xH100")
    for (ranks, kind), published in FLUX[side].items():
        way = SampleRequest(ranks, 1, None, None, ranks, EXACT, attention=kind)
        found = estimate(case, with_attention(case, chosen(case, way), kind, cluster), cluster, 28)
        yield Row("Flux", side, f"{ranks} H100, {kind}", published, found.seconds)


def sana_rows(side: int) -> Iterator[Row]:
    with torch.device("meta"):
        case = traced(SanaTransformer2DModel(sample_size=side // 32, caption_channels=2304).bfloat16())
    decoding = sana_decoding(side)
    for ranks, published in SANA[side].items():
        way = SampleRequest(ranks, min(ranks, 2), None, None, None, EXACT)
        found = estimate(case, chosen(case, way), Cluster.parse(NVLINK), 20)
        yield Row("SANA", side, f"{ranks} A100", published, found.seconds + decoding)


def video_rows(side: int) -> Iterator[Row]:
    with torch.device("meta"):
        model = HunyuanVideoTransformer3DModel(guidance_embeds=True).bfloat16()
        given = {
            "hidden_states": torch.empty(1, 16, 33, side // 8, side * 16 // 9 // 8), "timestep": torch.empty(1),
            "encoder_hidden_states": torch.empty(1, 256, 4096), "encoder_attention_mask": torch.empty(1, 256),
            "pooled_projections": torch.empty(1, 768), "guidance": torch.empty(1),
        }  # fmt: skip
    case = traced(model, {name: value.bfloat16() for name, value in given.items()}, 1)
    for name, of_device in HUNYUAN_VIDEO[side].items():
        own = SampleCase(case.traced, 1, device(name))
        for ranks, published in of_device.items():
            way, cluster = SampleRequest(ranks, 1, None, None, ranks, EXACT), Cluster.parse(f"{ranks}x{name}")
            found = estimate(own, with_attention(own, chosen(own, way), "ulysses", cluster), cluster, 50)
            yield Row("HunyuanVideo", side, f"{ranks} {name}", published, found.seconds)


def sana_decoding(side: int) -> float:
    """Seconds of its decoder on one device."""
    kinds, channels = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3, (128, 256, 512, 512, 1024, 1024)
    with torch.device("meta"):
        decoder = AutoencoderDC(
            decoder_block_types=kinds, decoder_block_out_channels=channels, decoder_layers_per_block=(3,) * 6,
            decoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)), upsample_block_type="interpolate",
        ).decoder.bfloat16()  # fmt: skip
        latents = torch.empty(1, 32, side // 32, side // 32).bfloat16()
    tracing = Tracing(image_rows, "auto", cache_folder(True), lambda name, artefact: None)
    case = SampleCase(tracing.traced(decoder, (), {"hidden_states": latents}), 1, DEVICE)
    alone = chosen(case, SampleRequest(1, 1, None, None, 1, EXACT))
    return estimate(case, alone, Cluster.parse(NVLINK), 1).seconds


def traced(
    model: nn.Module, given: Mapping[str, torch.Tensor] | None = None, samples: int = 2, by: CostModel = DEVICE
) -> SampleCase:
    """A call; one with the prompt and without where no inputs are given."""
    given = given or {name: value for name, value in example_inputs(model, 2).items() if name != "target"}
    tracing = Tracing(row_inputs, "auto", cache_folder(True), lambda name, artefact: None)
    return SampleCase(tracing.traced(model, (), dict(given)), samples, by)


def sdxl(side: int) -> nn.Module:
    with torch.device("meta"):
        return UNet2DConditionModel(
            sample_size=side // 8, block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        ).half()  # fmt: skip


def pixart(side: int) -> nn.Module:
    with torch.device("meta"):
        return PixArtTransformer2DModel(sample_size=side // 8, caption_channels=4096).half()


if __name__ == "__main__":
    main()
