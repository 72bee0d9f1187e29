"""One rank's two forms: patches that follow each other through its stages, and the fresh step that comes before them.

displaced   k = put(take(k), k_0); ... h_1 = wait(h of patch 1); k = put(k, k_1); ...     carries k
fresh       k = linear(h); ...                                                            carries clone(k)

With ranks beside this one k has what these make at the same turn put into it, too; a fresh step is one of bands of rows
that exchange all, and tell each other what later steps read of single patches.
"""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpipe.plan import displaced_ops, ops, row_ops
from fxpipe.plan.displaced_ops import USABLE
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import PatchParts, SampleProgram, StepForm
from passes.rows import RowPlan
from passes.rows.layout import Rows
from passes.sampling.cells import Cell, CellWriter
from passes.sampling.exchanges import Exchange
from passes.sampling.latest import Latest, LatestWriter, name_of, told_name
from passes.sampling.messages import exchange_nodes, exchanges_of, halo_of
from passes.sampling.patch_graph import sum_graph
from passes.sampling.patches import Patch
from passes.sampling.piped import DisplacedSent, FreshSent, Piped
from passes.sampling.shared import require_rows
from passes.sampling.staged import PREDICTION, PatchTurn
from passes.sampling.staged_rank import StagedWriter

BEGUN = "begun"
"""Under which every rank carries something, so that all know alike whether there was a step before."""


def piped_programs(
    piped: Piped, ranks: Collection[int]
) -> tuple[tuple[SampleProgram, ...], dict[str, tuple[Message, ...]]]:
    """The programs of these ranks, with the forms fresh and displaced; every form's messages.

    Raises:
        CompileError: the prediction is not made row by row.
    """
    require_rows(piped.plan(0, 0))
    places = sorted({rank % piped.beside for rank in ranks})
    displaced_sent, fresh_sent = DisplacedSent(piped, places), FreshSent(piped, places)
    programs = []
    for rank in sorted(ranks):
        displaced = _Displaced(piped, rank, displaced_sent)
        form = displaced.write()
        fresh = _Fresh(piped, rank, fresh_sent, displaced.taken)
        forms = {"fresh": fresh.write(), "displaced": form}
        state = {**fresh.state, **displaced.state}
        programs.append(SampleProgram(rank, forms, tuple(fresh.given), state))
    return tuple(programs), {"displaced": tuple(displaced_sent.all), "fresh": tuple(fresh_sent.all)}


class _Displaced(StagedWriter):
    """The displaced form of one rank: it takes of the step before what it reads of patches behind its own."""

    def __init__(self, piped: Piped, rank: int, sent: DisplacedSent) -> None:
        super().__init__(piped, rank, sent, takes_carried=True)
        self.piped, self.taken, self.latest = piped, list[str](), Latest(self._take)
        self.shared: list[dict[str, fx.Node]] = [{} for _ in piped.groups[self.group]]
        self._take(BEGUN)

    def _take(self, name: str) -> fx.Node:
        self.taken.append(name)
        assert self.carried is not None
        return self.call(ops.take, (self.carried, name), f"carried_{name}")

    def add(self, cell: Cell, turn: PatchTurn) -> CellWriter:
        writer = super().add(cell, turn)
        if turn.patch.owns:
            self.shared[turn.run] |= {name: node for name, node in writer.made().items() if name in self.piped.shared}
        self.show(cell)
        return writer

    def writer(self, cell: Cell, turn: PatchTurn, graph: fx.Graph, values: dict[str, fx.Node]) -> CellWriter:
        piped, plan = self.piped, self.piped.plan(self.group, turn.run)
        given = plan, piped.patches(plan), turn.patch
        rest = self.of_rank(turn, ChainMap(values, self.shared[turn.run]))
        if turn.patch.is_whole:
            return CellWriter(*given, [], *rest)
        first = piped.patch_turns(self.group, self.place)[turn.run]
        exchanges_of([piped.graph(self.group, cell.stage, first), graph])  # the same in the same order
        told = [(message, message) for message in piped.told(self.group, cell.stage, turn.run, self.place)]
        within = self.sent.within.get((self.group, cell), [])
        how: dict[str, Any] = {"latest": self.latest, "stage": cell.stage.index, "run": turn.run, "norms": piped.norms}
        how |= {"turns": piped.grid.turns, "wires": [both for both in within if self.rank in both[1].channel]}
        return LatestWriter(*given, told, *rest, **how)

    def form(self) -> StepForm:
        """With the prediction in parts, as they come."""
        places, turns = range(self.piped.beside), range(self.piped.grid.turns)
        parts = [self.come(place, turn) for place in places for turn in turns]
        if self.latest.corrected:
            args = self._take(USABLE), self.latest.corrected
            self.latest[USABLE] = self.call(displaced_ops.counted, args, USABLE)
        carries = {name: self.latest[name] for name in self.taken if name != BEGUN} | {BEGUN: self.begun}
        self.graph.output((parts, carries))
        return StepForm(self.graph, tuple(self.taken), tuple(carries), _parts(self.piped))


