"""Patches through stages, one after the other: two forms of a step for every rank (Wang et al., "PipeFusion", 2024).

fresh       samples follow each other, all rows at once            carries what patches read of each other
displaced   patches follow each other; what a stage knows of those behind is of the step before

2 columns, 4 patches   rank 0: 0F0 0F1 0F2 0F3 | 0F0 ...      a step begins as soon as patch 0 of the last one is there
                       rank 1:     1F0 1F1 1F2 1F3 | 1F0      the prediction of each patch goes to all ranks at once

Text is owned by the first patch; what no patch changes is computed once in a step on every rank that reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import torch
from torch import fx

from fxpipe.plan.rank_program import Message
from passes.rows import RowPlan
from passes.sampling.cells import Cell, cells
from passes.sampling.displaced import Norms
from passes.sampling.groups import Span
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
    """Stages, patches between `bounds`, and for every group of samples its runs; group g's column c is rank
    g * columns + c.

    `plans` has where the rows lie for every number of samples in a run; `batched` are the inputs whose dimension 0 is
    the batch.
    """

    line: Line
    plans: Mapping[int, RowPlan]
    groups: Sequence[Sequence[Span]]
    bounds: Sequence[int]
    batched: Mapping[str, torch.Tensor]
    norms: Norms
    device: torch.device
    _graphs: dict[tuple[int, int, Patch], fx.Graph] = field(default_factory=dict, init=False)

    @property
    def num_patches(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_ranks(self) -> int:
        return len(self.groups) * self.line.num_columns

    def plan(self, group: int, run: int) -> RowPlan:
        start, stop = self.groups[group][run]
        return self.plans[stop - start]

    def patches(self, plan: RowPlan) -> list[Patch]:
        return patches_of(plan, self.bounds, "first")

    def turns(self, group: int, form: str) -> list[Turn]:
        runs = range(len(self.groups[group]))
        if form == "fresh":
            count = self.plan(group, 0).units.count
            return [Turn(Patch(0, 0, count, count), run) for run in runs]
        return [Turn(patch, run) for patch in self.patches(self.plan(group, 0)) for run in runs]

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

    def graphs(self, group: int, column: int) -> list[fx.Graph]:
        """All that a rank computes, in either form."""
        turns = *self.turns(group, "fresh"), *self.turns(group, "displaced")
        own = [stage for stage in self.line.stages if stage.column == column]
        return [self.graph(group, stage, turn) for stage in own for turn in turns]

    def piece(self, stage: Stage, patch: Patch) -> Piece:
        """What a stage computes of a patch."""
        returns = tuple(name for name in stage.returns if patch.owns or name not in self.shared)
        return Piece(stage.nodes, self.line.early, stage.reads, returns, self.shared, own_rows=True)


def returned_names(piped: Piped, cell: Cell, turn: Turn) -> list[str]:
    """What a cell returns, in the order of its graph; the last stage's has the prediction too."""
    return [name for name in returns_of(cell) if turn.patch.owns or name not in piped.shared]


def messages_of_form(piped: Piped, form: str) -> tuple[Message, ...]:
    """All messages of one form, in the order of every channel, the groups' cells side by side; `microbatch` is the turn
    within the group."""
    found: list[Message] = []
    turns = [piped.turns(group, form) for group in range(len(piped.groups))]
    for beside in zip_longest(*(cells(piped.line, len(of_group)) for of_group in turns)):
        for group, cell in ((group, cell) for group, cell in enumerate(beside) if cell is not None):
            turn, src = turns[group][cell.turn], group * piped.line.num_columns + cell.stage.column
            plan = piped.plan(group, turn.run)
            for name in returned_names(piped, cell, turn):
                for dst, kind in _receivers(piped, group, cell, name):
                    like = held(plan, turn.patch, plan.sized.result.name if name == PREDICTION else name)
                    wire = (len(found), src, dst, None, name, cell.turn, kind, tuple(like.shape), like.dtype)
                    found.append(Message(*wire))
    return tuple(found)


def _receivers(piped: Piped, group: int, cell: Cell, name: str) -> list[tuple[int, str]]:
    """The other ranks that a value goes to, and what it is for them."""
    first = group * piped.line.num_columns
    if name == PREDICTION and cell.stage == piped.line.stages[-1]:
        return [(rank, PREDICTION) for rank in range(piped.num_ranks) if rank != first + cell.stage.column]
    return [(first + column, kind) for column, kind in readers_of(piped.line, cell, name)]
