"""Schedules: which rank does what, in which order, and the work a schedule has to contain.

    schedule 1f1b: 2 stages, 2 micro-batches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

An action is <stage><letter><micro-batch>; `KINDS` lists the letters.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fxpipe.errors import ScheduleError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

KINDS = {
    "F": "forward",
    "B": "full backward",
    "I": "input gradient",
    "W": "weight gradient",
    "T": "frozen work, whose first number is the component",
    "R": "gradient reduction over the stage's replicas, whose last number is the rank",
}
VOCABULARY = "legal actions are <stage><letter><micro-batch> with " + ", ".join(f"{k} = {v}" for k, v in KINDS.items())

_ACTION = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d+)", re.ASCII)
_HEADER = re.compile(r"schedule (\S.*): (\d+) stages?, (\d+) micro-batch(?:es)?", re.ASCII)
_RANK = re.compile(r"rank (\d+):(.*)", re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One unit of work of one micro-batch.

    `stage` is the frozen component's index where `kind` is "T"; `microbatch` is the rank where it is "R".
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


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
            f"schedule {self.name}: {_count(self.num_stages, 'stage', 's')}, "
            f"{_count(self.num_microbatches, 'micro-batch', 'es')}"
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
        """The ranks of every stage, one per replica; none for a stage without actions."""
        found: list[dict[int, None]] = [{} for _ in range(self.num_stages)]
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind not in "TR" and action.stage < self.num_stages:
                    found[action.stage][rank] = None
        return tuple(map(tuple, found))

    @property
    def is_split(self) -> bool:
        """Whether any backward is cut into input and weight gradient."""
        return any(action.kind in "IW" for actions in self.ranks for action in actions)

    def __str__(self) -> str:
        from fxpipe.schedule_grid import grid  # the drawing needs the simulator, which needs these types

        return grid(self)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """What `rich.print` shows: the drawing in colours, as wide as the terminal."""
        from fxpipe.schedule_grid import rich_grid

        yield rich_grid(self, width=options.max_width)


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _parse_rank(line: str, rank: int) -> tuple[Action, ...]:
    match = _RANK.fullmatch(line)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(f"expected the line of rank {rank}, 'rank {rank}: ...', but found {line[:60]!r}")
    return tuple(_parse_action(token, rank) for token in match[2].split())


def _parse_action(token: str, rank: int) -> Action:
    match = _ACTION.fullmatch(token)
    if match is None:
        raise ScheduleError(f"{token!r} on rank {rank} is no action; {VOCABULARY}")
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Work:
    """What a schedule must contain: the same for every micro-batch.

    Terms: an edge (a, b) of `edges` is a forward value from stage a to stage b; (b, a) of `grad_edges` a gradient
    from stage b to stage a; (c, s) of `frozen_edges` a value of component c used by stage s; `component_edges` join
    components.
    """

    num_stages: int
    num_microbatches: int
    num_components: int = 0
    empty: frozenset[int] = frozenset()  # stages without nodes, which have no actions
    backward: frozenset[int] = frozenset()  # stages with any gradient work
    input_grad: frozenset[int] = frozenset()  # stages that send a gradient to another stage
    weight_grad: frozenset[int] = frozenset()  # stages that own trainable parameters
    edges: frozenset[tuple[int, int]] = frozenset()
    grad_edges: frozenset[tuple[int, int]] = frozenset()
    frozen_edges: frozenset[tuple[int, int]] = frozenset()
    component_edges: frozenset[tuple[int, int]] = frozenset()

    @property
    def stages(self) -> list[int]:
        """The stages that have work, in order."""
        return [stage for stage in range(self.num_stages) if stage not in self.empty]

    def needs(self, action: Action, present: Set[Action]) -> Iterator[Action]:
        """The actions that must end before `action`; `present` tells which stages' backwards are split."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "W":
            yield Action(stage, "I", microbatch)
        if kind in "BI":
            yield Action(stage, "F", microbatch)
        for producer in self._producers.get((kind.replace("I", "B"), stage), ()):
            split = Action(producer, "I", microbatch)
            yield split if kind in "BI" and split in present else Action(producer, kind.replace("I", "B"), microbatch)
        if kind == "F":
            for component in self._producers.get(("frozen", stage), ()):
                yield Action(component, "T", microbatch)

    @cached_property
    def _producers(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        kinds = {"F": self.edges, "B": self.grad_edges, "frozen": self.frozen_edges, "T": self.component_edges}
        for kind, edges in kinds.items():
            for source, target in sorted(edges):
                found.setdefault((kind, target), []).append(source)
        return found
