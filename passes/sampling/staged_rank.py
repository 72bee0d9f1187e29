"""One rank's program over its cells: what comes is posted first, for bytes move when both ends are there.

begin predict;  recv h[0];  recv h[1];  h = wait(h[0]);  ... ;  send prediction[0];  h_1 = wait(h[1]);  ...
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import SampleProgram, StepForm
from passes.sampling.cells import Cell, CellWriter, cells
from passes.sampling.fresh import CONSTANTS
from passes.sampling.staged import PREDICTION, PatchTurn, StagedMessages, StagedSamples


def staged_programs(
    staged: StagedSamples, ranks: Collection[int]
) -> tuple[tuple[SampleProgram, ...], tuple[Message, ...]]:
    """The programs of these ranks, and all messages in the order of every channel."""
    sent, programs = StagedMessages(staged, sorted({rank % staged.beside for rank in ranks})), list[SampleProgram]()
    for rank in sorted(ranks):
        writer = StagedWriter(staged, rank, sent)
        forms = {"fresh": writer.write()}
        programs.append(SampleProgram(rank, forms, tuple(writer.given), writer.state))
    return tuple(programs), tuple(sent.all)


class StagedWriter:
    """One rank's program of a step as it grows, cell by cell; what a cell reads of others is of this step.

    Inputs and the model's tensors are there once for all cells, by name, and messages between cells.
    """

    def __init__(self, staged: StagedSamples, rank: int, sent: StagedMessages, takes_carried: bool = False) -> None:
        self.staged, self.rank, self.sent, self.graph = staged, rank, sent, fx.Graph()
        self.group, self.column, self.place = staged.place(rank)
        self.turns, runs = sent.turns(self.group, self.place), staged.groups[self.group]
        self.mine = [message for message in sent.all if rank in message.channel]
        self.between = [message for message in self.mine if not staged.is_beside(message)]
        self.transport = self.graph.placeholder("transport")
        self.plan, graphs = staged.plan(self.group, 0), staged.graphs(self.group, self.column, self.place)
        used = {node.name for graph in graphs for node in graph.find_nodes(op="placeholder") if node.users}
        self.given = {name: self.graph.placeholder(name) for name in self.plan.inputs if name in used}
        self.carried = self.graph.placeholder("carried") if takes_carried else None
        self.state: dict[str, torch.Tensor] = {}
        self._state_nodes: dict[str, fx.Node] = {}
        self._slices: dict[tuple[str, int], fx.Node] = {}
        self.early: list[dict[str, fx.Node]] = [{} for _ in runs]
        self.values: list[dict[str, fx.Node]] = [{} for _ in self.turns]
        self.begun = self.call(ops.begin, (self.transport, "predict"), "begin_predict")
        self.posted = {message.edge: self.post(message) for message in self.between if message.dst == rank}

    def write(self) -> StepForm:
        for cell in cells(self.staged.line, len(self.turns)):
            if cell.stage.column == self.column:
                self.add(cell, self.turns[cell.turn])
        form = self.form()
        form.graph.lint()
        return form

    def add(self, cell: Cell, turn: PatchTurn) -> CellWriter:
        """Write a cell, with what comes to it and goes from it."""
        values = self.values[cell.turn]
        self.read(cell, values)
        graph = self.staged.graph(self.group, cell.stage, turn)
        writer = self.writer(cell, turn, graph, values)
        names = self.staged.returned(cell.stage, turn.patch)
        returned = dict(zip(names, writer.add(graph, cell), strict=True))
        values |= returned
        self.send(cell, returned)
        return writer

    def writer(self, cell: Cell, turn: PatchTurn, graph: fx.Graph, values: dict[str, fx.Node]) -> CellWriter:
        """Of a cell's graph, with these values of other stages."""
        plan, within = self.staged.plan(self.group, turn.run), self.sent.within.get((self.group, cell), [])
        return CellWriter(plan, self.staged.bands(plan), turn.patch, within, *self.of_rank(turn, values))

    def of_rank(self, turn: PatchTurn, values: Mapping[str, fx.Node]) -> tuple[Any, ...]:
        """What any cell's writer takes of the rank."""
        return self.staged.device, self.transport, partial(self.operand, turn.run), values, self.early[turn.run]

    def form(self) -> StepForm:
        """The step as it is now."""
        self.graph.output(self.joined(self.pieces(self.place), 0, self.staged.prediction()))
        return StepForm(self.graph)

    def call(self, target: Any, args: tuple[Any, ...], name: str, like: torch.Tensor | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        if like is not None:
            node.meta["val"] = like
        return node

    def operand(self, run: int, node: fx.Node) -> fx.Node:
        """Where a cell finds one of its inputs, the samples of its run alone, or one of the model's tensors."""
        spans = self.staged.groups[self.group]
        if node.meta["kind"] != "input":
            return self._tensor(node)
        if len(spans) == len(self.staged.groups) == 1 or node.name not in self.staged.batched:
            return self.given[node.name]
        if (node.name, run) not in self._slices:
            args = (self.given[node.name], 0, 1, 1, *spans[run], 0)
            self._slices[node.name, run] = self.call(ops.slice_batch, args, f"{node.name}_{run}", node.meta["val"])
        return self._slices[node.name, run]

    def _tensor(self, node: fx.Node) -> fx.Node:
        if node.name not in self._state_nodes:
            name = self.plan.sized.capture.tensors.get(node.name, CONSTANTS + node.name)
            self._state_nodes[node.name] = self.graph.create_node("get_attr", name, name=node.name)
            self.state[name] = node.meta["val"]
        return self._state_nodes[node.name]

    # -- messages between cells

    def read(self, cell: Cell, values: dict[str, fx.Node]) -> None:
        """Wait for what comes to a cell and is not among `values` yet."""
        for message in self.between:
            to_cell = message.dst == self.rank and message.microbatch == cell.turn and message.kind in ("main", "skip")
            if to_cell and message.value in cell.stage.reads and message.value not in values:
                values[message.value] = self.wait(message)

    def send(self, cell: Cell, made: Mapping[str, fx.Node]) -> None:
        """Send what a cell has `made` to whom it goes."""
        for message in self.between:
            if message.src == self.rank and message.microbatch == cell.turn and message.value in made:
                self.tell(message, made[message.value])

    def tell(self, message: Message, value: fx.Node) -> None:
        message.sent(self.transport, value, f"send_{message.value}_to_{message.dst}")

    def post(self, message: Message) -> fx.Node:
        return message.received(self.transport, self.staged.device, f"recv_{message.value}_from_{message.src}")

    def wait(self, message: Message) -> fx.Node:
        like = torch.empty(message.shape, dtype=message.dtype, device="meta")
        return self.call(ops.wait, (self.posted[message.edge],), f"{message.value}_from_{message.src}", like)

    # -- the prediction

    def show(self, cell: Cell) -> None:
        """Tell the ranks beside this one what a cell predicts, and post theirs, after what they swap in the cell."""
        key = cell.turn, PREDICTION
        is_last = cell.stage == self.staged.line.stages[-1]
        beside = [m for m in self.mine if is_last and self.staged.is_beside(m) and (m.microbatch, m.value) == key]
        for message in beside:
            if message.dst == self.rank:
                self.posted[message.edge] = self.post(message)
        for message in beside:
            if message.src == self.rank:
                self.tell(message, self.values[cell.turn][PREDICTION])

    def come(self, place: int, turn: int = 0) -> list[fx.Node]:
        """A place's part of it, by groups and runs: made here, or on its way."""
        last, found = self.staged.line.stages[-1].column, []
        for group, spans in enumerate(self.staged.groups):
            src = self.staged.grid.rank(group, last, place)
            for now in range(turn * len(spans), (turn + 1) * len(spans)):
                if self.rank == src:
                    found.append(self.values[now][PREDICTION])
                    continue
                key = src, now, PREDICTION
                (message,) = (m for m in self.mine if m.dst == self.rank and (m.src, m.microbatch, m.kind) == key)
                found.append(self.posted[message.edge])
        return found

    def pieces(self, place: int) -> list[fx.Node]:
        """The same, here."""
        return [self.wait(node.meta["message"]) if node.target is ops.recv else node for node in self.come(place)]

    def joined(self, pieces: Sequence[fx.Node], dim: int, like: torch.Tensor | None = None) -> fx.Node:
        if len(pieces) == 1:
            return pieces[0]
        return self.call(torch.ops.aten.cat.default, (pieces, dim), PREDICTION, like)
