"""One rank's two forms: patches that follow each other through its stages, and the fresh step that comes before them.

displaced   k = put(take(k), k_0); ... h_1 = wait(h of patch 1); k = put(k, k_1); ...     carries k
fresh       k = linear(h); ...                                                            carries clone(k)

With ranks beside this one k has what these make at the same turn put into it, too; a fresh step is one of bands of rows
that exchange all, and tell each other what later steps read of single patches.
"""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
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
from passes.sampling.latest import Latest, LatestWriter, name_of, told_name
from passes.sampling.messages import exchange_nodes, exchanges_of, halo_of
from passes.sampling.patch_graph import sum_graph
from passes.sampling.patches import Patch
from passes.sampling.piped import Piped, Sent, Turn, returned_names
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
    sent = {form: Sent(piped, form, min(rank % piped.beside for rank in ranks)) for form in FORMS}
    programs = []
    for rank in sorted(ranks):
        written = _Written(piped, rank, sent["displaced"], ())
        fresh = _Written(piped, rank, sent["fresh"], written.taken)
        forms = {"fresh": fresh.form, "displaced": written.form}
        state = {**fresh.rows.state, **written.rows.state}
        programs.append(SampleProgram(rank, forms, tuple(fresh.rows.given), state))
    return tuple(programs), {form: tuple(of_form.all) for form, of_form in sent.items()}


