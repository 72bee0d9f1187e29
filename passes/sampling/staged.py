"""Stages on ranks, exact: samples follow each other through the stages, patches of the rows beside each other in each.

2 columns x 2 patches, samples 0 and 1

rank 0: stage 0, patch 0 of sample 0; send h    stage 0, patch 0 of sample 1; send h ...   wait prediction
rank 1: stage 0, patch 1 of sample 0; send h    ...
rank 2:     wait h; stage 1, patch 0 of sample 0     wait h; stage 1, patch 0 of sample 1; send prediction
rank 3:     wait h; stage 1, patch 1 of sample 0     ...

Patches of a stage exchange what they need of each other in the step itself. Every rank holds its stages' weights alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_plan import Kind
from fxpipe.plan.sample_program import Form, SampleProgram
from passes.rows import RowPlan
from passes.sampling.attention import Shared
from passes.sampling.cells import Cell, CellWriter, cells
from passes.sampling.groups import Span
from passes.sampling.messages import Placed, Wires, messages_of
from passes.sampling.patch_graph import Piece, patch_graph
from passes.sampling.patches import Patch, held, patches_of
from passes.sampling.staged_rank import RankGraph
from passes.sampling.stages import Line

PREDICTION = "prediction"


@dataclass(frozen=True, eq=False)
class Staged:
    """Stages, patches beside each other, and runs of samples that follow each other.

    `plans` has where the rows lie for every number of samples in a run; `batched` are the inputs whose dimension 0 is
    the batch, `kinds` are of attention. Column c's patch p is on rank c * patches + p.
    """

    line: Line
    plans: Mapping[int, RowPlan]
    spans: Sequence[Span]
    bounds: Sequence[int]
    batched: Mapping[str, torch.Tensor]
    kinds: Sequence[Kind]
    device: torch.device

    @property
    def num_patches(self) -> int:
        return len(self.bounds) - 1

    def rank(self, column: int, patch: int) -> int:
        return column * self.num_patches + patch

    def size(self, turn: int) -> int:
        return self.spans[turn][1] - self.spans[turn][0]

    def patches(self, turn: int) -> list[Patch]:
        return patches_of(self.plans[self.size(turn)], self.bounds)


def piece_of(line: Line, index: int) -> Piece:
    """What a stage computes."""
    stage = line.stages[index]
    return Piece(stage.nodes, line.early, stage.reads, stage.returns)


def staged_programs(staged: Staged, ranks: Collection[int]) -> tuple[tuple[SampleProgram, ...], tuple[Message, ...]]:
    """The programs of these ranks, and all messages in the order of every channel."""
    places = sorted({rank % staged.num_patches for rank in ranks})
    graphs = {
        (stage.index, size): {
            place: patch_graph(plan, of_size[place], piece_of(staged.line, stage.index), attended=attended, exact=True)
            for place in places
        }
        for size, plan in staged.plans.items()
        for of_size in [patches_of(plan, staged.bounds)]
        for attended in [Shared.of(plan, of_size, staged.kinds)]
        for stage in staged.line.stages
    }
    order = cells(staged.line, len(staged.spans))
    sent = Sent()
    for cell in order:
        sent.add_cell(staged, cell, graphs[cell.stage.index, staged.size(cell.turn)].values())
    programs = []
    for rank in sorted(ranks):
        column, patch = divmod(rank, staged.num_patches)
        own = [cell for cell in order if cell.stage.column == column]
        of_rank = [graphs[cell.stage.index, staged.size(cell.turn)][patch] for cell in own]
        programs.append(_RankWriter(staged, column, patch, sent).program(own, of_rank))
    return tuple(programs), tuple(sent.all)


class Sent(Wires):
    """All messages: `within` a cell, between its patches, and from a cell to later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.within: dict[Cell, Placed] = {}

    def add_cell(self, staged: Staged, cell: Cell, graphs: Collection[fx.Graph]) -> None:
        """Those of a cell, of which `graphs` are some patches'."""
        patches, plan = staged.patches(cell.turn), staged.plans[staged.size(cell.turn)]
        ranks = [staged.rank(cell.stage.column, patch.index) for patch in patches]
        self.within[cell] = self.placed(messages_of(patches, graphs), cell.turn, ranks)
        for name in returns_of(cell):
            readers = readers_of(staged.line, cell, name)
            for patch in patches if readers else ():
                like = plan.sized.result.meta["val"] if name == PREDICTION else held(plan, patch, name)
                for column, kind in readers:
                    self.add(ranks[patch.index], staged.rank(column, patch.index), name, cell.turn, kind, like)


