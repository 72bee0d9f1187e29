"""One rank's program over its cells: what comes is posted first, for bytes move when both ends are there.

begin predict;  recv h[0];  recv h[1];  h = wait(h[0]);  ... ;  send prediction[0];  h_1 = wait(h[1]);  ...
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Message
from passes.rows import RowPlan
from passes.sampling.cells import Cell
from passes.sampling.fresh import CONSTANTS
from passes.sampling.groups import Span


class RankGraph:
    """The graph as it grows: inputs and the model's tensors by name, once for all cells, and messages between cells."""

    def __init__(
        self, plan: RowPlan, graphs: Sequence[fx.Graph], rank: int, messages: Sequence[Message], device: torch.device,
        takes_carried: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.rank, self.device, self.graph = plan, rank, device, fx.Graph()
        self.messages = messages
        self.transport = self.graph.placeholder("transport")
        used = {node.name for graph in graphs for node in graph.find_nodes(op="placeholder") if node.users}
        self.given = {name: self.graph.placeholder(name) for name in plan.inputs if name in used}
        self.carried = self.graph.placeholder("carried") if takes_carried else None
        self.state: dict[str, torch.Tensor] = {}
        self._state_nodes: dict[str, fx.Node] = {}
        self._slices: dict[tuple[str, int], fx.Node] = {}
        self.call(ops.begin, (self.transport, "predict"), "begin_predict")
        self.posted = {message.edge: self._post(message) for message in messages if message.dst == rank}

    def call(self, target: Any, args: tuple[Any, ...], name: str, like: torch.Tensor | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        if like is not None:
            node.meta["val"] = like
        return node

    def operand(
        self, turn: int, span: Span | None, batched: Mapping[str, torch.Tensor]
    ) -> Callable[[fx.Node], fx.Node]:
        """Where a cell finds its inputs, the samples of `span` alone, and the model's tensors."""

        def find(node: fx.Node) -> fx.Node:
            if node.meta["kind"] != "input":
                return self._tensor(node)
            if span is None or node.name not in batched:
                return self.given[node.name]
            if (node.name, turn) not in self._slices:
                args = (self.given[node.name], 0, 1, 1, *span, 0)
                self._slices[node.name, turn] = self.call(
                    ops.slice_batch, args, f"{node.name}_{turn}", node.meta["val"]
                )
            return self._slices[node.name, turn]

        return find

    def _tensor(self, node: fx.Node) -> fx.Node:
        if node.name not in self._state_nodes:
            name = self.plan.sized.capture.tensors.get(node.name, CONSTANTS + node.name)
            self._state_nodes[node.name] = self.graph.create_node("get_attr", name, name=node.name)
            self.state[name] = node.meta["val"]
        return self._state_nodes[node.name]

    # -- messages between cells

    def read(self, cell: Cell, values: dict[str, fx.Node]) -> None:
        """Wait for what comes to a cell and is not among `values` yet."""
        for message in self.messages:
            to_cell = message.dst == self.rank and message.microbatch == cell.turn and message.kind in ("main", "skip")
            if to_cell and message.value in cell.stage.reads and message.value not in values:
                values[message.value] = self.wait(message)

    def send(self, cell: Cell, made: Mapping[str, fx.Node]) -> None:
        """Send what a cell has `made` to whom it goes."""
        for message in self.messages:
            if message.src == self.rank and message.microbatch == cell.turn and message.value in made:
                message.sent(self.transport, made[message.value], f"send_{message.value}_to_{message.dst}")

    def _post(self, message: Message) -> fx.Node:
        return message.received(self.transport, self.device, f"recv_{message.value}_from_{message.src}")

    def wait(self, message: Message) -> fx.Node:
        like = torch.empty(message.shape, dtype=message.dtype, device="meta")
        return self.call(ops.wait, (self.posted[message.edge],), f"{message.value}_from_{message.src}", like)
