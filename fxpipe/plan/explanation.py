"""Why a plan is what it is, in numbers: what its step would take if something were otherwise, and what else there was.

a step takes 24.5 ms: ranks compute for 17.1 ms (busiest 20.2 ms), wait for 7.4 ms
what if                       step       saves
network infinitely fast    21.9 ms      2.6 ms
...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table

from fxpipe.plan.timeline import human_seconds
from fxpipe.plan.tuning import Outcome


@dataclass(frozen=True)
class WhatIf:
    """A step in which one thing is otherwise: its predicted seconds, None where there is none, and why."""

    what: str
    seconds: float | None
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """A step's predicted seconds; how long ranks compute in it, on average and the busiest one; what would change that,
    the most useful first; and the layouts that were considered, by what each lost by, the fastest of each kind."""

    chosen: str
    seconds: float
    mean_busy: float
    most_busy: float
    what_ifs: tuple[WhatIf, ...]
    rivals: tuple[Outcome, ...]
    num_considered: int

    def __rich__(self) -> RenderableType:
        others = [self._others()] if self.rivals else []
        return Group(self.chosen, self._busy(), self._table(), *others)

    def __str__(self) -> str:
        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def saves(self, what: WhatIf) -> float | None:
        """Seconds by which the step would be shorter."""
        return None if what.seconds is None else self.seconds - what.seconds

    def _busy(self) -> str:
        return (
            f"a step takes {human_seconds(self.seconds)}: on average a rank computes for "
            f"{human_seconds(self.mean_busy)} of it, the busiest for {human_seconds(self.most_busy)}"
        )

    def _table(self) -> Table:
        table = Table("what if", box=None, pad_edge=False)
        table.add_column("step", justify="right")
        table.add_column("saves", justify="right")
        table.add_column("")
        for what in self.what_ifs:
            saved = self.saves(what)
            if what.seconds is None or saved is None:
                table.add_row(what.what, "", "", what.why)
                continue
            less = (
                f"{human_seconds(saved)} ({saved / self.seconds:.1%})" if saved > _LEAST * self.seconds else "nothing"
            )
            if saved < -_LEAST * self.seconds:
                less = f"-{human_seconds(-saved)}"
            table.add_row(what.what, human_seconds(what.seconds), less, what.why)
        return table

    def _others(self) -> Table:
        table = Table(f"of {self.num_considered} ways considered", box=None, pad_edge=False)
        table.add_column("step", justify="right")
        table.add_column("ruled out by", overflow="fold")
        for rival in self.rivals:
            seconds = human_seconds(rival.seconds or rival.bound_seconds)
            table.add_row(str(rival), seconds if rival.seconds is not None else f"> {seconds}", rival.why)
        return table


_LEAST = 5e-4
"""Of a step: what is less is nothing, on either side."""
_RIVALS = 4
"""Ways that lost, of which is told."""


def rivals(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Of the ways that lost, the best of each number of pipelines and schedule, in the order of the ranking."""
    found: dict[tuple[int, str], Outcome] = {}
    for outcome in outcomes[1:]:
        if outcome.why and str(outcome) != str(outcomes[0]):
            found.setdefault((outcome.pipelines, outcome.schedule), outcome)
    return tuple(found.values())[:_RIVALS]
