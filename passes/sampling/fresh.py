"""The fresh form of a step: every exchange is of this step, sent when it is made and waited for where it is first read.

                          recv_k_from_1 = recv(1, ...); k = linear(...); ...
k_whole = gather(k)       send(k, to 1)      v = linear(...); ...; send(v, to 1)
                          k_from_1 = wait(recv_k_from_1); k_whole = cat([k, k_from_1], 2)
                          attention(q, k_whole, v_whole)

A rank posts what comes before it sends: on gloo the word that it may come would queue behind what is sent, and of two
ranks that swap the second to come here would have the link to itself, then the first. It posts as soon as what came
before has been read, since bytes move when both ends are there: the rank that is late then finds them. Cells of stages,
which exchange between them, post where they send.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from fxpipe.plan import ops, row_ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import SampleProgram, StepForm
from passes.rows import RowPlan
from passes.rows.layout import shape_of
from passes.sampling import exchanges
from passes.sampling.exchanges import Exchange
from passes.sampling.messages import halo_of, messages_of
from passes.sampling.patches import Patch, all_own, first_owns

CONSTANTS = "_constants."  # under which a program has the tensors that the trace made part of the graph


def fresh_programs(
    plan: RowPlan, patches: Sequence[Patch], graphs: Mapping[int, fx.Graph], device: torch.device
) -> tuple[tuple[SampleProgram, ...], tuple[Message, ...]]:
    """The programs of the patches that have graphs, on the rank of their number; all messages in the order of every
    channel."""
    messages = messages_of(patches, graphs.values())
    programs = []
    for index, graph in graphs.items():
        mine = [message for message in messages if index in message.channel]
        writer = FormWriter(plan, patches, patches[index], mine, device)
        forms = {"fresh": writer.write(graph)}
        programs.append(SampleProgram(index, forms, writer.inputs, writer.state))
    return tuple(programs), tuple(messages)


class FormWriter:
    """One rank's graph as it grows, of the fresh form; other forms `swap` and `merged` otherwise, and carry values.

    `_env` has a node for every node of the patch graph, or what will write one.
    """

    takes_carried = False

    def __init__(
        self, plan: RowPlan, patches: Sequence[Patch], patch: Patch, messages: Sequence[Message], device: torch.device
    ) -> None:
        self.plan, self.patches, self.patch, self.device = plan, patches, patch, device
        self.graph = fx.Graph()
        self.transport = self.graph.placeholder("transport")
        self.messages: dict[tuple[str, str], list[Message]] = {}
        for message in messages:
            self.messages.setdefault((message.value, message.kind), []).append(message)
        self._env: dict[fx.Node, fx.Node | Callable[[], fx.Node]] = {}
        self.inputs: tuple[str, ...] = ()
        self.state: dict[str, torch.Tensor] = {}
        self.taken: list[str] = []
        self.carries: dict[str, fx.Node] = {}

    def write(self, graph: fx.Graph) -> StepForm:
        self._placeholders(graph)
        self.call(ops.begin, (self.transport, "predict"), "begin_predict")
        self._output(self.body(graph))
        _post_early(self.graph)
        self.graph.lint()
        return StepForm(self.graph, tuple(self.taken), tuple(self.carries))

    def body(self, graph: fx.Graph) -> Any:
        """Everything between placeholders and output; what the output has."""
        for node in graph.nodes:
            if "exchange" in node.meta:
                self._env[node] = self._exchange(node)
            elif node.op == "call_function":
                self._env[node] = self.copied(node)
        (output,) = graph.find_nodes(op="output")
        return fx.map_arg(output.args[0], self._read)

    def copied(self, node: fx.Node) -> fx.Node:
        """An operation of the patch's own."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._read)
        return self.call(node.target, args, node.name, kwargs, node)

    def placed(self, message: Message) -> Message:
        """A message between patches as one between ranks."""
        return message

    def others_own(self) -> bool:
        """Whether those that are told of this patch's rows have what belongs to no row."""
        return all_own(self.patches)

    def finish(self) -> None:
        """What is written last."""

    def _output(self, prediction: fx.Node) -> None:
        self.finish()
        self.graph.output((prediction, dict(self.carries)) if self.carries else prediction)

    def _placeholders(self, graph: fx.Graph) -> None:
        """Inputs first, then what is carried, then the state where the graph reads it, by its original name."""
        placeholders = [node for node in graph.find_nodes(op="placeholder") if node.users]
        for node in placeholders:
            if node.meta["kind"] == "input":
                self._env[node] = self.graph.placeholder(node.name)
                self.inputs += (node.name,)
        if self.takes_carried:
            self._carried = self.graph.placeholder("carried")
        for node in placeholders:
            if node.meta["kind"] != "input":
                name = self.plan.sized.capture.tensors.get(node.name, CONSTANTS + node.name)
                self._env[node] = self.graph.create_node("get_attr", name, name=node.name)
                self.state[name] = node.meta["val"]

    def take(self, name: str) -> fx.Node:
        """What the step before has carried under this name."""
        self.taken.append(name)
        return self.call(ops.take, (self._carried, name), f"carried_{name}")

    def _read(self, node: fx.Node) -> fx.Node:
        found = self._env[node]
        if not isinstance(found, fx.Node):
            found = self._env[node] = found()
        return found

    def call(self, target: Any, args: Any, name: str, kwargs: Any = None, like: fx.Node | None = None) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        if like is not None:
            new.meta = {key: like.meta[key] for key in ("val", "path") if key in like.meta}
        return new

    # -- exchanges: what is sent now, and what is written when the result is first read

    def _exchange(self, node: fx.Node) -> Callable[[], fx.Node]:
        exchange: Exchange = node.meta["exchange"]
        value = self._read(node.args[0])  # type: ignore[arg-type]
        if exchange.kind == "halo":
            return self._halo(node, value)
        if exchange.kind == "moments":
            own = self.call(row_ops.moments, (value, node.args[1]), f"{exchange.name}_own")
            received = self.swap(exchange, lambda dst: own)
            return lambda: self.merged(node, own, received())
        if exchange.kind == "sum":
            received = self.swap(exchange, lambda dst: value)
            return lambda: self.call(row_ops.add_up, (self.ordered(value, received()),), node.name, None, node)
        if exchange.kind == "ring":
            received = self.swap(exchange, lambda dst: value)
            return lambda: next(iter(received().values()))
        if exchange.kind == "ulysses":
            return (self._to_heads if node.target is exchanges.to_heads else self._to_rows)(node, value)
        return self.gathered(node, value)

    def _to_heads(self, node: fx.Node, value: fx.Node) -> Callable[[], fx.Node]:
        """Every patch's rows of one's heads."""
        _, dim, bounds = cast(tuple[Any, int, Sequence[int]], node.args)
        exchange: Exchange = node.meta["exchange"]
        own = self._rows_of(value, exchange)

        def heads(of: fx.Node, patch: int, name: str) -> fx.Node:
            args = of, dim, bounds[patch], bounds[patch + 1] - bounds[patch]
            return self.call(torch.ops.aten.narrow.default, args, f"{exchange.name}_{name}")

        received = self.swap(exchange, lambda dst: heads(own, dst, f"heads_of_{dst}"))

        def finish() -> fx.Node:
            mine = heads(value, self.patch.index, "own_heads")
            rows = mine if own is value else heads(own, self.patch.index, "own_rows")
            return self._whole(node, mine, rows, received())

        return finish

    def _to_rows(self, node: fx.Node, value: fx.Node) -> Callable[[], fx.Node]:
        """One's rows of every patch's heads."""
        exchange: Exchange = node.meta["exchange"]

        def rows(patch: Patch) -> fx.Node:
            args = value, exchange.rows.dim, patch.stretches(exchange.rows)
            return self.call(row_ops.cut_rows, args, f"{exchange.name}_for_{patch.index}")

        received = self.swap(exchange, lambda dst: rows(self.patches[dst]))

        def finish() -> fx.Node:
            parts = self.ordered(rows(self.patch), received())
            return self.call(torch.ops.aten.cat.default, (parts, node.args[1]), node.name, None, node)

        return finish

    def gathered(self, node: fx.Node, value: fx.Node) -> Callable[[], fx.Node]:
        exchange: Exchange = node.meta["exchange"]
        is_first = exchange.kind == "prediction" and self.patch.index == 0
        own = value if is_first else self._rows_of(value, exchange)
        received = self.swap(exchange, lambda dst: own)
        return lambda: self._whole(node, value, own, received())

    def swap(self, exchange: Exchange, value_for: Callable[[int], fx.Node]) -> Callable[[], dict[int, fx.Node]]:
        """Post what comes, send to every rank that waits for it; calling the result waits, and gives it by rank."""
        name = "prediction" if exchange.kind == "prediction" else exchange.name
        posted = dict[int, fx.Node]()
        messages = self.messages.get(exchange.key, ())
        for message in messages:
            if message.dst == self.patch.index:
                wire = self.placed(message)
                posted[message.src] = wire.received(self.transport, self.device, f"recv_{name}_from_{wire.src}")
        for message in messages:
            if message.src == self.patch.index:
                wire = self.placed(message)
                wire.sent(self.transport, value_for(message.dst), f"send_{name}_to_{wire.dst}")
        return lambda: {
            src: self.call(ops.wait, (node,), f"{name}_from_{node.meta['message'].src}") for src, node in posted.items()
        }

    def ordered(self, own: fx.Node, received: dict[int, fx.Node]) -> list[fx.Node]:
        return [received.get(patch.index, own) for patch in self.patches]

    def _halo(self, node: fx.Node, value: fx.Node) -> Callable[[], fx.Node]:
        _, dim, above, below, end, fill = cast(tuple[Any, int, int, int, int, float | str], node.args)
        exchange: Exchange = node.meta["exchange"]
        mine, last = self.patch.index, self.patch.index == len(self.patches) - 1

        def edge(dst: int) -> fx.Node:
            start, count = halo_of(node, self.patches[dst], self.patches)[mine]
            return self.call(row_ops.edge_rows, (value, dim, start, count), f"{exchange.name}_for_{dst}")

        received = self.swap(exchange, edge)

        def finish() -> fx.Node:
            come, sizes = received(), halo_of(node, self.patch, self.patches)
            up, down = ([src for src in sorted(come) if (src < mine) == before] for before in (True, False))
            above_it = above - sum(sizes[src][1] for src in up)
            below_it = end if last else below - sum(sizes[src][1] for src in down)
            parts = [come[src] for src in up], [come[src] for src in down]
            return self.call(row_ops.with_halo, (value, *parts, dim, above_it, below_it, fill), node.name, None, node)

        return finish

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        args = (self.ordered(own, received), self.counts(node))
        return self.call(row_ops.merge_moments, args, node.name, None, node)

    def counts(self, node: fx.Node) -> list[int]:
        """Entries of every patch in one group of an exchange of moments."""
        exchange: Exchange = node.meta["exchange"]
        entries = math.prod(shape_of(exchange.value)) // exchange.rows.size(self.patch.count)
        entries //= math.prod(node.meta["val"].shape[1:])
        return [entries * patch.size(exchange.rows) for patch in self.patches]

    def _rows_of(self, value: fx.Node, exchange: Exchange) -> fx.Node:
        """What of a value the others do not have: what belongs to rows, where everyone owns the rest."""
        state = exchange.rows
        if state.all_rows or not self.others_own():
            return value
        at, stretches = 0, []
        for part in state.parts:
            size = part.outer * self.patch.of_part(part)
            if part.kind == "rows":
                stretches.append((at, 1, size, 0, size))
            at += size
        return self.call(row_ops.cut_rows, (value, state.dim, stretches), f"{exchange.name}_rows")

    def _whole(self, node: fx.Node, value: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        exchange: Exchange = node.meta["exchange"]
        state, patches, rows = exchange.rows, self.patches, self.ordered(own, received)
        if state.plain is not None:
            return self.call(torch.ops.aten.cat.default, (rows, state.dim), node.name, None, node)
        if exchange.kind == "prediction" or not all_own(patches):
            patches = first_owns(patches) if exchange.kind == "prediction" else patches
            sizes_of = [(part.outer, [patch.of_part(part) for patch in patches]) for part in state.parts]
            return self.call(row_ops.join_rows, (rows, value, state.dim, sizes_of), node.name, None, node)
        parts, at, stretches = [], 0, []
        for part in state.parts:
            size = self.patch.of_part(part)
            sizes = [patch.of_part(part) for patch in self.patches]
            parts.append((part.outer, sizes) if part.kind == "rows" else (0, [size]))
            if part.kind == "whole":
                stretches.append((at, 1, size, 0, size))
            at += part.outer * size
        other = value
        if stretches:
            other = self.call(row_ops.cut_rows, (value, state.dim, stretches), f"{node.name}_other")
        return self.call(row_ops.join_rows, (rows, other, state.dim, parts), node.name, None, node)


def _post_early(graph: fx.Graph) -> None:
    """Move every receive that is waited for to where the last value that came before it is read, so that buffers are no
    more than there were; those that are carried stay where they are, and all in their order."""
    (after,) = graph.find_nodes(op="call_function", target=ops.begin)
    (output,) = graph.find_nodes(op="output")
    receives = {node for node in graph.find_nodes(op="call_function", target=ops.recv) if output not in node.users}
    waits = {wait for receive in receives for wait in receive.users}
    readers = {reader for wait in waits for made in wait.users for reader in made.users}
    for node in [*graph.nodes]:
        if node in receives:
            after.append(node)
            after = node
        elif node in readers or node.target is ops.recv:
            after = node
