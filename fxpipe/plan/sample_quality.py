"""What ways to sample give: how near to one device's result, in which predicted time."""

from dataclasses import dataclass
from math import inf, isinf

from rich.table import Table

from fxpipe.plan.timeline import human_seconds


@dataclass(frozen=True)
class Measured:
    """A way to sample: predicted seconds of a call, and the PSNR of its result against one device's, in decibels, with
    the peak being the range of that; inf where they are equal."""

    way: str
    seconds: float
    decibels: float
    exact: bool
    chosen: bool

    def __str__(self) -> str:
        near = "equal to one device" if isinf(self.decibels) else f"{self.decibels:.1f} dB to one device"
        return f"{self.way}: {human_seconds(self.seconds)}, {near}"


@dataclass(frozen=True)
class Quality:
    """The ways that were measured on a call, the fastest first, of `steps` steps as predicted for."""

    ways: tuple[Measured, ...]
    steps: int

    @property
    def frontier(self) -> tuple[Measured, ...]:
        """Ways that no faster one equals."""
        best, found = -inf, list[Measured]()
        for way in self.ways:
            if way.decibels > best:
                best = way.decibels
                found.append(way)
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ways))

    def table(self) -> Table:
        table = Table(title=f"calls of {self.steps} steps, as predicted; PSNR to one device", title_justify="left")
        for column in ("way", "a call", "dB", ""):
            table.add_column(column, justify="left" if column in ("way", "") else "right", overflow="fold")
        frontier = self.frontier
        for one in self.ways:
            is_best = "chosen" if one.chosen else "" if one in frontier else "another is faster and nearer"
            table.add_row(one.way, human_seconds(one.seconds), f"{one.decibels:.1f}", is_best)
        return table
