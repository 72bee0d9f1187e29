"""Stages on ranks, exact: samples follow each other through the stages, patches of the rows beside each other in each.

2 columns x 2 patches, samples 0 and 1

rank 0: stage 0, patch 0 of sample 0; send h    stage 0, patch 0 of sample 1; send h ...   wait prediction
rank 1: stage 0, patch 1 of sample 0; send h    ...
rank 2:     wait h; stage 1, patch 0 of sample 0     wait h; stage 1, patch 0 of sample 1; send prediction
rank 3:     wait h; stage 1, patch 1 of sample 0     ...

Patches of a stage exchange what they need of each other in the step itself. Every rank holds its stages' weights alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import fx

from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.sample_plan import AttentionKind
from fxpipe.remembered import remembered
from passes.rows import RowPlan
from passes.sampling.attention import Shared
from passes.sampling.cells import Cell, cells
from passes.sampling.groups import Span
from passes.sampling.messages import Placed, PlannedMessages, messages_of
from passes.sampling.patch_graph import PatchPiece, patch_graph
from passes.sampling.patches import Patch, held, patches_of
from passes.sampling.stages import Stage, StageLine

PREDICTION = "prediction"


@dataclass(frozen=True)
class PatchTurn:
    """What passes through the stages: a run of a group's samples, in a patch of its rows."""

    patch: Patch
    run: int


@dataclass(frozen=True, eq=False)
class StagedSamples:
    """Stages, and for every group of samples its runs. At every place of a column of the `grid` is a band of the rows,
    with as many of the patches between `bounds` as the others.

    `plans` has where the rows lie for every number of samples in a run; `batched` are the inputs whose dimension 0 is
    the batch, `kinds` are of attention.
    """

    line: StageLine
    plans: Mapping[int, RowPlan]
    groups: Sequence[Sequence[Span]]
    bounds: Sequence[int]
    grid: Grid
    batched: Mapping[str, torch.Tensor]
    device: torch.device
    kinds: Sequence[AttentionKind] = ()

    @property
    def beside(self) -> int:
        """Places of a column."""
        return self.grid.patches

    def place(self, rank: int) -> tuple[int, int, int]:
        """Group, column and place; of a rank that watches a column that is none."""
        return self.grid.place(rank) if rank < self.grid.of_copy else (0, -1, 0)

    def is_beside(self, message: Message) -> bool:
        """Whether it goes between ranks of one column."""
        return message.src // self.beside == message.dst // self.beside

    def plan(self, group: int, run: int) -> RowPlan:
        start, stop = self.groups[group][run]
        return self.plans[stop - start]

    def bands(self, plan: RowPlan) -> list[Patch]:
        """What each place has of the rows."""
        return patches_of(plan, self.bounds[:: self.grid.turns])

    def turns(self, group: int, place: int) -> list[PatchTurn]:
        """What passes through the stages, where all rows of a band do at once."""
        band = self.bands(self.plan(group, 0))[place]
        return [PatchTurn(band, run) for run in range(len(self.groups[group]))]

    def graph(self, group: int, stage: Stage, turn: PatchTurn) -> fx.Graph:
        """What a stage computes at a turn."""
        start, stop = self.groups[group][turn.run]
        return self.cut(stop - start, stage, turn.patch)

    @remembered
    def cut(self, size: int, stage: Stage, patch: Patch) -> fx.Graph:
        """The graph of a stage's part of a patch, of so many samples; made when it is first asked for."""
        plan = self.plans[size]
        piece = PatchPiece(stage.nodes, self.line.early, stage.reads, stage.returns, has_inputs=True)
        return patch_graph(plan, patch, piece, attended=Shared.of(plan, self.bands(plan), self.kinds), exact=True)

    def graphs(self, group: int, column: int, place: int) -> list[fx.Graph]:
        """All that a rank computes."""
        own = [stage for stage in self.line.stages if stage.column == column]
        return [self.graph(group, stage, turn) for stage in own for turn in self.turns(group, place)]

    def returned(self, stage: Stage, patch: Patch) -> list[str]:
        """What a stage returns of a patch, in the order of its graph; the last one's has the prediction too."""
        return [*stage.returns, PREDICTION] if stage == self.line.stages[-1] else [*stage.returns]

    def like(self, plan: RowPlan, patch: Patch, name: str) -> torch.Tensor:
        """Shape and type of what is returned of a patch."""
        return plan.sized.result.meta["val"] if name == PREDICTION else held(plan, patch, name)

    def prediction(self) -> torch.Tensor:
        """Shape and type of that for all samples."""
        like: torch.Tensor = self.plan(0, 0).sized.result.meta["val"]
        return like.new_empty((self.groups[-1][-1][1], *like.shape[1:]))

    def receivers(self, group: int, stage: Stage, place: int, name: str) -> list[tuple[int, str]]:
        """The other ranks that a value goes to, and what it is for them."""
        if name == PREDICTION:
            kinds = dict.fromkeys(range(self.line.num_columns), PREDICTION)
        else:
            readers = [one for one in self.line.stages if name in one.reads]
            kinds = {one.column: "skip" for one in readers}
            kinds |= {one.column: "main" for one in readers if one.index == stage.index + 1}
        columns = (column for column in sorted(kinds) if column != stage.column)
        return [(self.grid.rank(group, column, place), kinds[column]) for column in columns]


class StagedMessages(PlannedMessages):
    """All messages of a step in which every place has a band of the rows, in the order of every channel, the groups'
    cells side by side; `microbatch` is the turn within the group.

    `within` a cell: what ranks beside each other tell, as messages between what they have of the rows, each with that
    between ranks.
    """

    def __init__(self, staged: StagedSamples, places: Sequence[int]) -> None:
        """`places`: whose graphs tell what all exchange."""
        super().__init__()
        self.staged, self.places = staged, places
        self.within: dict[tuple[int, Cell], Placed] = {}
        groups = range(len(staged.groups))
        turns = [[self.turns(group, place) for place in range(staged.beside)] for group in groups]
        for side_by_side in zip_longest(*(cells(staged.line, len(of_group[0])) for of_group in turns)):
            for group, cell in ((group, cell) for group, cell in enumerate(side_by_side) if cell is not None):
                self._add(group, cell, [of_place[cell.turn] for of_place in turns[group]])

    def turns(self, group: int, place: int) -> list[PatchTurn]:
        """What passes through the stages at a place."""
        return self.staged.turns(group, place)

    def _add(self, group: int, cell: Cell, turns: Sequence[PatchTurn]) -> None:
        """Those of a cell at all its places."""
        staged, plan = self.staged, self.staged.plan(group, turns[0].run)
        ranks = [staged.grid.rank(group, cell.stage.column, place) for place in range(staged.beside)]
        if staged.beside > 1:
            self.tell(group, cell, turns, ranks)
        for place, turn in enumerate(turns):
            for name in staged.returned(cell.stage, turn.patch):
                for dst, kind in staged.receivers(group, cell.stage, place, name):
                    self.add(ranks[place], dst, name, cell.turn, kind, staged.like(plan, turn.patch, name))

    def tell(self, group: int, cell: Cell, turns: Sequence[PatchTurn], ranks: Sequence[int]) -> None:
        """Those within a cell."""
        graphs = [self.staged.graph(group, cell.stage, turns[place]) for place in self.places]
        told = messages_of([turn.patch for turn in turns], graphs)
        self.within[group, cell] = self.placed(told, cell.turn, ranks)
