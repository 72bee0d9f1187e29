"""What ways to train the same step on the same machines take: a row each, all from one simulator."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.timeline import human_seconds

OURS = "fxpipe"


@dataclass(frozen=True)
class Contestant:
    """One way to train, by the best of its settings.

    `seconds` of a step of `batch_size` samples; `bubble_ratio`: idle device time over step x devices; `wire_bytes` of
    all ranks; `peak_bytes` of the fullest rank, which `fits` into the limit or not.
    """

    name: str
    setting: str
    seconds: float
    batch_size: int
    bubble_ratio: float
    wire_bytes: int
    peak_bytes: int
    fits: bool

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.seconds

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


def best_baseline(contestants: Sequence[Contestant]) -> Contestant | None:
    """The fastest that is not fxpipe's and fits; None where there is none."""
    others = [c for c in contestants if not c.is_ours and c.fits]
    return min(others, key=lambda c: c.seconds, default=None)


def comparison_table(contestants: Sequence[Contestant], limit_bytes: int | None = None) -> Table:
    """A row per contestant; throughput relative to the fastest baseline that fits."""
    base = best_baseline(contestants)
    table = Table("", "setting", title_justify="left")
    for name in ("step", "samples/s", "bubbles", "on wires", "peak", "throughput"):
        table.add_column(name, justify="right")
    for c in contestants:
        peak = human_bytes(c.peak_bytes) + ("" if c.fits else f" > {human_bytes(limit_bytes or 0)}")
        relative = f"{base.seconds / c.seconds:.2f}x" if base is not None else ""
        table.add_row(
            c.name, c.setting, human_seconds(c.seconds), f"{c.samples_per_second:.1f}", f"{c.bubble_ratio:.1%}",
            human_bytes(c.wire_bytes), peak, relative,
            style="bold" if c.is_ours else None if c.fits else "dim",
        )  # fmt: skip
    return table
