"""What the tuner looked at: ways to use the ranks, what each would take, and why it lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.schedule import counted
from fxpipe.plan.timeline import human_seconds


@dataclass(frozen=True)
class Outcome:
    """One way to use the ranks.

    `seconds` of a step, `peak_bytes` of the fullest rank and `wire_bytes` of all ranks are predictions; None where a
    lower bound on the time, `bound_seconds`, ruled it out. `why` says what it lost by; empty for the chosen one.
    """

    pipelines: int
    ranks: int
    schedule: str
    stages: int
    microbatches: int
    collocated: bool
    recompute: bool
    bound_seconds: float
    seconds: float | None
    peak_bytes: int | None
    wire_bytes: int | None
    why: str

    def __str__(self) -> str:
        words = [f"{self.pipelines} x {self.ranks} ranks" if self.pipelines > 1 else f"{self.ranks} ranks"]
        stages = counted(self.stages, "stage")
        words.append(f"{self.schedule} over {stages}" if self.ranks > 1 else stages)
        words += ["skips collocated"] * self.collocated
        words.append(counted(self.microbatches, "micro-batch", "es"))
        return ", ".join([*words, *["recomputed"] * self.recompute])


def frontier(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those with all three predictions than which no other is as good in time, wires and memory, and better in one."""
    prices = {
        id(o): (o.seconds, o.wire_bytes, o.peak_bytes)
        for o in outcomes
        if o.seconds is not None and o.wire_bytes is not None and o.peak_bytes is not None
    }
    found: list[Outcome] = []
    kept: set[tuple[float, int, int]] = set()
    for outcome in sorted((o for o in outcomes if id(o) in prices), key=lambda o: prices[id(o)]):
        mine = prices[id(outcome)]
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in kept - {mine}):
            found.append(outcome)
            kept.add(mine)
    return found


def outcome_table(outcomes: Sequence[Outcome], rows: int | None) -> Table:
    """The ranked table, the chosen one first."""
    table = Table(title=f"{len(outcomes)} ways to use the ranks", title_justify="left")
    for name in ("", "pipelines", "ranks", "schedule", "stages", "micro-batches", "skips", "backward"):
        table.add_column(name, justify="left" if name in ("schedule", "skips", "backward") else "right")
    for name in ("step", "peak", "on wires"):
        table.add_column(name, justify="right")
    table.add_column("why not", overflow="fold")
    for place, outcome in enumerate(outcomes[:rows]):
        known = outcome.seconds is not None
        table.add_row(
            str(place + 1), str(outcome.pipelines), str(outcome.ranks), outcome.schedule, str(outcome.stages),
            str(outcome.microbatches), "collocated" if outcome.collocated else "", "recomputes" * outcome.recompute,
            ("" if known else "> ") + human_seconds(outcome.seconds or outcome.bound_seconds),
            human_bytes(outcome.peak_bytes) if outcome.peak_bytes is not None else "",
            human_bytes(outcome.wire_bytes) if outcome.wire_bytes is not None else "",
            outcome.why or "chosen", style="bold" if place == 0 else None,
        )  # fmt: skip
    return table
