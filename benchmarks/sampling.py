"""Seconds of a sampling step on processes of this machine over gloo, a core each, by every way; and as predicted.

    python benchmarks/sampling.py                                      2 ranks, three wires: about 20 minutes
    python benchmarks/sampling.py --ranks 3 --share 0.6 --rates none   of 0.6 of a core each: two cores have three
    python benchmarks/sampling.py --models U-Net --rounds 5 --rates none
    python benchmarks/sampling.py --tiny                               whether it runs; no measurement

A U-Net and a DiT whose step on two samples, as with and without a prompt, takes a core a third of a second and more.
Links are throttled by tc between network namespaces, which needs root; elsewhere only "none", the wire as it is, is
measured. Every way is compiled for every wire, as that was measured. Then rounds of all ways take turns, since a
machine's speed drifts; what is shown are medians over the steps, of displaced ones over those that follow others. They
are predicted from the programs' operations, each timed by all ranks at once and among the measurements, scaled so that
the program of one rank takes what it took, and the measured link. Every process has a core for itself, unless it has a
share: elsewhere threads of gloo of all ranks came on one core at times, and the other rank waited for that.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 (links are measured on it)
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from rich.console import Console
from rich.table import Table
from torch import nn

import fxpipe
from benchmarks.emulation.namespaces import namespaces, wires
from benchmarks.network import LARGE, measured_cluster
from cost_models.timed import Timed
from fxpipe.analysis import shared_cost_model
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel
from fxpipe.plan.block_graph import human_bytes
from fxpipe.simulate import timeline
from fxpipe.simulate.op_lists import StepOps

WARM_UP, BEFORE, STEPS = 2, 4, 4  # exact steps of a call; those before steady ones; steady ones
Example = dict[str, Any]


def ways(ranks: int) -> dict[str, dict[str, Any]]:
    displaced = {"mode": "displaced", "warmup": WARM_UP}
    return {
        "exact rows": {"patches": ranks},
        "displaced rows": {"patches": ranks, "advance": False, **displaced},
        "advanced rows": {"patches": ranks, **displaced},
        "exact stages": {"stages": ranks},
        "PipeFusion": {"stages": ranks, "patches": 2 * ranks, **displaced},
    }


def unet(tiny: bool) -> tuple[nn.Module, Example]:
    torch.manual_seed(0)
    channels, side = ((16, 16, 16), 24) if tiny else ((128, 256, 256), 64)
    model = UNet2DConditionModel(
        sample_size=side, block_out_channels=channels, layers_per_block=1, cross_attention_dim=64,
        attention_head_dim=16, norm_num_groups=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    given = {"sample": torch.randn(2, 4, side, side), "encoder_hidden_states": torch.randn(2, 16, 64)}
    return model.eval(), {**given, "timestep": torch.tensor([500, 500])}


def dit(tiny: bool) -> tuple[nn.Module, Example]:
    torch.manual_seed(0)
    heads, layers, side = (2, 4, 16) if tiny else (6, 6, 48)
    model = DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=64, in_channels=4, out_channels=4, num_layers=layers,
        patch_size=2, sample_size=side,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, side, side), "timestep": torch.tensor([500, 500])}
    return model.eval(), {**given, "class_labels": torch.tensor([3, 1000])}


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Example]]] = {"U-Net": unet, "DiT": dit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "100mbit"], help="of links, as tc writes them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, help="of a core, for each process, by control groups; as root")
    parser.add_argument("--tiny", action="store_true", help="models of no size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        measure(options)
        return
    cores, share = len(os.sched_getaffinity(0)), options.share or 1.0
    if options.ranks * share > cores and not options.tiny:
        parser.error(
            f"{options.ranks} processes cannot have {share:g} of a core each, of {cores}: who waits speeds others up, "
            f"which is not predicted; give --share {0.9 * cores / options.ranks:.2g}"
        )
    with namespaces(options.ranks, options.share) as start:
        print(start([__file__, *sys.argv[1:]]), end="")


def measure(options: argparse.Namespace) -> None:
    """What one rank does; rank 0 prints."""
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    if options.share is None and options.ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    console = Console(width=110, quiet=rank != 0)
    table = Table(title=f"a step on {options.ranks} ranks, median seconds", title_justify="left")
    for column in ("model", "wire", "way", "measured", "of one device", "predicted", "error", "a rank receives"):
        table.add_column(column, justify="left" if column in ("model", "wire", "way") else "right")
    dist.init_process_group("gloo")
    base = shared_cost_model("measured", options.ranks)
    compared = [Compared(name, options.ranks, options.tiny, base) for name in options.models]
    for rate in wires(options.rates, console.print):
        found = [measured_cluster(rank, options.ranks, LARGE if rate == "none" else 1 << 20)]
        dist.broadcast_object_list(found)
        assert found[0] is not None, "rank 0 measures"
        for one in compared:
            for row in one.rows(options.rounds, found[0]):
                table.add_row(one.name, rate, *row)
            table.add_section()
    console.print(table)
    for one in compared:
        one.alone.close()
    dist.destroy_process_group()


class Compared:
    """All ways of one model."""

    def __init__(self, name: str, ranks: int, tiny: bool, base: CostModel) -> None:
        self.name, self.ranks, self.base = name, ranks, base
        self.model, self.example = MODELS[name](tiny)
        self.alone = self.compiled(1)

    def compiled(self, ranks: int, **given: Any) -> fxpipe.Sampler:
        """So many ranks' sampler, as is asked for."""
        return fxpipe.compile_sampler(self.model, ranks, example=self.example, cost_model="measured", cfg=1, **given)

    def rows(self, rounds: int, cluster: Cluster) -> Iterator[list[str]]:
        """Of the table, on the wire of this cluster."""
        samplers = {way: self.compiled(self.ranks, cluster=cluster, **given) for way, given in ways(self.ranks).items()}
        programs, costs = {"program of one": self.alone, **samplers}, Timed("cpu", self.base)
        for sampler in programs.values():
            steady_ops(sampler, costs)
        taken: dict[str, list[float]] = {way: [] for way in ("one device", *programs)}
        for _ in range(rounds):
            taken["one device"] += eager_seconds(self.model, self.example)
            together(costs)
            for way, sampler in programs.items():
                taken[way] += step_seconds(sampler, self.example)
            together(costs)
        seconds = {way: statistics.median(of_way) for way, of_way in taken.items()}
        scale = seconds["program of one"] / predicted(self.alone, costs, 1.0, cluster)
        for way, measured in seconds.items():
            row = [way, f"{measured:.3f}", f"{seconds['one device'] / measured:.2f}x"]
            if way in samplers:
                told = predicted(samplers[way], costs, scale, cluster)
                row += [f"{told:.3f}", f"{told / measured - 1:+.1%}", most_received(samplers[way])]
            yield row
        for sampler in samplers.values():
            sampler.close()


