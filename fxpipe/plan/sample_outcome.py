"""What the planner of a sampler looked at: layouts, what each would take, and why it lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.schedule import counted
from fxpipe.plan.timeline import human_seconds


@dataclass(frozen=True)
class Layout:
    """`copies` of `groups` of samples x `stages` x `beside` ranks, each with a patch of the rows, or with `turns`
    patches of them in turn. A call has the samples of so many `requests`; what is read of others is displaced after
    `warmup`, of which the first steps are made by the layout `warm`, where there is one. More ranks are `watching`.
    """

    groups: int
    stages: int
    beside: int
    turns: int = 1
    folded: bool = False
    warmup: int | None = None
    copies: int = 1
    requests: int = 1
    warm: "Layout | None" = None
    watching: int = 0

    def __str__(self) -> str:
        told = [counted(self.groups, "group"), counted(self.stages, "stage")]
        if self.turns > 1 and self.beside > 1:
            told.append(counted(self.beside, "rank"))
        told.append(counted(self.turns if self.turns > 1 else self.beside, "patch", "es"))
        ends = " in turn" * (self.turns > 1) + ", folded" * self.folded + ", displaced" * (self.warmup is not None)
        ends += f", {self.copies} copies" * (self.copies > 1) + f", {self.requests} requests" * (self.requests > 1)
        ends += f", {self.watching} watching" * (self.watching > 0)
        return " x ".join(told) + ends + (f", first steps as {self.warm}" if self.warm else "")


@dataclass(frozen=True)
class SampleOutcome:
    """One layout: predicted seconds of a call, bytes into the busiest rank in a steady step, bytes in the fullest one;
    None where it cannot be, or where its `least_seconds` ruled it out. `why` says what it lost by, or why it cannot be;
    empty for the chosen one."""

    layout: Layout
    seconds: float | None = None
    wire_bytes: int | None = None
    memory_bytes: int | None = None
    why: str = ""
    least_seconds: float | None = None

    @property
    def time(self) -> str:
        """What a call takes, or takes at least; nothing where it cannot be."""
        if self.seconds is not None:
            return human_seconds(self.seconds)
        return "" if self.least_seconds is None else f"> {human_seconds(self.least_seconds)}"

    def __str__(self) -> str:
        return ", ".join([f"{self.layout}: {self.time or 'not possible'}", *[self.why] * bool(self.why)])


_LAYOUT = ("groups of samples", "stages", "ranks per patch", "patches in turn", "line", "exchanges", "copies")


def sample_table(outcomes: Sequence[SampleOutcome], rows: int | None) -> Table:
    """The ranked table, the chosen one first."""
    many = any(one.layout.requests > 1 for one in outcomes)
    table = Table(title=f"{len(outcomes)} layouts", title_justify="left")
    predicted = ("a call", *["requests", "images a second"] * many, "a rank receives", "holds")
    for name in ("", *_LAYOUT, *predicted):
        table.add_column(name, justify="left" if name in ("line", "exchanges") else "right")
    table.add_column("why not", overflow="fold")
    for place, one in enumerate(outcomes[:rows]):
        requests = one.layout.requests
        rate = "" if one.seconds is None else f"{requests / one.seconds:.3g}"
        table.add_row(
            str(place + 1), *_axes(one.layout), one.time,
            *[str(requests), rate] * many,
            human_bytes(one.wire_bytes) if one.wire_bytes is not None else "",
            human_bytes(one.memory_bytes) if one.memory_bytes is not None else "",
            one.why or "chosen", style="bold" if place == 0 else None,
        )  # fmt: skip
    return table


def _axes(layout: Layout) -> list[str]:
    line = "" if layout.stages == 1 else "folded" if layout.folded else "straight"
    how = "fresh" if layout.warmup is None else f"displaced after {counted(layout.warmup, 'step')}"
    how += f", as {layout.warm}" if layout.warm else ""
    how += f", {layout.watching} watching" if layout.watching else ""
    numbers = layout.groups, layout.stages, layout.beside, layout.turns
    return [*map(str, numbers), line, how, str(layout.copies)]