def returns_of(cell: Cell) -> tuple[str, ...]:
    """What a cell's graph returns, by name; the last stage's has the prediction too."""
    return (*cell.stage.returns, PREDICTION)


def readers_of(line: Line, cell: Cell, name: str) -> list[tuple[int, str]]:
    """The other columns that a value goes to, and what it is for them."""
    if name == PREDICTION:
        everyone = range(line.num_columns) if cell.stage == line.stages[-1] else ()
        return [(column, "prediction") for column in everyone if column != cell.stage.column]
    found = []
    for column in line.readers(name):
        readers = [s.index for s in line.stages if s.column == column and name in s.reads]
        if column != cell.stage.column:
            found.append((column, "main" if cell.stage.index + 1 in readers else "skip"))
    return found


class _RankWriter:
    """One rank's program."""

    def __init__(self, staged: Staged, column: int, patch: int, sent: Sent) -> None:
        self.staged, self.column, self.patch, self.sent = staged, column, patch, sent
        self.rank = staged.rank(column, patch)
        self.between = [m for m in sent.all if m.kind in ("main", "skip", PREDICTION) and self._is_between(m)]

    def _is_between(self, message: Message) -> bool:
        """Whether it goes from column to column."""
        return message.src // self.staged.num_patches != message.dst // self.staged.num_patches

    def program(self, own: Sequence[Cell], graphs: Sequence[fx.Graph]) -> SampleProgram:
        plan = next(iter(self.staged.plans.values()))
        self.rows = RankGraph(plan, graphs, self.rank, self.between, self.staged.device)
        turns = range(len(self.staged.spans))
        self.values: list[dict[str, fx.Node]] = [{} for _ in turns]
        self.early: list[dict[str, fx.Node]] = [{} for _ in turns]
        for cell, graph in zip(own, graphs, strict=True):
            self._add(cell, graph)
        result = self._prediction()
        self.rows.graph.output(result)
        self.rows.graph.lint()
        return SampleProgram(self.rank, {"fresh": Form(self.rows.graph)}, tuple(self.rows.given), self.rows.state)

    def _add(self, cell: Cell, graph: fx.Graph) -> None:
        staged, turn = self.staged, cell.turn
        self.rows.read(cell, self.values[turn])
        patches = staged.patches(turn)
        span = staged.spans[turn] if len(staged.spans) > 1 else None
        writer = CellWriter(
            staged.plans[staged.size(turn)], patches, patches[self.patch], self.sent.within[cell], staged.device,
            self.rows.transport, self.rows.operand(turn, span, staged.batched), self.values[turn], self.early[turn],
        )  # fmt: skip
        returned = dict(zip(returns_of(cell), writer.add(graph, cell), strict=False))
        self.values[turn] |= returned
        self.rows.send(cell, returned)

    def _prediction(self) -> fx.Node:
        """Of all samples, from the last stage."""
        parts = []
        for turn, values in enumerate(self.values):
            for message in self.between:
                if message.dst == self.rank and message.microbatch == turn and message.kind == PREDICTION:
                    values[PREDICTION] = self.rows.wait(message)
            parts.append(values[PREDICTION])
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].meta["val"].shape)
        shape[0] = self.staged.spans[-1][1] - self.staged.spans[0][0]
        like = torch.empty(shape, dtype=parts[0].meta["val"].dtype, device="meta")
        return self.rows.call(torch.ops.aten.cat.default, (parts, 0), PREDICTION, like)