class _Written:
    """One form of one rank. `wanted`: what a fresh form is to carry."""

    def __init__(self, piped: Piped, rank: int, sent: Sent, wanted: Iterable[str]) -> None:
        self.piped, self.rank, self.sent, self.is_fresh, self.wanted = piped, rank, sent, sent.is_fresh, set(wanted)
        self.group, column, self.place = group, *_ = piped.place(rank)
        self.turns = piped.turns(group, self.place, "fresh" if self.is_fresh else "displaced")
        self.mine = [message for message in sent.all if rank in message.channel]
        plan, graphs = piped.plan(group, 0), piped.graphs(group, column, self.place)
        between = [message for message in self.mine if not self._is_beside(message)]
        self.rows = RankGraph(plan, graphs, rank, between, piped.device, takes_carried=not self.is_fresh)
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
        if piped.beside > 1:
            writer.settle(graph)
        if isinstance(writer, LatestWriter):
            returned = tuple(map(writer.apart, returned))
        made = writer.made()
        if turn.patch.owns:
            self.shared[turn.run] |= {name: node for name, node in made.items() if name in piped.shared}
        named = dict(zip(returned_names(piped, cell, turn), returned, strict=False))
        values |= named
        self.rows.send(cell, named)
        if self.is_fresh and piped.num_patches > 1:
            self._keep(cell, turn, made, writer, graph)
        self._show(cell, named)

    def _writer(self, cell: Cell, turn: Turn, graph: fx.Graph, values: dict[str, fx.Node]) -> CellWriter:
        piped, spans = self.piped, self.piped.groups[self.group]
        plan, whole = piped.plan(self.group, turn.run), len(spans) == 1 and len(piped.groups) == 1
        known = ChainMap(values, self.shared[turn.run])
        operand = self.rows.operand(turn.run, None if whole else spans[turn.run], piped.batched)
        rest = piped.device, self.rows.transport, operand, known, self.early[turn.run]
        within = self.sent.within.get((self.group, cell), [])
        if self.is_fresh:
            return CellWriter(plan, piped.bands(plan), turn.patch, within, *rest)
        patches = piped.patches(plan)
        if turn.patch.is_whole:
            return CellWriter(plan, patches, turn.patch, [], *rest)
        first = piped.turns(self.group, self.place, "displaced")[turn.run]
        exchanges_of([piped.graph(self.group, cell.stage, first), graph])  # the same in the same order
        told = [(message, message) for message in piped.told(self.group, cell.stage, turn.run, self.place)]
        how: dict[str, Any] = {"latest": self.latest, "stage": cell.stage.index, "run": turn.run, "norms": piped.norms}
        how |= {"turns": piped.num_turns, "wires": [both for both in within if self.rank in both[1].channel]}
        return LatestWriter(plan, patches, turn.patch, told, *rest, **how)

    # -- what a fresh step leaves to a displaced one

    def _keep(self, cell: Cell, turn: Turn, made: dict[str, fx.Node], writer: CellWriter, graph: fx.Graph) -> None:
        """Carry what is wanted of this rank's patches and of others', whose ranks tell it."""
        piped, ends = self.piped, (cell.stage.index, turn.run)
        left = [both for both in self.sent.left.get((self.group, cell), ()) if self.rank in both[1].channel]
        come = {
            told_name(told, *ends): wire.received(self.rows.transport, piped.device, f"recv_{told.value}_of_{told.src}")
            for told, wire in left
            if wire.dst == self.rank
        }
        told = [(told_name(message, *ends), wire) for message, wire in left if wire.src == self.rank]
        found, of_others = dict[str, fx.Node](), {name for name, _ in told}
        first = piped.turns(self.group, self.place, "displaced")[turn.run]
        for node in exchange_nodes(piped.graph(self.group, cell.stage, first)):
            exchange: Exchange = node.meta["exchange"]
            if piped.beside > 1:
                value, whole = writer.exchanged(graph, exchange.key)
            else:
                value = whole = self._rows_alone(made[exchange.value.name], exchange.state, turn.patch.count)
            if exchange.kind == "gather" and (name := name_of(exchange.key, *ends)) in self.wanted:
                found[name] = whole
            for name, make in self._own_values(cell, turn, node, value, made):
                if name in self.wanted or name in of_others:
                    found[name] = make()
        for name, wire in told:
            wire.sent(self.rows.transport, found[name], f"send_{name}_to_{wire.dst}")
        for name, node in found.items():
            if name in self.wanted:
                self.carries[name] = self.rows.call(torch.ops.aten.clone.default, (node,), f"{name}_kept")
        for name, node in come.items():
            value = self.rows.call(ops.wait, (node,), name)
            if name in self.wanted:
                self.carries[name] = value

    def _rows_alone(self, value: fx.Node, state: Rows | None, count: int) -> fx.Node:
        """A whole value of so many units without the rows around it, which patches leave to who reads it."""
        if state is None or state.pad == (0, 0):
            return value
        args = (value, state.dim, state.pad[0], state.pad[0] + state.size(count))
        return self.rows.call(torch.ops.aten.slice.Tensor, args, f"{value.name}_rows")

    def _own_values(
        self, cell: Cell, turn: Turn, node: fx.Node, value: fx.Node, made: dict[str, fx.Node]
    ) -> Iterable[tuple[str, Callable[[], fx.Node]]]:
        """What this rank's patches tell in one exchange but a gather, by the name it is kept under, and how it is made
        of its band's value."""
        plan, exchange = self.piped.plan(self.group, turn.run), node.meta["exchange"]
        patches, band, state = self.piped.patches(plan), turn.patch, exchange.state
        own = [patch for patch in patches if patch.index // self.piped.num_turns == self.place]

        def name(src: int, dst: int | None = None) -> str:
            return name_of(exchange.key, cell.stage.index, turn.run, src, dst)

        if exchange.kind == "sum":
            for patch in own:
                yield name(patch.index), partial(self._part, cell, turn, plan, patch, exchange.name, made)
        elif exchange.kind == "moments":
            for patch in own:
                rows = value, state.dim, patch.stretches(state, band)
                yield name(patch.index), partial(self._moments, rows, node.args[1], name(patch.index))
        elif exchange.kind == "halo":
            for dst in patches:
                told = halo_of(node, dst, patches)
                for patch in own:
                    if (read := told.get(patch.index)) is not None:
                        first = patch.span(state)[0] - band.span(state)[0] + read[0]
                        args = value, state.dim, first, read[1]
                        of_edge = name(patch.index, dst.index)
                        yield of_edge, partial(self.rows.call, row_ops.edge_rows, args, of_edge)

    def _moments(self, rows: tuple[Any, ...], num_groups: Any, name: str) -> fx.Node:
        cut = self.rows.call(row_ops.cut_rows, rows, f"{name}_rows")
        return self.rows.call(row_ops.moments, (cut, num_groups), name)

    def _part(
        self, cell: Cell, turn: Turn, plan: RowPlan, patch: Patch, name: str, made: dict[str, fx.Node]
    ) -> fx.Node:
        """A patch's part of a sum."""
        graph = sum_graph(plan, patch, name, self.piped.line.early)
        values = {}
        for node in graph.find_nodes(op="placeholder"):
            if node.meta["kind"] == "read":
                state, value = plan.states[node.name], made[node.name]
                if isinstance(state, Rows):
                    args = (value, state.dim, patch.stretches(state, turn.patch))
                    value = self.rows.call(row_ops.cut_rows, args, f"{node.name}_cut")
                values[node.name] = value
        writer = self._writer(cell, turn, graph, values)
        return writer.add(graph, cell)[0]

    # -- the prediction

    def _is_beside(self, message: Message) -> bool:
        """Whether it goes between ranks of one column."""
        return message.src // self.piped.beside == message.dst // self.piped.beside

    def _show(self, cell: Cell, made: Mapping[str, fx.Node]) -> None:
        """Tell the ranks beside this one what is predicted, and post theirs, after what they swap in the cell."""
        beside = [m for m in self.mine if self._is_beside(m) and (m.microbatch, m.value) == (cell.turn, PREDICTION)]
        for message in beside if PREDICTION in made else ():
            if message.dst == self.rank:
                name = f"recv_prediction_from_{message.src}"
                self.rows.posted[message.edge] = message.received(self.rows.transport, self.piped.device, name)
        for message in beside if PREDICTION in made else ():
            if message.src == self.rank:
                message.sent(self.rows.transport, made[PREDICTION], f"send_prediction_to_{message.dst}")

    def _pieces(self, place: int, turn: int) -> list[fx.Node]:
        """Of a place's patch, or of its band, by groups and runs: made here, or on their way."""
        last, found = self.piped.line.stages[-1].column, []
        for group, spans in enumerate(self.piped.groups):
            src = self.piped.rank(group, last, place)
            for now in range(turn * len(spans), (turn + 1) * len(spans)):
                if self.rank == src:
                    found.append(self.values[now][PREDICTION])
                    continue
                (message,) = (
                    m for m in self.mine
                    if (m.src, m.microbatch, m.kind) == (src, now, PREDICTION)
                )  # fmt: skip
                found.append(self.rows.posted[message.edge])
        return found

    def _in_parts(self) -> list[list[fx.Node]]:
        places, turns = range(self.piped.beside), range(self.piped.num_turns)
        return [self._pieces(place, turn) for place in places for turn in turns]

    def _dense(self) -> fx.Node:
        plan = next(iter(self.piped.plans.values()))
        state, bands = plan.rows(plan.sized.result), list[fx.Node]()
        for place in range(self.piped.beside):
            pieces = [
                self.rows.call(ops.wait, (node,), "prediction_come") if node.target is ops.recv else node
                for node in self._pieces(place, 0)
            ]
            bands.append(self._joined(pieces, 0))
        if state.plain is not None or len(bands) == 1:
            return self._joined(bands, state.dim)
        args = bands, state.dim, _parts_of(state, self.piped.bands(plan))
        return self.rows.call(row_ops.join_patches, args, PREDICTION)

    def _joined(self, pieces: list[fx.Node], dim: int) -> fx.Node:
        return pieces[0] if len(pieces) == 1 else self.rows.call(torch.ops.aten.cat.default, (pieces, dim), PREDICTION)


def _parts(piped: Piped) -> Parts:
    """How the prediction for all samples comes in patches."""
    plan = next(iter(piped.plans.values()))
    state, like = plan.rows(plan.sized.result), plan.sized.result.meta["val"]
    samples, patches = piped.groups[-1][-1][1], piped.patches(plan)
    sizes = tuple(patch.size(state) for patch in patches)
    joined = () if state.plain is not None else _parts_of(state, patches)
    return Parts(state.dim, sizes, like.new_empty((samples, *like.shape[1:])), joined)


def _parts_of(state: Rows, patches: Sequence[Patch]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of what patches, in order, have of a value, how its parts are made."""
    return tuple(
        (part.outer if part.kind == "rows" else 0, tuple(patch.of_part(part) for patch in patches))
        for part in state.parts
    )