class _Fresh(StagedWriter):
    """The fresh form of one rank, which carries what is `wanted` of it."""

    def __init__(self, piped: Piped, rank: int, sent: FreshSent, wanted: Iterable[str]) -> None:
        super().__init__(piped, rank, sent)
        self.piped, self.left, self.wanted, self.carries = piped, sent.left, set(wanted), dict[str, fx.Node]()

    def add(self, cell: Cell, turn: PatchTurn) -> CellWriter:
        writer = super().add(cell, turn)
        if len(self.piped.bounds) > 2:  # several patches
            self._keep(cell, turn, writer)
        self.show(cell)
        return writer

    def form(self) -> StepForm:
        """With the prediction whole."""
        piped, plan = self.piped, self.piped.plan(0, 0)
        state = plan.rows(plan.sized.result)
        bands = [self.joined(self.pieces(place), 0) for place in range(piped.beside)]
        if state.plain is not None or len(bands) == 1:
            result = self.joined(bands, state.dim)
        else:
            args = bands, state.dim, _parts_of(state, piped.bands(plan))
            result = self.call(row_ops.join_patches, args, PREDICTION)
        self.carries[BEGUN] = self.begun
        if USABLE in self.wanted:
            self.carries[USABLE] = self.call(displaced_ops.uncounted, (result,), USABLE)
        self.graph.output((result, dict(self.carries)))
        return StepForm(self.graph, (), tuple(self.carries))

    # -- what a fresh step leaves to a displaced one

    def _keep(self, cell: Cell, turn: PatchTurn, writer: CellWriter) -> None:
        """Carry what is wanted of this rank's patches and of others', whose ranks tell it."""
        piped, ends, made = self.piped, (cell.stage.index, turn.run), writer.made()
        left = [both for both in self.left.get((self.group, cell), ()) if self.rank in both[1].channel]
        come = {
            told_name(told, *ends): wire.received(self.transport, piped.device, f"recv_{told.value}_of_{told.src}")
            for told, wire in left
            if wire.dst == self.rank
        }
        told = [(told_name(message, *ends), wire) for message, wire in left if wire.src == self.rank]
        found, of_others = dict[str, fx.Node](), {name for name, _ in told}
        graph, first = piped.graph(self.group, cell.stage, turn), piped.patch_turns(self.group, self.place)[turn.run]
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
            wire.sent(self.transport, found[name], f"send_{name}_to_{wire.dst}")
        for name, node in found.items():
            if name in self.wanted:
                self.carries[name] = self.call(torch.ops.aten.clone.default, (node,), f"{name}_kept")
        for name, node in come.items():
            value = self.call(ops.wait, (node,), name)
            if name in self.wanted:
                self.carries[name] = value

    def _rows_alone(self, value: fx.Node, state: Rows | None, count: int) -> fx.Node:
        """A whole value of so many units without the rows around it, which patches leave to who reads it."""
        if state is None or state.pad == (0, 0):
            return value
        args = (value, state.dim, state.pad[0], state.pad[0] + state.size(count))
        return self.call(torch.ops.aten.slice.Tensor, args, f"{value.name}_rows")

    def _own_values(
        self, cell: Cell, turn: PatchTurn, node: fx.Node, value: fx.Node, made: dict[str, fx.Node]
    ) -> Iterable[tuple[str, Callable[[], fx.Node]]]:
        """What this rank's patches tell in one exchange but a gather, by the name it is kept under, and how it is made
        of its band's value."""
        plan, exchange = self.piped.plan(self.group, turn.run), node.meta["exchange"]
        patches, band, state = self.piped.patches(plan), turn.patch, exchange.state
        own = [patch for patch in patches if patch.index // self.piped.grid.turns == self.place]

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
                        yield of_edge, partial(self.call, row_ops.edge_rows, args, of_edge)

    def _moments(self, rows: tuple[Any, ...], num_groups: Any, name: str) -> fx.Node:
        cut = self.call(row_ops.cut_rows, rows, f"{name}_rows")
        return self.call(row_ops.moments, (cut, num_groups), name)

    def _part(
        self, cell: Cell, turn: PatchTurn, plan: RowPlan, patch: Patch, name: str, made: dict[str, fx.Node]
    ) -> fx.Node:
        """A patch's part of a sum."""
        graph = sum_graph(plan, patch, name, self.piped.line.early)
        values = {}
        for node in graph.find_nodes(op="placeholder"):
            if node.meta["kind"] == "read":
                state, value = plan.states[node.name], made[node.name]
                if isinstance(state, Rows):
                    args = (value, state.dim, patch.stretches(state, turn.patch))
                    value = self.call(row_ops.cut_rows, args, f"{node.name}_cut")
                values[node.name] = value
        writer = self.writer(cell, turn, graph, values)
        return writer.add(graph, cell)[0]


def _parts(piped: Piped) -> PatchParts:
    """How the prediction for all samples comes in patches."""
    plan = next(iter(piped.plans.values()))
    state, like = plan.rows(plan.sized.result), plan.sized.result.meta["val"]
    samples, patches = piped.groups[-1][-1][1], piped.patches(plan)
    sizes = tuple(patch.size(state) for patch in patches)
    joined = () if state.plain is not None else _parts_of(state, patches)
    return PatchParts(state.dim, sizes, like.new_empty((samples, *like.shape[1:])), joined)


def _parts_of(state: Rows, patches: Sequence[Patch]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of what patches, in order, have of a value, how its parts are made."""
    return tuple(
        (part.outer if part.kind == "rows" else 0, tuple(patch.of_part(part) for patch in patches))
        for part in state.parts
    )
