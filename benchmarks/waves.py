"""Time to find waves, exactly, on one core: lines of blocks of every kind, skips of every kind, kept or paid for.

    python benchmarks/waves.py
    python benchmarks/waves.py --blocks 46 93 --ranks 4 8

Blocks: even, random, lognormal, one as heavy as a quarter of all, one that outweighs all others. Skips: none, nested,
nearly nested, one in seven blocks nested, 5 or 30 at random, one per block at random; crossing costs a fiftieth or half
of a mean block. A row is the slowest and the mean case of its kind; the load is the largest rank's over the mean.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from rich.console import Console
from rich.table import Table

from passes.placement.waves import WavePartition, wave


@dataclass(frozen=True)
class Case:
    """A line, its skips, and seconds of a crossing one; None: none may cross."""

    weights: list[float]
    skips: list[tuple[int, int]]
    skip_seconds: float | None
    cuts: list[float]

    def solve(self, num_ranks: int) -> WavePartition:
        hard = self.skip_seconds is None
        costs = None if self.skip_seconds is None else [self.skip_seconds] * len(self.skips)
        return wave(self.weights, self.skips, num_ranks, hard, self.cuts, costs)


def lines(size: int, draw: random.Random) -> dict[str, list[float]]:
    quarter = [draw.uniform(0.5, 1.5) for _ in range(size)]
    most = list(quarter)
    quarter[size // 3], most[size // 3] = 0.25 * sum(quarter), 1.5 * sum(most)
    return {
        "even": [1.0] * size,
        "random": [draw.uniform(0.2, 2.0) for _ in range(size)],
        "lognormal": [draw.lognormvariate(0.0, 1.0) for _ in range(size)],
        "one a quarter": quarter,
        "one outweighs all": most,
    }


def skip_sets(size: int, draw: random.Random) -> dict[str, list[tuple[int, int]]]:
    def some(count: int) -> list[tuple[int, int]]:
        pairs = (sorted(draw.sample(range(size), 2)) for _ in range(count))
        return [(start, end) for start, end in pairs]

    def near(k: int) -> int:
        return size - 1 - min(size // 2 - 1, max(0, k + draw.randint(-3, 3)))

    return {
        "none": [],
        "nested": [(k, size - 1 - k) for k in range(size // 2)],
        "nearly nested": [(k, near(k)) for k in range(0, size // 2, 2)],
        "one in seven": [(k, size - 2 - k) for k in range(0, size // 2 - 2, 7)],
        "5 at random": some(5),
        "30 at random": some(30),
        "one per block": some(size),
    }


def cases(size: int) -> Iterator[tuple[str, str, Case]]:
    """Every kind of line and of skips: the line, how skips are treated, and the case."""
    draw = random.Random(0)
    cuts = [draw.uniform(1.0, 5.0) for _ in range(size + 1)]
    for line, weights in lines(size, draw).items():
        for skips in skip_sets(size, draw).values():
            yield line, "hard", Case(weights, skips, None, cuts)
            for share in (0.02, 0.5) if skips else ():
                yield line, "soft", Case(weights, skips, share * sum(weights) / size, cuts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[93, 200], help="lengths of lines")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="ranks for each length")
    arguments = parser.parse_args()
    table = Table("blocks", "ranks", "line", "skips", "cases", "mean ms", "slowest ms", "mean load", "largest load")
    for size, num_ranks in zip(arguments.blocks, arguments.ranks, strict=True):
        rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line, treated, case in cases(size):
            begin = time.process_time()
            found = case.solve(num_ranks)
            rows.setdefault((line, treated), []).append((time.process_time() - begin, found.max_over_mean))
        for (line, treated), results in rows.items():
            seconds, loads = zip(*results, strict=True)
            figures = (
                f"{mean(seconds) * 1e3:.0f}",
                f"{max(seconds) * 1e3:.0f}",
                f"{mean(loads):.3f}",
                f"{max(loads):.3f}",
            )
            table.add_row(str(size), str(num_ranks), line, treated, str(len(results)), *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
