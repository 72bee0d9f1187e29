"""Schedules: which rank does what, in which order, and the work a schedule has to contain.

    schedule 1f1b: 2 stages, 2 micro-batches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

An action is <stage><letter><micro-batch>, or frozen work of the next batch in layers and samples; `KINDS` lists the
letters.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fxpipe.errors import ScheduleError
from fxpipe.plan.actions import KINDS, VOCABULARY, Action, piece
from fxpipe.plan.schedule_grid import grid, painted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_ACTION = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d+)", re.ASCII)
_AGAIN = re.compile(r"(\d+)R(\d+):([1-9]\d*)", re.ASCII)
_PIECE = re.compile(r"(\d+)T\[(\d+):(\d+)\]x(\d+):(\d+)", re.ASCII)
_HEADER = re.compile(r"schedule (\S.*): (\d+) stages?, (\d+) micro-batch(?:es)?", re.ASCII)
_RANK = re.compile(r"rank (\d+):(.*)", re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in program order. `str()` draws it against time, `text()` is what `parse` reads."""

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def text(self) -> str:
        """A header and one line per rank; the inverse of `parse`."""
        header = (
            f"schedule {self.name}: {counted(self.num_stages, 'stage')}, "
            f"{counted(self.num_microbatches, 'micro-batch', 'es')}"
        )
        lines = (" ".join([f"rank {rank}:", *map(str, actions)]) for rank, actions in enumerate(self.ranks))
        return "\n".join([header, *lines])

    @staticmethod
    def parse(text: str) -> "Schedule":
        """Read `text()` back. Without a header the counts are inferred and the name is "custom".

        Raises ScheduleError for a malformed line or token, ranks out of order, or numbers beyond the header's counts.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        header = _HEADER.fullmatch(lines[0]) if lines else None
        ranks = tuple(_parse_rank(line, rank) for rank, line in enumerate(lines[1:] if header else lines))
        if not ranks:
            raise ScheduleError("a schedule needs one line per rank, such as 'rank 0: 0F0 0B0'; this text has none")
        stages = 1 + max((a.stage for actions in ranks for a in actions if a.kind != "T"), default=-1)
        microbatches = 1 + max((a.microbatch for actions in ranks for a in actions if a.kind != "R"), default=-1)
        if header is None:
            return Schedule("custom", stages, microbatches, ranks)
        schedule = Schedule(header[1], int(header[2]), int(header[3]), ranks)
        if stages > schedule.num_stages or microbatches > schedule.num_microbatches:
            raise ScheduleError(
                f"the header promises {header[2]} stages and {header[3]} micro-batches, the actions use {stages} "
                f"and {microbatches}; correct the header, or leave it out"
            )
        return schedule

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every stage, in the order of their first micro-batches; none for a stage without actions."""
        first: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind not in "TR" and action.stage < self.num_stages:
                    of_stage = first[action.stage]
                    of_stage[rank] = min(action.microbatch, of_stage.get(rank, action.microbatch))
        return tuple(tuple(sorted(of_stage, key=of_stage.__getitem__)) for of_stage in first)

    def where(self, keep: Callable[[Action], bool]) -> "Schedule":
        """The same order of those actions that `keep` wants."""
        return replace(self, ranks=tuple(tuple(filter(keep, actions)) for actions in self.ranks))

    @cached_property
    def is_scattered(self) -> bool:
        """Whether gradients of a stage are summed over its replicas more than once, each time those since the last."""
        return any(action.turn for actions in self.ranks for action in actions)

    @property
    def is_split(self) -> bool:
        """Whether any backward is cut into input and weight gradient."""
        return any(action.kind in "IW" for actions in self.ranks for action in actions)

    def __str__(self) -> str:
        return grid(self)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """What `rich.print` shows: the drawing in colours, as wide as the terminal."""
        yield painted(grid(self, options.max_width))


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def _parse_rank(line: str, rank: int) -> tuple[Action, ...]:
    match = _RANK.fullmatch(line)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(f"expected the line of rank {rank}, 'rank {rank}: ...', but found {line[:60]!r}")
    return tuple(_parse_action(token, rank) for token in match[2].split())


def _parse_action(token: str, rank: int) -> Action:
    if match := _ACTION.fullmatch(token):
        return Action(int(match[1]), match[2], int(match[3]))
    if match := _AGAIN.fullmatch(token):
        return Action(int(match[1]), "R", int(match[2]), turn=int(match[3]))
    if match := _PIECE.fullmatch(token):
        component, first, last, start, stop = map(int, match.groups())
        if first < last and start < stop:
            return piece(component, (first, last), (start, stop))
        raise ScheduleError(f"{token!r} on rank {rank} has no layers or samples; the second number is the larger")
    raise ScheduleError(f"{token!r} on rank {rank} is no action; {VOCABULARY}")
