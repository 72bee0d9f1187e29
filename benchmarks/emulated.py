"""Simulated against measured steps on emulated devices: real programs and transport, compute and links by the clock.

    python benchmarks/emulated.py
    python benchmarks/emulated.py --ranks 4 --milliseconds 10 --schedules wave

The example's Stable Diffusion step is compiled for 8 ranks, two nodes of four; an action takes 30 ms on average, a
message 3 ms where it has the link alone. Every rank is a thread of this process that sleeps instead of computing, so
that two cores do for eight devices. A table says, per schedule: the step as simulated, as measured (the median of five
runs), and by how much actions start later than simulated. Then follow the times by kind of action of the last run.
"""

import argparse
import statistics

from rich.console import Console
from rich.table import Table

import fxpipe
from benchmarks.deviation import Deviation, deviation
from benchmarks.emulation import Slower, emulate
from examples.stable_diffusion import step
from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link
from fxpipe.costs.model import CostModel
from fxpipe.plan.timeline import human_seconds

SCHEDULES = ("1f1b", "wave", "zero-bubble", "gpipe")
RUNS, MESSAGE_SHARE = 5, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=30.0, help="of an action on average")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    options = parser.parse_args()
    table = Table("schedule", "simulated", "measured", "median", "all runs", "latest")
    last: dict[str, Deviation] = {}
    for schedule in options.schedules:
        program = fxpipe.compile(
            step(), options.ranks, batch_size=options.microbatches, microbatches=options.microbatches, schedule=schedule
        )
        slow = scaled(program, options.milliseconds * 1e-3)
        predicted = program.simulate(*slow)
        runs = [deviation(predicted, emulate(program, *slow)) for _ in range(RUNS)]
        last[schedule] = runs[-1]
        table.add_row(schedule, *row(runs))
    Console().print(table)
    for schedule, of_run in last.items():
        print(f"\n{schedule}\n{of_run}")


def scaled(program: fxpipe.Program, action_seconds: float) -> tuple[CostModel, Cluster]:
    """A device and links so slow that an action takes `action_seconds` on average."""
    timeline, messages = program.simulate(), program.step.messages
    factor = action_seconds * len(timeline.actions) / sum(timeline.busy_seconds)
    mean_bytes = sum(message.num_bytes for message in messages) / len(messages)
    message_seconds = MESSAGE_SHARE * action_seconds
    link = Link("emulated", mean_bytes / (0.8 * message_seconds), 0.2 * message_seconds)
    nodes = 2 if program.world_size % 2 == 0 else 1
    cluster = Cluster("emulated", (Level(program.world_size // nodes, link), Level(nodes, link)))
    return Slower(program.costed.model, factor), cluster


def row(runs: list[Deviation]) -> tuple[str, ...]:
    middle = statistics.median(of_run.measured_seconds for of_run in runs)
    ratios = sorted(of_run.ratio for of_run in runs)
    latest = max(times.late_seconds for of_run in runs for times in of_run.actions)
    return (
        human_seconds(runs[0].predicted_seconds),
        human_seconds(middle),
        f"{statistics.median(ratios):+.1%}",
        f"{ratios[0]:+.1%} to {ratios[-1]:+.1%}",
        human_seconds(latest),
    )


if __name__ == "__main__":
    main()
