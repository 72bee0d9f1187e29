"""Time to plan two backbones in opposite directions for up to 64 devices, all (D, S, M) exactly, on one core.

    python benchmarks/bidirectional.py
    python benchmarks/bidirectional.py --blocks 60 62 --devices 64 --samples 8

Tables are synthetic: two U-Nets of 60 and 62 blocks, as many as the fine blocks of a two-stage cascade at 64 and 128
pixels have, seconds and bytes drawn around the shape of such a network (wide cuts and cheap blocks at both ends, heavy
gradients in the middle) for a fixed seed. So this measures the planner, not the models. DiffusionPipe (Tian et al.,
MLSys 2024) states 145 s and 87 s on 64 cores for its two cascaded models.
"""

import argparse
import random
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fxpipe.links import Link
from passes.bidirectional import BidirectionalPlan, all_bidirectional
from passes.chains.chain import Chain

RUNS = 3
P2P = Link("p2p", 240e9, 10e-6)
ALL_REDUCE = Link("all-reduce", 4e9, 100e-6)


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
    parser.add_argument("--blocks", type=int, nargs=2, default=(60, 62), help="blocks of either backbone")
    parser.add_argument("--devices", type=int, default=64, help="powers of two up to this many devices")
    parser.add_argument("--samples", type=int, default=8, help="samples per device and step")
    arguments = parser.parse_args()
    down, up = (backbone(size, seed) for seed, size in enumerate(arguments.blocks))
    table = Table("devices", "(S, M)", "ms on a core", "best S x r, M each way", "ms a step")
    count, total = 0, 0.0
    for num_devices in (2**k for k in range(arguments.devices.bit_length())):
        plans, seconds = planned(down, up, num_devices, arguments.samples * num_devices)
        count, total = count + len(plans), total + seconds
        layout = plans[0].layout
        best = f"{layout.num_stages} x {layout.replicas}, {layout.num_microbatches[0]}"
        table.add_row(str(num_devices), str(len(plans)), f"{seconds * 1e3:.1f}", best, f"{plans[0].seconds * 1e3:.1f}")
    table.add_row("all", str(count), f"{total * 1e3:.1f}", "", "", style="bold")
    Console().print(table)


if __name__ == "__main__":
    main()
