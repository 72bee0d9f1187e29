"""What the planner of a sampler looked at: layouts, what each would take, and why it lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.timeline import human_seconds


@dataclass(frozen=True)
class SampleOutcome:
    """One layout: predicted seconds of a call, bytes into the busiest rank in a steady step, bytes in the fullest one;
    None where it cannot be. `why` says what it lost by, or why it cannot be; empty for the chosen one."""

    layout: str
    seconds: float | None = None
    wire_bytes: int | None = None
    memory_bytes: int | None = None
    why: str = ""

    def __str__(self) -> str:
        told = [f"{self.layout}: {human_seconds(self.seconds) if self.seconds is not None else 'not possible'}"]
        return ", ".join([*told, *[self.why] * bool(self.why)])


def sample_table(outcomes: Sequence[SampleOutcome]) -> Table:
    """The ranked table, the chosen one first."""
    table = Table(title=f"{len(outcomes)} layouts", title_justify="left")
    for name in ("", "layout", "a call", "a rank receives", "holds", "why not"):
        table.add_column(name, justify="left" if name in ("layout", "why not") else "right", overflow="fold")
    for place, one in enumerate(outcomes):
        table.add_row(
            str(place + 1), one.layout, human_seconds(one.seconds) if one.seconds is not None else "",
            human_bytes(one.wire_bytes) if one.wire_bytes is not None else "",
            human_bytes(one.memory_bytes) if one.memory_bytes is not None else "",
            one.why or "chosen", style="bold" if place == 0 else None,
        )  # fmt: skip
    return table
