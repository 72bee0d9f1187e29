"""What the stages of Stable Diffusion 2.1's U-Net send each other, and what a step takes, where skips go each way.

    python benchmarks/traffic.py
    python benchmarks/traffic.py --ranks 4 --samples 1

    line              a stage per rank, balanced exactly; every value is sent once to every rank that reads it
    wave, soft        two stages per rank, folded; a skip may cross ranks where that balances better than it costs
    wave, hard        the same, every skip on its rank

A pipeline per row, 32 micro-batches, 512x512; bytes are activations and their gradients between stages, per sample.
Steps are simulated on A100s, frozen work of each micro-batch before it: joined by NVSwitch, by PCIe, and one to
a node over 10 Gbit/s Ethernet, where stages are cut where little crosses. "searched" is the wave's order as fxpipe
finds it in two seconds for that very network. A second table trades balance for bytes: loads up to 1 + slack times the
mean count as equal.
"""

import argparse
from dataclasses import replace

import torch
from compile_sd21 import StableDiffusion21Step
from rich.console import Console
from rich.table import Table

from cost_models.devices import device
from fxpipe.analysis import costed
from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockSeconds
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from fxpipe.plan.timeline import human_seconds
from fxpipe.simulate import simulate
from passes.case import Case
from passes.placement.collocation import skip_pairs
from passes.placement.lines.traffic import traffic
from passes.placement.place import place
from passes.placement.shape import Shape, pipelines
from passes.placement.waves import wave
from passes.step_ops import step_of, step_ops
from passes.tuner.orders import Orders

DEVICE, NUM_BLOCKS, BUDGET = "A100-80GB", 128, 2.0
MICROBATCHES = 32
SLACKS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
ROWS = (
    ("line", "1f1b", True),
    ("wave, soft", "wave", False),
    ("wave, hard", "wave", True),
)


def networks(ranks: int) -> dict[str, Cluster]:
    return {
        "NVSwitch": Cluster.parse(f"{ranks}x{DEVICE}"),
        "PCIe": Cluster.parse(f"{ranks}xA100-PCIe"),
        "10 Gbit/s": Cluster.parse(f"{ranks}x1x{DEVICE}+Ethernet-10"),
    }


def captured(samples: int) -> Case:
    model = device(DEVICE)
    with torch.device("meta"):
        step = StableDiffusion21Step()
    batch_size = MICROBATCHES * samples
    found = costed(step, None, batch_size, model, NUM_BLOCKS, MICROBATCHES)
    return found.on(Cluster.parse(f"8x{DEVICE}"), 8)


def sizes_of(case: Case) -> tuple[int, ...]:
    return microbatch_sizes(case.batch_size, MICROBATCHES)


def times_of(case: Case) -> BlockSeconds:
    return case.costs.at(case.batch_size // MICROBATCHES)


def placed(case: Case, schedule: str, hard: bool) -> Staged:
    stages = case.world_size * (2 if schedule == "wave" else 1)
    shape = Shape(schedule, stages, pipelines(case.world_size, 1), hard)
    return place(case, times_of(case), shape, MICROBATCHES)


def ordered(case: Case, staged: Staged, budget: float | None = None) -> Schedule:
    """In the order that the placement is named after; with a budget, one that is searched for."""
    orders = Orders(case, staged, MICROBATCHES, ahead=False)
    return orders.named() if budget is None else orders.searched(budget, None, ())[0]


def seconds(case: Case, staged: Staged, schedule: Schedule) -> float:
    return simulate(step_ops(case, staged, schedule, sizes_of(case)), case.cluster).seconds


def bytes_per_sample(case: Case, staged: Staged, schedule: Schedule) -> float:
    """Activations and gradients between stages."""
    of_frozen = {edge.name for edge in case.graph.edges if isinstance(edge.producer, str)}
    messages = step_of(case, staged, schedule, sizes_of(case)).messages
    return sum(m.num_bytes for m in messages if m.value not in of_frozen) / case.batch_size


def max_over_mean(case: Case, staged: Staged) -> float:
    total, loads = times_of(case).total, [0.0] * case.world_size
    for stage, (rank,) in enumerate(staged.stage_ranks):
        loads[rank] += sum(total[block] for block in staged.blocks(stage))
    return max(loads) * case.world_size / sum(loads)


def table(case: Case, ranks: int) -> Table:
    found = Table(
        "",
        title=f"{ranks} ranks, {MICROBATCHES} micro-batches of {case.batch_size // MICROBATCHES}",
        title_justify="left",
    )
    for column in ("max/mean", "bytes a sample", "less than the line", *networks(ranks)):
        found.add_column(column, justify="right")
    sent: dict[str, float] = {}
    for name, schedule, hard in ROWS:
        cells, best = [], []
        for network in networks(ranks).values():
            here = replace(case, cluster=network, world_size=ranks)
            staged = placed(here, schedule, hard)
            plan = ordered(here, staged)
            if not cells:
                sent[name] = bytes_per_sample(here, staged, plan)
                cells += [f"{max_over_mean(here, staged):.3f}", human_bytes(int(sent[name]))]
                cells.append(f"{1 - sent[name] / sent['line']:.0%}")
            cells.append(human_seconds(seconds(here, staged, plan)))
            if schedule == "wave":
                best.append(human_seconds(seconds(here, staged, ordered(here, staged, BUDGET))))
        found.add_row(name, *cells)
        if best:
            found.add_row("  searched", "", "", "", *best)
    return found


def frontier(case: Case, ranks: int) -> Table:
    """Bytes against balance, every skip on its rank."""
    found = Table("slack", title=f"{ranks} ranks, wave, hard: fewer bytes for more load", title_justify="left")
    for column in ("max/mean", "bytes a sample", "less than the line"):
        found.add_column(column, justify="right")
    here = replace(case, world_size=ranks)
    line, times = placed(here, "1f1b", True), times_of(case)
    of_line = bytes_per_sample(here, line, ordered(here, line))
    skips, cuts = list(skip_pairs(case.graph)), traffic(case.graph).main.tolist()
    for slack in SLACKS:
        boundaries = wave(times.total, skips, ranks, True, cuts, slack=slack)
        staged = replace(placed(here, "wave", True), boundaries=boundaries)
        sent = bytes_per_sample(here, staged, ordered(here, staged))
        found.add_row(
            f"{slack:.0%}", f"{max_over_mean(here, staged):.3f}", human_bytes(int(sent)), f"{1 - sent / of_line:.0%}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="2, 4 and 8 where left out")
    parser.add_argument("--samples", type=int, default=8, help="of a micro-batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = captured(options.samples)
    for ranks in options.ranks or (2, 4, 8):
        Console().print(table(case, ranks))
        Console().print(frontier(case, ranks))


if __name__ == "__main__":
    main()
