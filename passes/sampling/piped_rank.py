"""One rank's two forms: patches that follow each other through its stages, and the fresh step that comes before them.

displaced   k = put(take(k), k_0); ... h_1 = wait(h of patch 1); k = put(k, k_1); ...     carries k
fresh       k = linear(h); ...                                                            carries clone(k)
"""

from collections import ChainMap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops, row_ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import Form, Parts, SampleProgram
from passes.rows import RowPlan
from passes.rows.layout import Rows
from passes.sampling.cells import Cell, CellWriter, cells
from passes.sampling.exchanges import Exchange
from passes.sampling.latest import Latest, LatestWriter, name_of
from passes.sampling.messages import exchanges_of, halo_of, messages_of
from passes.sampling.patch_graph import sum_graph
from passes.sampling.patches import Patch
from passes.sampling.piped import Piped, Turn, messages_of_form, returned_names
from passes.sampling.shared import require_rows
from passes.sampling.staged import PREDICTION
from passes.sampling.staged_rank import RankGraph

BEGUN = "begun"
"""Under which every rank carries something, so that all know alike whether there was a step before."""
FORMS = ("displaced", "fresh")


def piped_programs(
    piped: Piped, ranks: Collection[int]
) -> tuple[tuple[SampleProgram, ...], dict[str, tuple[Message, ...]]]:
    """The programs of these ranks, with the forms fresh and displaced; every form's messages.

    Raises:
        CompileError: the prediction is not made row by row.
    """
    require_rows(next(iter(piped.plans.values())))
    messages = {form: messages_of_form(piped, form) for form in FORMS}
    programs = []
    for rank in sorted(ranks):
        written = _Written(piped, *divmod(rank, piped.line.num_columns), messages["displaced"], "displaced", ())
        fresh = _Written(piped, *divmod(rank, piped.line.num_columns), messages["fresh"], "fresh", written.taken)
        forms = {"fresh": fresh.form, "displaced": written.form}
        state = {**fresh.rows.state, **written.rows.state}
        programs.append(SampleProgram(rank, forms, tuple(fresh.rows.given), state))
    return tuple(programs), messages


