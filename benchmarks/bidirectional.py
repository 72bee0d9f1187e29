"""Time to plan cascades in opposite directions for up to 64 devices, all (D, S, M) exactly, on one core.

    python benchmarks/bidirectional.py                       two real cascades, and invented tables
    python benchmarks/bidirectional.py two                   U-Nets at 64 pixels, and from 64 to 128
    python benchmarks/bidirectional.py three                 at 32, from 32 to 64, from 64 to 128: two groups
    python benchmarks/bidirectional.py invented --blocks 60 62

The real ones are diffusers U-Nets of the sizes of cascaded diffusion models (Ho et al., JMLR 23, 2022: base channels
256 and 128, three residual blocks a level, attention from 32 pixels on), on the meta device; capture and costs are not
part of the time. The invented tables are drawn around the shape of such a network for a fixed seed. DiffusionPipe (Tian
et al., MLSys 2024) states 145 s and 87 s on 64 cores for its two cascaded models.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence

import torch
from diffusers import UNet2DModel
from planning import prepare
from rich.console import Console
from rich.table import Table
from torch import nn

from fxpipe.cluster import Cluster
from fxpipe.cluster.links import Link
from passes.chains.backbone_groups import joined, two_groups
from passes.chains.bidirectional import BidirectionalPlan, all_bidirectional
from passes.chains.chain import Chain

RUNS, CLUSTER, NUM_BLOCKS = 3, "8x8xA100-80GB+EFA", 48
P2P = Link("p2p", 240e9, 10e-6)
ALL_REDUCE = Link("all-reduce", 4e9, 100e-6)


def unet(size: int, channels: int, multiples: Sequence[int], in_channels: int = 3) -> nn.Module:
    """An unconditional U-Net, or with the lower resolution beside the image."""
    levels = len(multiples)
    attends = [size >> level <= 32 for level in range(levels)]
    return UNet2DModel(
        sample_size=size,
        in_channels=in_channels,
        layers_per_block=3,
        block_out_channels=tuple(channels * k for k in multiples),
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]),
    )


CASCADES: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "two": (lambda: unet(64, 256, (1, 2, 3, 4)), lambda: unet(128, 128, (1, 2, 4, 8), 6)),
    "three": (
        lambda: unet(32, 256, (1, 2, 3, 4)),
        lambda: unet(64, 256, (1, 2, 3, 4), 6),
        lambda: unet(128, 128, (1, 2, 4, 8), 6),
    ),
}


def cascade(name: str, devices: int, samples: int) -> tuple[Chain, Chain]:
    """The two groups of a cascade's backbones, each joined to one chain."""
    cluster = Cluster.parse(CLUSTER)
    chains = [prepare(make, cluster, NUM_BLOCKS, samples * devices).chain for make in CASCADES[name]]
    work = [sum(map(sum, chain.block_seconds(samples))) for chain in chains]
    down, up = (joined([chains[k] for k in group]) for group in two_groups(work))
    return down, up


def backbone(num_blocks: int, seed: int) -> Chain:
    """A U-Net of invented numbers: time grows less than in proportion to the samples."""
    draw = random.Random(seed)
    depth = [min(k, num_blocks - 1 - k) / (num_blocks / 2) for k in range(num_blocks)]
    work = [2e-3 * (0.5 + d) * draw.uniform(0.5, 1.5) for d in depth]
    cuts = [0.0, *(4e7 * (1.1 - d) * draw.uniform(0.8, 1.2) for d in depth[1:]), 0.0]
    weights = [6e7 * d * d * draw.uniform(0.5, 1.5) for d in depth]

    def seconds(num_samples: int) -> tuple[Sequence[float], Sequence[float]]:
        forward = [w * (0.3 + 0.7 * num_samples) for w in work]
        return forward, [2 * s for s in forward]

    saved, states = [2e8 * (1.1 - d) for d in depth], [4 * w for w in weights]
    return Chain(seconds, tuple(cuts), tuple(cuts), tuple(weights), tuple(saved), tuple(states), P2P, ALL_REDUCE)


def planned(down: Chain, up: Chain, num_devices: int, batch: int) -> tuple[tuple[BidirectionalPlan, ...], float]:
    """All plans for so many devices, and the least seconds on this core of several runs."""
    plans: tuple[BidirectionalPlan, ...] = ()
    seconds = []
    for _ in range(RUNS):
        begin = time.process_time()
        plans = all_bidirectional(down, up, num_devices, batch_sizes=(batch, batch))
        seconds.append(time.process_time() - begin)
    return plans, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cascades", nargs="*", help="some of two, three, invented; all if left out")
    parser.add_argument("--blocks", type=int, nargs=2, default=(60, 62), help="blocks of the invented backbones")
    parser.add_argument("--devices", type=int, default=64, help="powers of two up to this many devices")
    parser.add_argument("--samples", type=int, default=8, help="samples per device and step")
    arguments = parser.parse_args()
    known = (*CASCADES, "invented")
    if unknown := sorted(set(arguments.cascades) - set(known)):
        parser.error(f"unknown cascade {unknown[0]!r}; choose from {', '.join(known)}")
    torch.set_num_threads(1)
    for name in arguments.cascades or known:
        if name == "invented":
            down, up = (backbone(size, seed) for seed, size in enumerate(arguments.blocks))
        else:
            down, up = cascade(name, arguments.devices, arguments.samples)
        Console().print(table(name, down, up, arguments.devices, arguments.samples))


def table(name: str, down: Chain, up: Chain, devices: int, samples: int) -> Table:
    title = f"{name}: {down.num_blocks} + {up.num_blocks} blocks, {samples} samples a device"
    table = Table("devices", "(S, M)", "ms on a core", "best S x r, M each way", "ms a step", title=title)
    count, total = 0, 0.0
    for num_devices in (2**k for k in range(devices.bit_length())):
        plans, seconds = planned(down, up, num_devices, samples * num_devices)
        count, total = count + len(plans), total + seconds
        layout = plans[0].layout
        best = f"{layout.num_stages} x {layout.replicas}, {layout.num_microbatches[0]}"
        table.add_row(str(num_devices), str(len(plans)), f"{seconds * 1e3:.1f}", best, f"{plans[0].seconds * 1e3:.1f}")
    table.add_row("all", str(count), f"{total * 1e3:.1f}", "", "", style="bold")
    return table


if __name__ == "__main__":
    main()
