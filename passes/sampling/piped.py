"""Patches through stages, one after the other: two forms of a step for every rank (Wang et al., "PipeFusion", 2024).

fresh       samples follow each other, all rows at once            carries what patches read of each other
displaced   patches follow each other; what a stage knows of those behind is of the step before

2 columns, 4 patches   rank 0: 0F0 0F1 0F2 0F3 | 0F0 ...      a step begins as soon as patch 0 of the last one is there
                       rank 1:     1F0 1F1 1F2 1F3 | 1F0      the prediction of each patch goes to all ranks at once

2 columns of 2 ranks,  rank 0: 0F0 0F1 | 0F0 ...              a rank has a band of the rows, its patches follow each
4 patches              rank 1: 0F2 0F3 | 0F2 ...              other; ranks beside each other swap what they make in
                       rank 2:     1F0 1F1 | 1F0              this step, all of it: 0F1 knows 0F0 and 0F2, and of 0F3
                       rank 3:     1F2 1F3 | 1F2              all that it has made so far

Text is owned by the first patch of every band; what no patch changes is computed once in a step on every rank that
reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import torch
from torch import fx

from fxpipe.plan.rank_program import Message
from passes.rows import RowPlan
from passes.sampling.cells import Cell, cells
from passes.sampling.groups import Span
from passes.sampling.messages import Placed, Wires, messages_of
from passes.sampling.patch_graph import Piece, patch_graph
from passes.sampling.patches import Patch, held, patches_of
from passes.sampling.shared import shared_values
from passes.sampling.staged import PREDICTION, readers_of, returns_of
from passes.sampling.stages import Line, Stage


@dataclass(frozen=True)
class Turn:
    """What passes through the stages: a run of a group's samples, in a patch of its rows."""

    patch: Patch
    run: int