def together(costs: Timed) -> None:
    """All ranks at once."""
    dist.barrier()
    costs.time_again()


def steady_ops(sampler: fxpipe.Sampler, costs: Timed) -> list[StepOps]:
    """Of the steps before a steady one, and of these and that one."""
    return [sampler.denoiser.lowering.ops(sampler.step, count, costs) for count in (BEFORE, BEFORE + 1)]


def predicted(sampler: fxpipe.Sampler, costs: Timed, scale: float, cluster: Cluster) -> float:
    """Seconds of a step after others, on a device that takes `scale` times as long."""
    before, after = (makespan(steps, scale, cluster) for steps in steady_ops(sampler, costs))
    return after - before


def makespan(steps: StepOps, scale: float, cluster: Cluster) -> float:
    """Simulated seconds on a device that takes `scale` times as long."""
    ranks = [[op._replace(seconds=scale * op.seconds) for op in of_rank] for of_rank in steps.ranks]
    return timeline(StepOps(ranks, steps.held), cluster).makespan_seconds


def most_received(sampler: fxpipe.Sampler) -> str:
    """In a step, by the rank that receives the most."""
    traffic = sampler.traffic("displaced" if "displaced" in sampler.step.forms else "fresh")
    ranks = range(sampler.grid.world_size)
    into = (sum(size for (_, dst), size in traffic.channels.items() if dst == rank) for rank in ranks)
    return human_bytes(max(into))


@torch.no_grad()
def eager_seconds(model: nn.Module, example: Example) -> Iterator[float]:
    model(**example)
    for _ in range(STEPS):
        started = time.perf_counter()
        model(**example)
        yield time.perf_counter() - started


def step_seconds(sampler: fxpipe.Sampler, example: Example) -> Iterator[float]:
    """Of the steady steps of one call. Each needs the prediction of the one before, as in a sampling loop."""
    picture = "sample" if "sample" in example else "hidden_states"
    image = example[picture]
    with sampler.call():
        for step in range(BEFORE + STEPS):
            started = time.perf_counter()
            given = {**example, picture: image, "timestep": example["timestep"] - step}
            image = image - 0.01 * sampler.predict(**given).sample
            if step >= BEFORE:
                yield time.perf_counter() - started


if __name__ == "__main__":
    main()
