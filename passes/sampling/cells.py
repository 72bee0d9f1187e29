"""Cells: a stage at work on some samples, or on a patch; in which order each column of ranks does its own.

4 samples, a line of 2        column 0: 0F0 0F1 0F2 0F3           sFi = stage s on turn i
                              column 1:     1F0 1F1 1F2 1F3
2 samples, a fold of 2        column 0: 0F0 0F1 2F0 2F1
                              column 1:     1F0 1F1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Message
from passes.rows import RowPlan
from passes.sampling.fresh import FormWriter
from passes.sampling.messages import Placed, exchange_nodes
from passes.sampling.patches import Patch
from passes.sampling.stages import Stage, StageLine


@dataclass(frozen=True)
class Cell:
    """A stage's work at one turn: whatever passes through all stages one after the other."""

    stage: Stage
    turn: int

    def __str__(self) -> str:
        return f"{self.stage.index}F{self.turn}"


def cells(line: StageLine, num_turns: int) -> list[Cell]:
    """All cells as they begin, if messages took no time: of those that could, the first to begin, then the deepest."""
    column_free = [0.0] * line.num_columns
    made = [[0.0] * num_turns, *([float("inf")] * num_turns for _ in line.stages)]
    turns, order = [0] * len(line.stages), list[Cell]()
    while len(order) < num_turns * len(line.stages):
        ready = [
            (max(made[stage.index][turns[stage.index]], column_free[stage.column]), -stage.index)
            for stage in line.stages
            if turns[stage.index] < num_turns
        ]
        start, deepest = min(ready)
        stage = line.stages[-deepest]
        order.append(Cell(stage, turns[stage.index]))
        made[stage.index + 1][turns[stage.index]] = column_free[stage.column] = start + stage.seconds
        turns[stage.index] += 1
    return order


class CellWriter(FormWriter):
    """Writes one cell into the graph of its rank.

    Args:
        swapped: what patches tell each other in the cell.
        given: the node in the rank's graph for every placeholder of the cell's graph but values of other stages, which
            are in `values` by name.
        early: nodes that no patch changes, by name, which the rank's cells share.
    """

    def __init__(
        self, plan: RowPlan, patches: Sequence[Patch], patch: Patch, swapped: Placed,
        device: torch.device, transport: fx.Node, given: Callable[[fx.Node], fx.Node],
        values: Mapping[str, fx.Node], early: dict[str, fx.Node],
    ) -> None:  # fmt: skip
        super().__init__(plan, patches, patch, [told for told, _ in swapped if patch.index in told.channel], device)
        self.graph, self.transport = transport.graph, transport
        self.given, self.values, self.early = given, values, early
        self.wires = {told.edge: wire for told, wire in swapped}

    def add(self, graph: fx.Graph, cell: Cell) -> tuple[fx.Node, ...]:
        """The nodes of what the cell returns."""
        self.call(ops.begin, (self.transport, str(cell)), f"begin_{cell}")
        for node in graph.find_nodes(op="placeholder"):
            if node.users:
                self._env[node] = self.values[node.name] if node.meta["kind"] == "read" else self.given(node)
        returned: tuple[fx.Node, ...] = tuple(self.body(graph))
        self.settle(graph)
        return returned

    def exchanged(self, graph: fx.Graph, key: tuple[str, str]) -> tuple[fx.Node, fx.Node]:
        """What an exchange of the cell's graph is of, and what it gives."""
        (node,) = (node for node in exchange_nodes(graph) if node.meta["exchange"].key == key)
        return self._read(node.all_input_nodes[0]), self._read(node)

    def settle(self, graph: fx.Graph) -> None:
        """Wait for what others tell, though nobody reads it here."""
        for node in exchange_nodes(graph):
            self._read(node)

    def made(self) -> dict[str, fx.Node]:
        """The rank's node for every node of the cell's graph, by name."""
        return {node.name: made for node, made in self._env.items() if isinstance(made, fx.Node)}

    def copied(self, node: fx.Node) -> fx.Node:
        if "early" not in node.meta:
            return super().copied(node)
        if node.name not in self.early:
            self.early[node.name] = super().copied(node)
        return self.early[node.name]

    def placed(self, message: Message) -> Message:
        return self.wires[message.edge]
