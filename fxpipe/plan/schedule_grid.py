"""A schedule drawn against time: one line per rank, one column per unit of time (a full backward takes two).

    time      0   1   2   3   4   5
    rank 0  0F0 0F1   . 0B0 --- 0B1 ---
    rank 1    . 1F0 1B0 --- 1F1 1B1 ---

A dot is idle time. A terminal shows one colour per kind of action, every second micro-batch in bold.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.text import Text

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import simulate

if TYPE_CHECKING:
    from fxpipe.plan.schedule import Schedule


def grid(schedule: Schedule, width: int = 120) -> str:
    """Draw `schedule`, in bands of at most `width` characters.

    A plain chain of stages is assumed, where frozen components feed every stage; a schedule in which that can't run is
    drawn without waiting.
    """
    cells = [_cells(*pair) for pair in zip(schedule.ranks, _starts(schedule), strict=True)]
    cell_width = max((len(_label(action)) for actions in schedule.ranks for action in actions), default=1) + 1
    label_width = len(f"rank {len(schedule.ranks) - 1}") + 1
    per_band = max(1, (width - label_width) // cell_width)
    lines = [schedule.text().partition("\n")[0]]
    for first in range(0, max(map(len, cells), default=0), per_band):
        span = range(first, min(first + per_band, max(map(len, cells))))
        lines.append("time".ljust(label_width) + "".join(_tick(time, cell_width) for time in span).rstrip())
        for rank, row in enumerate(cells):
            body = "".join((row[time] if time < len(row) else ".").rjust(cell_width) for time in span)
            lines.append(f"rank {rank}".ljust(label_width) + body)
    return "\n".join(lines)


STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "T": "magenta", "R": "red"}
_LINE = re.compile(r"(rank \d+)(:?)(.*)", re.ASCII)
_TOKEN = re.compile(r"\S+")
_CELL = re.compile(r"\d+([A-Z])(\d*)(?::\d+)?", re.ASCII)


def painted(text: str) -> Text:
    """The text of a grid, or of `Schedule.text()`, with colours; where there is no terminal, rich prints none."""
    found = Text(no_wrap=True)
    last: dict[str, str] = {}  # per rank, since an action goes on in the next band
    for number, line in enumerate(text.split("\n")):
        found.append("\n" * (number > 0))
        match = _LINE.fullmatch(line)
        if match is None:
            found.append(line, "bold" if number == 0 else "dim")
            continue
        found.append(match[1] + match[2])
        row = Text(match[3])
        for token in _TOKEN.finditer(match[3]):
            last[match[1]] = style = _style(token[0], last.get(match[1], ""))
            row.stylize("dim" if token[0] == "." else style, *token.span())
        found.append_text(row)
    return found


def _style(token: str, before: str) -> str:
    cell = _CELL.fullmatch(token)
    if cell is None:
        return before
    return STYLES.get(cell[1], "") + (" bold" if int(cell[2] or 0) % 2 else "")


def _label(action: Action) -> str:
    """An action as it is drawn: of a piece its component, or columns would be wide."""
    return f"{action.stage}T" if action.is_piece else str(action)


def _tick(time: int, cell_width: int) -> str:
    return (str(time) if time % 5 == 0 else "").rjust(cell_width)


def _units(action: Action) -> int:
    return 2 if action.kind == "B" else 1


def _starts(schedule: Schedule) -> list[list[int]]:
    for guess in _guesses(schedule):
        try:
            start = simulate(schedule, guess, _units).start_seconds
        except ScheduleError:
            continue
        return [[round(start[action]) for action in actions] for actions in schedule.ranks]
    return [[sum(map(_units, actions[:k])) for k in range(len(actions))] for actions in schedule.ranks]


def _guesses(schedule: Schedule) -> list[Work]:
    """Chains of the stages present: with frozen components feeding all of them, without those, and no edges at all."""
    components = {a.stage for actions in schedule.ranks for a in actions if a.kind == "T" and not a.is_piece}
    stages = [stage for stage, ranks in enumerate(schedule.stage_ranks) if ranks]
    trained = {a.stage for actions in schedule.ranks for a in actions if a.kind in "BI"}
    chain = frozenset(pairwise(stages))
    grads = frozenset((b, a) for a, b in chain if {a, b} <= trained)
    frozen = frozenset((component, stage) for component in components for stage in stages)
    sizes = schedule.num_stages, schedule.num_microbatches
    return [
        Work(*sizes, edges=chain, grad_edges=grads, frozen_edges=frozen),
        Work(*sizes, edges=chain, grad_edges=grads),
        Work(*sizes),
    ]


def _cells(actions: tuple[Action, ...], starts: list[int]) -> list[str]:
    cells: list[str] = []
    for action, start in zip(actions, starts, strict=True):
        cells += ["."] * (start - len(cells)) + [_label(action)] + ["-" * len(_label(action))] * (_units(action) - 1)
    return cells
