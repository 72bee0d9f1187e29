"""fxpipe against torch's own pipelines and DDP: seconds of a training step on two ranks of this machine, a core each.

    python benchmarks/race.py                              three wires, each in 3 or 4 minutes
    python benchmarks/race.py --rates 100mbit --rounds 2 --splits 8
    python benchmarks/race.py --tiny                       whether it runs; no measurement

A step of Stable Diffusion's layout with frozen encoders, `benchmarks/racing/model.py`. Links are throttled by tc
between network namespaces, which needs root; elsewhere only "none", the wire as it is, is run. On every wire the link
is measured, fxpipe plans for it by a profile of the step's blocks, and of torch's ways the best settings are found: of
pipelines every cut, number of micro-batches and place of the encoders is estimated, and the most promising are timed
under both schedules. Everyone must compute one device's loss and gradients before it is timed. Then all take turns;
shown are medians over the steps, and what the profile predicts after some more rounds.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist  # noqa: TID251 (peers run on it)
from rich.console import Console
from rich.table import Table

from benchmarks.emulation.namespaces import namespaces, wires
from benchmarks.network import LARGE, measured_cluster
from benchmarks.racing.compiled import Compiled, Profiled
from benchmarks.racing.contestant import Contestant, on_one_device, require_same
from benchmarks.racing.model import Batch, RacedStep
from benchmarks.racing.pipelines import SCHEDULES, Pipeline, Split, likely_splits
from benchmarks.racing.replicas import BUCKETS, Replicas

Gradients = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
T = TypeVar("T")
STEPS = 3  # of a contestant's turn, after one that is not counted
ROUNDS = 3  # of the profile, before the turns and after them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "100mbit"], help="of links, as tc writes them")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every contestant")
    parser.add_argument(
        "--splits", type=int, default=4, help="of torch's pipelines that are timed, under each schedule"
    )
    parser.add_argument("--own", nargs="+", default=[], help="schedules of fxpipe to race beside the plan it makes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a model of no size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        race(options)
        return
    # Freed memory stays with the processes: page faults of fresh memory would be much of the noise.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
    with namespaces(2) as start:
        print(start([__file__, *sys.argv[1:]]), end="")


def race(options: argparse.Namespace) -> None:
    """What one rank does; rank 0 prints."""
    dist.init_process_group("gloo")
    console = Console(width=120, quiet=dist.get_rank() != 0)
    progress = Console(width=120, stderr=True, quiet=dist.get_rank() != 0, soft_wrap=True)
    table = Table(title="a step on 2 ranks, median seconds", title_justify="left")
    for column in ("wire", "contestant", "seconds", "fxpipe", "as predicted"):
        table.add_column(column, justify="left" if column in ("wire", "contestant") else "right")
    model = RacedStep(options.tiny)
    batch = model.example_inputs(options.batch)
    true = on_one_device(model, batch)
    profiled = Profiled(model, batch)
    for rate in wires(options.rates, console.print):
        cluster = alike(measured_cluster(dist.get_rank(), 2, LARGE if rate == "none" else 1 << 18))
        profile = profiled.profile(ROUNDS)
        ours = Compiled(model, batch, cluster, profile)
        others = [Compiled(model, batch, cluster, profile, schedule=schedule) for schedule in options.own]
        for one in (ours, *others):
            verified(one, batch, true)
        progress.print(f"{rate}: {ours.program.plan.summary()}")
        link = cluster.levels[0].link.bandwidth_bytes_per_second
        peers = [*best_pipelines(model, batch, true, link, options.splits, progress), best_replicas(model, batch, true)]
        seconds = in_turns([ours, *others, *peers], batch, options.rounds)
        profile = profiled.profile(ROUNDS)
        predicted = {one.name: one.predicted_seconds(profile) for one in (ours, *others)}
        for one in (ours, *others):
            one.close()
        seconds = {"one device, halved": one_device_seconds(model, batch) / 2, **seconds}
        for name, taken in seconds.items():
            own = f"{predicted[name]:.3f}" if name in predicted else ""
            table.add_row(rate, name, f"{taken:.3f}", f"{taken / seconds[ours.name]:.2f}x", own)
        table.add_section()
    console.print(table)
    dist.barrier()
    dist.destroy_process_group()


def verified(contestant: Contestant, batch: Batch, true: Gradients) -> None:
    """Collective.

    Raises:
        SystemExit: it does not compute one device's loss and all of its gradients.
    """
    held = [require_same(contestant, batch, true), set[str]()]
    dist.all_gather_object(held, held[0])
    if lacking := true[1].keys() - held[0] - held[1]:
        raise SystemExit(f"{contestant.name}: no rank has a gradient of {', '.join(sorted(lacking))}")


def best_pipelines(
    model: RacedStep, batch: Batch, true: Gradients, link: float, tried: int, progress: Console
) -> list[Contestant]:
    """The fastest split of each schedule."""
    counts = [count for count in (2, 4, 8, 16) if batch["noise"].shape[0] % count == 0]
    found: dict[str, list[tuple[float, Contestant]]] = {schedule: [] for schedule in SCHEDULES}
    for split in likely_splits(model, batch, link, counts)[:tried]:
        for schedule, of_schedule in found.items():
            one = Pipeline(copy.deepcopy(model), Split(schedule, *split))
            verified(one, batch, true)
            of_schedule.append((timed(one, batch, 1), one))
            progress.print(f"{of_schedule[-1][0]:.3f} s: {one.name}")
    return [min(of_schedule, key=lambda taken: taken[0])[1] for of_schedule in found.values()]


def best_replicas(model: RacedStep, batch: Batch, true: Gradients) -> Contestant:
    found = []
    for bucket in BUCKETS:
        one = Replicas(copy.deepcopy(model), bucket)
        verified(one, batch, true)
        found.append((timed(one, batch, 1), one))
    return min(found, key=lambda taken: taken[0])[1]


def in_turns(contestants: Sequence[Contestant], batch: Batch, rounds: int) -> dict[str, float]:
    """The median of every contestant's seconds."""
    taken: dict[str, list[float]] = {one.name: [] for one in contestants}
    for _ in range(rounds):
        for one in contestants:
            one.step(batch)
            taken[one.name] += step_seconds(one, batch, STEPS)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def timed(one: Contestant, batch: Batch, steps: int) -> float:
    """Seconds of a step, the same on all ranks."""
    return alike(min(step_seconds(one, batch, steps)))


def step_seconds(one: Contestant, batch: Batch, steps: int) -> Iterator[float]:
    """Of every step, from a moment on at which all ranks begin."""
    dist.barrier()
    for _ in range(steps):
        started = time.perf_counter()
        one.step(batch)
        yield time.perf_counter() - started


def one_device_seconds(model: RacedStep, batch: Batch) -> float:
    """Of a step on rank 0, while the other waits."""
    taken = []
    for _ in range(3 if dist.get_rank() == 0 else 0):
        started = time.perf_counter()
        on_one_device(model, batch)
        taken.append(time.perf_counter() - started)
    dist.barrier()
    return alike(min(taken, default=0.0))


def alike(mine: T) -> T:
    """What rank 0 has."""
    told = [mine]
    dist.broadcast_object_list(told)
    return told[0]


if __name__ == "__main__":
    main()
