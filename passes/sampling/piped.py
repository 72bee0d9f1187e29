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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from fxpipe.plan.rank_program import Message
from fxpipe.remembered import remembered
from passes.rows import RowPlan
from passes.sampling.cells import Cell
from passes.sampling.messages import Placed, messages_of
from passes.sampling.patch_graph import PatchPiece, patch_graph
from passes.sampling.patches import Patch, held, patches_of
from passes.sampling.shared import shared_values
from passes.sampling.staged import PREDICTION, PatchTurn, StagedMessages, StagedSamples
from passes.sampling.stages import Stage


@dataclass(frozen=True, eq=False, kw_only=True)
class Piped(StagedSamples):
    """Stages through which patches follow each other, of every band alike. So many ranks after those of the groups are
    `watching`: the prediction is sent to them, too."""

    norms: str
    watching: int = 0
    _told: dict[tuple[int, int], list[Message]] = field(default_factory=dict, init=False)

    def patches(self, plan: RowPlan) -> list[Patch]:
        return [replace(one, owns=one.index % self.grid.turns == 0) for one in patches_of(plan, self.bounds)]

    def patch_turns(self, group: int, place: int) -> list[PatchTurn]:
        """What passes through the stages, patch by patch of a band."""
        count, runs = self.grid.turns, range(len(self.groups[group]))
        own = self.patches(self.plan(group, 0))[place * count : (place + 1) * count]
        return [PatchTurn(patch, run) for patch in own for run in runs]

    @cached_property
    def shared(self) -> frozenset[str]:
        return shared_values(self.plan(0, 0), self.line.early)

    @remembered
    def cut(self, size: int, stage: Stage, patch: Patch) -> fx.Graph:
        """The graph of a stage's part of a patch, which returns its own rows of the prediction."""
        returns = tuple(name for name in self.returned(stage, patch) if name != PREDICTION)
        piece = PatchPiece(stage.nodes, self.line.early, stage.reads, returns, self.shared, own_rows=True)
        return patch_graph(self.plans[size], patch, piece)

    def graphs(self, group: int, column: int, place: int) -> list[fx.Graph]:
        """All that a rank computes, in either form."""
        turns = *self.turns(group, place), *self.patch_turns(group, place)
        own = [stage for stage in self.line.stages if stage.column == column]
        return [self.graph(group, stage, turn) for stage in own for turn in turns]

    def returned(self, stage: Stage, patch: Patch) -> list[str]:
        return [name for name in super().returned(stage, patch) if patch.owns or name not in self.shared]

    def like(self, plan: RowPlan, patch: Patch, name: str) -> torch.Tensor:
        return held(plan, patch, plan.sized.result.name if name == PREDICTION else name)

    def receivers(self, group: int, stage: Stage, place: int, name: str) -> list[tuple[int, str]]:
        """The other ranks that a value goes to, the prediction to all, and what it is for them."""
        if name != PREDICTION:
            return super().receivers(group, stage, place, name)
        own = self.grid.rank(group, stage.column, place)
        return [(rank, PREDICTION) for rank in range(self.grid.of_copy + self.watching) if rank != own]

    def told(self, group: int, stage: Stage, run: int, place: int) -> list[Message]:
        """What all patches read of each other in a stage, as the graph of this place's first patch says."""
        start, stop = self.groups[group][run]
        if (key := (stage.index, stop - start)) not in self._told:
            first = self.patch_turns(group, place)[run]
            told = messages_of(self.patches(self.plan(group, run)), [self.graph(group, stage, first)])
            self._told[key] = [m for m in told if m.kind != "moments" or self.norms != "separate"]
        return self._told[key]


class FreshSent(StagedMessages):
    """All messages of a fresh step. `left`: what later steps read of patches, as messages between these, each with that
    between ranks."""

    def __init__(self, piped: Piped, places: Sequence[int]) -> None:
        self.piped, self.left = piped, dict[tuple[int, Cell], Placed]()
        super().__init__(piped, places)

    def tell(self, group: int, cell: Cell, turns: Sequence[PatchTurn], ranks: Sequence[int]) -> None:
        super().tell(group, cell, turns, ranks)
        if (count := self.piped.grid.turns) > 1:
            told = self.piped.told(group, cell.stage, turns[0].run, self.places[0])
            left = [message for message in told if message.kind != "gather"]
            self.left[group, cell] = self.placed(left, cell.turn, ranks, count)


class DisplacedSent(StagedMessages):
    """All messages of a displaced step: of patches that follow each other, those that are beside each other tell."""

    def __init__(self, piped: Piped, places: Sequence[int]) -> None:
        self.piped = piped
        super().__init__(piped, places)

    def turns(self, group: int, place: int) -> list[PatchTurn]:
        return self.piped.patch_turns(group, place)

    def tell(self, group: int, cell: Cell, turns: Sequence[PatchTurn], ranks: Sequence[int]) -> None:
        count, told = self.piped.grid.turns, self.piped.told(group, cell.stage, turns[0].run, self.places[0])
        now = [message for message in told if message.src % count == turns[0].patch.index]
        self.within[group, cell] = self.placed(now, cell.turn, ranks, count)
