"""Stable Diffusion 2.1's step by DDP, ZeRO-3, GPipe, 1F1B and fxpipe on several clusters, all on one simulator.

    python benchmarks/comparison.py
    python benchmarks/comparison.py --cluster 8xA100-80GB:256 --cluster 2x8xV100+Ethernet-10:64

A cluster is given with the batch of all its ranks. Every contestant has its best number of micro-batches that fits into
a rank's memory; the pipelines' baselines are balanced exactly. The step is captured once, at full size on the meta
device: VAE and text encoder (frozen) and U-Net at 512x512.
"""

import argparse
import time

import torch
from compile_sd21 import StableDiffusion21Step
from rich.console import Console

from cost_models.devices import device
from fxpipe.analysis import costed_step, example_of, planned_cut
from fxpipe.cli.planning import print_wide
from fxpipe.cluster import Cluster
from fxpipe.show.comparison import comparison_table
from passes.comparison import compare
from passes.tuner.plans import usable_bytes
from passes.tuner.request import Request

SETTINGS = (
    "8xA100-80GB:256",
    "8xA100-80GB:64",
    "8x8xA100-80GB+EFA:256",
    "2x8xV100+Ethernet-10:128",
    "2x8xV100+Ethernet-10:64",
    "2x8xV100+Ethernet-5:64",
    "4x4xV100+Ethernet-10:64",
)


def contest(setting: str, budget: float) -> None:
    """Print the table of one cluster and batch."""
    name, _, size = setting.rpartition(":")
    cluster, batch_size = Cluster.parse(name), int(size)
    ranks, model = cluster.num_ranks, device(cluster.device)
    with torch.device("meta"):
        step = StableDiffusion21Step()
    started = time.process_time()
    example = example_of(step, None, batch_size)
    found = costed_step(example, model, planned_cut(batch_size, ranks, None, None, "auto"))
    captured = time.process_time()
    limit = usable_bytes(model.memory_bytes)
    contestants = compare(found.on(cluster, ranks, limit), Request("auto", ranks, batch_size, budget_seconds=budget))
    print(
        f"{batch_size} samples on {ranks} ranks of {cluster}; captured in {captured - started:.0f} s, compared in "
        f"{time.process_time() - captured:.0f} s of a core"
    )
    print_wide(comparison_table(contestants, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", help="NAME:BATCH, may be repeated")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of search for fxpipe's schedules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for setting in options.cluster or SETTINGS:
        contest(setting, options.budget)
        Console().print()


if __name__ == "__main__":
    main()