class _Written:
    """One form of one rank. `wanted`: what a fresh form is to carry."""

    def __init__(
        self, piped: Piped, group: int, column: int, messages: Sequence[Message], form: str, wanted: Iterable[str]
    ) -> None:
        self.piped, self.group, self.is_fresh, self.wanted = piped, group, form == "fresh", set(wanted)
        self.rank, self.turns = group * piped.line.num_columns + column, piped.turns(group, form)
        self.mine = [message for message in messages if self.rank in message.channel]
        plan, graphs = piped.plan(group, 0), piped.graphs(group, column)
        self.rows = RankGraph(plan, graphs, self.rank, self.mine, piped.device, takes_carried=not self.is_fresh)
        self.taken: list[str] = []
        self.carries: dict[str, fx.Node] = {}
        self.latest = Latest(None if self.is_fresh else self._take)
        runs = range(len(piped.groups[group]))
        self.early: list[dict[str, fx.Node]] = [{} for _ in runs]
        self.shared: list[dict[str, fx.Node]] = [{} for _ in runs]
        self.values: list[dict[str, fx.Node]] = [{} for _ in self.turns]
        begun = next(node for node in self.rows.graph.nodes if node.target is ops.begin)
        if not self.is_fresh:
            self._take(BEGUN)
        own = [cell for cell in cells(piped.line, len(self.turns)) if cell.stage.column == column]
        for cell in own:
            self._add(cell, self.turns[cell.turn])
        self.carries |= {name: self.latest[name] for name in self.taken if name != BEGUN}
        self.carries[BEGUN] = begun
        result = self._dense() if self.is_fresh else self._in_parts()
        self.rows.graph.output((result, dict(self.carries)))
        self.rows.graph.lint()
        parts = None if self.is_fresh else _parts(piped)
        self.form = Form(self.rows.graph, tuple(self.taken), tuple(self.carries), parts)

    def _take(self, name: str) -> fx.Node:
        self.taken.append(name)
        assert self.rows.carried is not None
        return self.rows.call(ops.take, (self.rows.carried, name), f"carried_{name}")

    # -- cells

    def _add(self, cell: Cell, turn: Turn) -> None:
        piped, values = self.piped, self.values[cell.turn]
        self.rows.read(cell, values)
        graph = piped.graph(self.group, cell.stage, turn)
        writer = self._writer(cell, turn, graph, values)
        returned = writer.add(graph, cell)
        if isinstance(writer, LatestWriter):
            returned = tuple(map(writer.apart, returned))
        made = writer.made()
        if turn.patch.owns:
            self.shared[turn.run] |= {name: node for name, node in made.items() if name in piped.shared}
        named = dict(zip(returned_names(piped, cell, turn), returned, strict=False))
        values |= named
        self.rows.send(cell, named)
        if self.is_fresh and piped.num_patches > 1:
            self._keep(cell, turn, made)

    def _writer(self, cell: Cell, turn: Turn, graph: fx.Graph, values: dict[str, fx.Node]) -> CellWriter:
        piped, spans = self.piped, self.piped.groups[self.group]
        plan, whole = piped.plan(self.group, turn.run), len(spans) == 1 and len(piped.groups) == 1
        known = ChainMap(values, self.shared[turn.run])
        operand = self.rows.operand(turn.run, None if whole else spans[turn.run], piped.batched)
        rest = (piped.device, self.rows.transport, operand, known, self.early[turn.run], lambda message: message)
        if self.is_fresh:
            return CellWriter(plan, [turn.patch], turn.patch, (), *rest)
        patches = piped.patches(plan)
        if turn.patch.is_whole:
            return CellWriter(plan, patches, turn.patch, (), *rest)
        swapped = [message for message in self._swapped(cell, turn) if turn.patch.index in message.channel]
        how: dict[str, Any] = {"latest": self.latest, "stage": cell.stage.index, "run": turn.run, "norms": piped.norms}
        return LatestWriter(plan, patches, turn.patch, swapped, *rest, **how)

    def _of_all(self, cell: Cell, turn: Turn) -> list[fx.Graph]:
        """The graphs of all patches."""
        plan = self.piped.plan(self.group, turn.run)
        return [self.piped.graph(self.group, cell.stage, Turn(patch, turn.run)) for patch in self.piped.patches(plan)]

    def _swapped(self, cell: Cell, turn: Turn) -> list[Message]:
        plan = self.piped.plan(self.group, turn.run)
        return messages_of(self.piped.patches(plan), self._of_all(cell, turn))

    # -- what a fresh step leaves to a displaced one

    def _keep(self, cell: Cell, turn: Turn, made: dict[str, fx.Node]) -> None:
        plan = self.piped.plan(self.group, turn.run)
        patches, graphs = self.piped.patches(plan), self._of_all(cell, turn)
        for nodes in exchanges_of(graphs):
            exchange: Exchange = nodes[0].meta["exchange"]
            for name, make in _values(plan, patches, nodes, cell.stage.index, turn.run, made):
                if name in self.wanted:
                    if exchange.kind == "sum":
                        node = self._part(cell, turn, plan, patches[make], exchange.name, made)
                    else:
                        node = self.rows.call(make[0], make[1], name)
                    clone = self.rows.call(torch.ops.aten.clone.default, (node,), f"{name}_kept")
                    self.carries[name] = clone

    def _part(
        self, cell: Cell, turn: Turn, plan: RowPlan, patch: Patch, name: str, made: dict[str, fx.Node]
    ) -> fx.Node:
        """A patch's part of a sum."""
        graph = sum_graph(plan, patch, name, self.piped.line.early)
        values = {}
        for node in graph.find_nodes(op="placeholder"):
            if node.meta["kind"] == "read":
                state, whole = plan.states[node.name], made[node.name]
                args = () if not isinstance(state, Rows) else (whole, state.dim, patch.stretches(state))
                values[node.name] = self.rows.call(row_ops.cut_rows, args, f"{node.name}_cut") if args else whole
        writer = self._writer(cell, turn, graph, values)
        return writer.add(graph, cell)[0]

    # -- the prediction

    def _pieces(self, patch: int) -> list[fx.Node]:
        """Of one patch, or of all rows, by groups and runs: made here, or on their way."""
        columns, last = self.piped.line.num_columns, self.piped.line.stages[-1].column
        found = []
        for group, spans in enumerate(self.piped.groups):
            for turn in range(patch * len(spans), (patch + 1) * len(spans)):
                if self.rank == group * columns + last:
                    found.append(self.values[turn][PREDICTION])
                    continue
                (message,) = (
                    m for m in self.mine
                    if m.src == group * columns + last and m.microbatch == turn and m.kind == PREDICTION
                )  # fmt: skip
                found.append(self.rows.posted[message.edge])
        return found

    def _in_parts(self) -> list[list[fx.Node]]:
        return [self._pieces(patch) for patch in range(self.piped.num_patches)]

    def _dense(self) -> fx.Node:
        pieces = [
            self.rows.call(ops.wait, (node,), "prediction_come") if node.target is ops.recv else node
            for node in self._pieces(0)
        ]
        return pieces[0] if len(pieces) == 1 else self.rows.call(torch.ops.aten.cat.default, (pieces, 0), PREDICTION)


def _parts(piped: Piped) -> Parts:
    """How the prediction for all samples comes in patches."""
    plan = next(iter(piped.plans.values()))
    state, like = plan.state(plan.sized.result), plan.sized.result.meta["val"]
    assert isinstance(state, Rows)
    samples = piped.groups[-1][-1][1]
    sizes = tuple(patch.size(state) for patch in piped.patches(plan))
    return Parts(state.dim, sizes, like.new_empty((samples, *like.shape[1:])))


def _values(
    plan: RowPlan, patches: Sequence[Patch], nodes: Sequence[fx.Node], stage: int, run: int, made: dict[str, fx.Node]
) -> Iterable[tuple[str, Any]]:
    """What patches read of each other in one exchange, by the name it is carried under: how it is made of a whole
    value; of a sum, whose part."""
    exchange: Exchange = nodes[0].meta["exchange"]
    if exchange.kind == "sum":
        yield from ((name_of(exchange, stage, run, patch.index), patch.index) for patch in patches)
        return
    value, state = made[exchange.value.name], exchange.state
    assert state is not None
    if exchange.kind == "gather":
        yield name_of(exchange, stage, run), (torch.ops.aten.alias.default, (value,))
    for patch, node in zip(patches, nodes, strict=True):
        if exchange.kind == "moments":
            rows = made.setdefault(
                f"{exchange.value.name}/{patch.index}",
                value.graph.create_node("call_function", row_ops.cut_rows, (value, state.dim, patch.stretches(state))),
            )
            yield name_of(exchange, stage, run, patch.index), (row_ops.moments, (rows, node.args[1]))
        if exchange.kind == "halo":
            for src, (start, count) in halo_of(node, patch, patches).items():
                first = patches[src].span(state)[0]
                args = (value, state.dim, first + start, count)
                yield name_of(exchange, stage, run, src, patch.index), (row_ops.edge_rows, args)