@dataclass(frozen=True, eq=False)
class Piped:
    """Stages, patches between `bounds`, and for every group of samples its runs; group g's column c has at place p of
    `beside` ranks (g * columns + c) * beside + p, and there the p-th band of as many patches as the others.

    `plans` has where the rows lie for every number of samples in a run; `batched` are the inputs whose dimension 0 is
    the batch. So many ranks after those of the groups are `watching`: the prediction is sent to them, too.
    """

    line: Line
    plans: Mapping[int, RowPlan]
    groups: Sequence[Sequence[Span]]
    bounds: Sequence[int]
    beside: int
    batched: Mapping[str, torch.Tensor]
    norms: str
    device: torch.device
    watching: int = 0
    _graphs: dict[tuple[int, int, Patch], fx.Graph] = field(default_factory=dict, init=False)
    _told: dict[tuple[int, int], list[Message]] = field(default_factory=dict, init=False)

    @property
    def num_patches(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_turns(self) -> int:
        """Patches of a band."""
        return self.num_patches // self.beside

    @property
    def num_ranks(self) -> int:
        return len(self.groups) * self.line.num_columns * self.beside

    def rank(self, group: int, column: int, place: int) -> int:
        return (group * self.line.num_columns + column) * self.beside + place

    def place(self, rank: int) -> tuple[int, int, int]:
        """Group, column and place; of a rank that watches a column that is none."""
        if rank >= self.num_ranks:
            return 0, -1, 0
        column, place = divmod(rank, self.beside)
        return *divmod(column, self.line.num_columns), place

    def plan(self, group: int, run: int) -> RowPlan:
        start, stop = self.groups[group][run]
        return self.plans[stop - start]

    def patches(self, plan: RowPlan) -> list[Patch]:
        return [replace(one, owns=one.index % self.num_turns == 0) for one in patches_of(plan, self.bounds)]

    def bands(self, plan: RowPlan) -> list[Patch]:
        """What each place has of the rows."""
        return patches_of(plan, self.bounds[:: self.num_turns])

    def turns(self, group: int, place: int, form: str) -> list[Turn]:
        runs, plan, count = range(len(self.groups[group])), self.plan(group, 0), self.num_turns
        if form == "fresh":
            return [Turn(self.bands(plan)[place], run) for run in runs]
        return [Turn(patch, run) for patch in self.patches(plan)[place * count : (place + 1) * count] for run in runs]

    @cached_property
    def shared(self) -> frozenset[str]:
        return shared_values(next(iter(self.plans.values())), self.line.early)

    def graph(self, group: int, stage: Stage, turn: Turn) -> fx.Graph:
        """What a stage computes at a turn, made when it is first asked for."""
        start, stop = self.groups[group][turn.run]
        key = stage.index, stop - start, turn.patch
        if key not in self._graphs:
            self._graphs[key] = patch_graph(self.plan(group, turn.run), turn.patch, self.piece(stage, turn.patch))
        return self._graphs[key]

    def graphs(self, group: int, column: int, place: int) -> list[fx.Graph]:
        """All that a rank computes, in either form."""
        turns = *self.turns(group, place, "fresh"), *self.turns(group, place, "displaced")
        own = [stage for stage in self.line.stages if stage.column == column]
        return [self.graph(group, stage, turn) for stage in own for turn in turns]

    def told(self, group: int, stage: Stage, run: int, place: int) -> list[Message]:
        """What all patches read of each other in a stage, as the graph of this place's first patch says."""
        start, stop = self.groups[group][run]
        if (key := (stage.index, stop - start)) not in self._told:
            first = self.turns(group, place, "displaced")[run]
            told = messages_of(self.patches(self.plan(group, run)), [self.graph(group, stage, first)])
            self._told[key] = [m for m in told if m.kind != "moments" or self.norms != "separate"]
        return self._told[key]

    def piece(self, stage: Stage, patch: Patch) -> Piece:
        """What a stage computes of a patch."""
        returns = tuple(name for name in stage.returns if patch.owns or name not in self.shared)
        return Piece(stage.nodes, self.line.early, stage.reads, returns, self.shared, own_rows=True)


def returned_names(piped: Piped, cell: Cell, turn: Turn) -> list[str]:
    """What a cell returns, in the order of its graph; the last stage's has the prediction too."""
    return [name for name in returns_of(cell) if turn.patch.owns or name not in piped.shared]


class Sent(Wires):
    """All messages of one form, in the order of every channel, the groups' cells side by side; `microbatch` is the turn
    within the group.

    `within` a cell: what ranks beside each other swap, as messages between bands in a fresh form and between patches in
    a displaced one, each with that between ranks. `left`: of a fresh form, what later steps read of patches, likewise.
    """

    def __init__(self, piped: Piped, form: str, place: int) -> None:
        """`place`: whose graphs tell what all exchange."""
        super().__init__()
        self.piped, self.is_fresh, self.place = piped, form == "fresh", place
        self.within: dict[tuple[int, Cell], Placed] = {}
        self.left: dict[tuple[int, Cell], Placed] = {}
        groups = range(len(piped.groups))
        turns = [[piped.turns(group, place, form) for place in range(piped.beside)] for group in groups]
        for side_by_side in zip_longest(*(cells(piped.line, len(of_group[0])) for of_group in turns)):
            for group, cell in ((group, cell) for group, cell in enumerate(side_by_side) if cell is not None):
                self._add(group, cell, [of_place[cell.turn] for of_place in turns[group]])

    def _add(self, group: int, cell: Cell, turns: Sequence[Turn]) -> None:
        """Those of a cell at all its places."""
        piped, run = self.piped, turns[0].run
        count, at = piped.num_turns, turns[0].patch.index
        plan = piped.plan(group, run)
        ranks = [piped.rank(group, cell.stage.column, place) for place in range(piped.beside)]
        if piped.beside > 1:
            told = piped.told(group, cell.stage, run, self.place)
            if self.is_fresh:
                graph = piped.graph(group, cell.stage, turns[self.place])
                self.within[group, cell] = self.placed(messages_of(piped.bands(plan), [graph]), cell.turn, ranks)
                left = [message for message in told if message.kind != "gather"] if count > 1 else []
                self.left[group, cell] = self.placed(left, cell.turn, ranks, count)
            else:
                now = [message for message in told if message.src % count == at]
                self.within[group, cell] = self.placed(now, cell.turn, ranks, count)
        for place, turn in enumerate(turns):
            for name in returned_names(piped, cell, turn):
                for dst, kind in self._receivers(group, cell, place, name):
                    like = held(plan, turn.patch, plan.sized.result.name if name == PREDICTION else name)
                    self.add(ranks[place], dst, name, cell.turn, kind, like)

    def _receivers(self, group: int, cell: Cell, place: int, name: str) -> list[tuple[int, str]]:
        """The other ranks that a value goes to, and what it is for them."""
        piped = self.piped
        if name == PREDICTION and cell.stage == piped.line.stages[-1]:
            own = piped.rank(group, cell.stage.column, place)
            return [(rank, PREDICTION) for rank in range(piped.num_ranks + piped.watching) if rank != own]
        return [(piped.rank(group, column, place), kind) for column, kind in readers_of(piped.line, cell, name)]
