"""What patches that follow each other know of each other: of those before them this step, of the others the last.

patch 0    k = put(k, k_0, ...)      attention(q_0, k, v)      k: patch 0 of this step, 1 and 2 of the step before
patch 1    k_1 = put(k, k_1, ...)    attention(q_1, k, v)      k: patches 0 and 1 of this step, 2 of the step before
patch 2    ...                                                 k: all of this step

Keys and values, whatever is gathered, are written in place; borders, moments and parts of sums are kept one by one.
(Wang et al., "PipeFusion" (2024), section 4.1; moments as Li et al., "DistriFusion" (CVPR 2024), eq. 2.)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.capture.reach import reached
from fxpipe.plan import displaced_ops, ops, row_ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.row_ops import Stretch
from passes.operations import operation_name
from passes.rows.layout import Rows
from passes.sampling.cells import Cell, CellWriter
from passes.sampling.displaced import corrected
from passes.sampling.exchanges import Exchange
from passes.sampling.patches import Patch

_VIEWS = ("reshape", "contiguous", "to", "getitem", "cut_rows", "edge_rows", "put", "type_as", "flatten", "unflatten")


class Latest(dict[str, fx.Node]):
    """By name, the node of every value that patches read of each other; at first what the step before has carried.

    `corrected`: of the step's corrected moments, where these are.
    """

    def __init__(self, take: Callable[[str], fx.Node] | None) -> None:
        super().__init__()
        self._take = take
        self.corrected = list[fx.Node]()

    def __missing__(self, name: str) -> fx.Node:
        assert self._take is not None, name
        self[name] = self._take(name)
        return self[name]


def name_of(key: tuple[str, str], stage: int, run: int, src: int | None = None, dst: int | None = None) -> str:
    """Under which a value of an exchange is kept: of all patches, of one, or of one for another."""
    ends = "" if src is None else f"_of_{src}" + ("" if dst is None else f"_for_{dst}")
    return f"{'_'.join(key)}_{stage}_{run}{ends}"


def told_name(told: Message, stage: int, run: int) -> str:
    """Under which is kept what one patch tells others, or one other."""
    return name_of((told.value, told.kind), stage, run, told.src, told.dst if told.kind == "halo" else None)


class LatestWriter(CellWriter):
    """Writes a cell whose patch follows others, one of so many `turns`; what these tell is in `latest`. Patches beside
    it, which other ranks have in the same cell, tell theirs by `wires`: messages between patches, each with that
    between ranks."""

    def __init__(
        self, *args: Any, latest: Latest, stage: int, run: int, norms: str, turns: int,
        wires: Sequence[tuple[Message, Message]],
    ) -> None:  # fmt: skip
        super().__init__(*args)
        self.latest, self.stage, self.run, self.norms, self.turns = latest, stage, run, norms, turns
        self.sent = {told.edge: wire for told, wire in wires if told.src == self.patch.index}
        self.come: dict[tuple[str, str], list[tuple[Message, Message]]] = {}
        for told, wire in wires:
            if told.src != self.patch.index:
                self.come.setdefault((told.value, told.kind), []).append((told, wire))

    def add(self, graph: fx.Graph, cell: Cell) -> tuple[fx.Node, ...]:
        return tuple(map(self.apart, super().add(graph, cell)))

    def settle(self, graph: fx.Graph) -> None:
        """Wait for what patches beside this one tell."""
        if len(self.patches) > self.turns:
            super().settle(graph)

    def others_own(self) -> bool:
        return self.patch.owns

    def copied(self, node: fx.Node) -> fx.Node:
        """An operation; of an input one's own rows are all that is waited for."""
        if node.target is row_ops.cut_rows and node.args[0].meta.get("kind") == "input":  # type: ignore[union-attr]
            source: Any = node.args[0]
            state = self.plan.state(self.plan.sized.nodes[source.name])
            if isinstance(state, Rows) and state.plain is not None:
                sizes = [patch.size(state) for patch in self.patches]
                args = (self._read(source), self.patch.index, state.dim, sizes, node.args[2])
                return self.call(displaced_ops.own_rows, args, node.name, None, node)
        return super().copied(node)

    def swap(self, exchange: Exchange, value_for: Callable[[int], fx.Node]) -> Callable[[], dict[int, fx.Node]]:
        """Keep what later patches read, and give what is known of them."""
        mine, kept = self.patch.index, dict[fx.Node, fx.Node]()
        for_one = exchange.kind == "halo"
        posted = self._posted(exchange)
        self._remember(exchange, mine)
        for message in self.messages.get(exchange.key, ()):
            if message.src == mine:
                value = value_for(message.dst)
                if value not in kept:
                    kept[value] = self.owned(value)
                self.latest[self._name(exchange, mine, message.dst if for_one else None)] = kept[value]
                self._send(message, kept[value])
        read = [m.src for m in self.messages.get(exchange.key, ()) if m.dst == mine]

        def finish() -> dict[int, fx.Node]:
            for told, node in posted:
                self._remember(exchange, told.src)
                self.latest[told_name(told, self.stage, self.run)] = self._waited(told, node)
            return {src: self.latest[self._name(exchange, src, mine if for_one else None)] for src in read}

        return finish

    def _posted(self, exchange: Exchange) -> list[tuple[Message, fx.Node]]:
        """What comes of patches beside this one."""
        return [
            (told, wire.received(self.transport, self.device, f"recv_{told.value}_from_{wire.src}"))
            for told, wire in self.come.get(exchange.key, ())
        ]

    def _send(self, message: Message, value: fx.Node) -> None:
        if (wire := self.sent.get(message.edge)) is not None:
            wire.sent(self.transport, value, f"send_{message.value}_to_{wire.dst}")

    def _waited(self, told: Message, posted: fx.Node) -> fx.Node:
        return self.call(ops.wait, (posted,), f"{told.value}_of_{told.src}")

    def _remember(self, exchange: Exchange, src: int) -> None:
        """The moments of a patch, before it tells others."""
        if exchange.kind == "moments" and self.norms == "corrected" and self.turns > 1:
            self.latest[f"{self._name(exchange, src)}_before"] = self.latest[self._name(exchange, src)]

    def _name(self, exchange: Exchange, src: int | None = None, dst: int | None = None) -> str:
        return name_of(exchange.key, self.stage, self.run, src, dst)

    def gathered(self, node: fx.Node, value: fx.Node) -> Callable[[], fx.Node]:
        exchange: Exchange = node.meta["exchange"]
        posted, name = self._posted(exchange), self._name(exchange)
        if any(message.edge in self.sent for message in self.messages.get(exchange.key, ())):
            own = self._rows_of(value, exchange)
            for message in self.messages[exchange.key]:
                self._send(message, own)
        self._put(node, exchange, self.patch, value)

        def finish() -> fx.Node:
            for told, come in posted:
                patch = replace(self.patches[told.src], owns=False)
                self._put(node, exchange, patch, self._waited(told, come))
            return self.latest[name]

        return finish

    def _put(self, node: fx.Node, exchange: Exchange, patch: Patch, value: fx.Node) -> None:
        """What is gathered has a patch's entries of now."""
        name, state = self._name(exchange), exchange.rows
        stretches: list[Stretch] = [one for one in patch.stretches(state) if one[-1]]
        args = (self.latest[name], value, state.dim, stretches)
        self.latest[name] = self.call(displaced_ops.put, args, node.name, None, node)

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        """Patches so far have moved since the step before; the others are taken to have moved as they."""
        exchange: Exchange = node.meta["exchange"]
        name = self._name(exchange)
        if self.norms == "separate":
            return own
        if self.norms != "corrected" or self.turns == 1:
            return super().merged(node, own, received)
        turn = self.patch.index % self.turns
        fresh = [patch.index for patch in self.patches if patch.index % self.turns <= turn]
        old = [self.latest[f"{name}_of_{patch}_before"] for patch in fresh]
        args = (self.ordered(own, received), old, fresh, self.counts(node))
        moments, usable = corrected(self, args, node)
        self.latest.corrected.append(usable)
        return moments

    def apart(self, value: fx.Node) -> fx.Node:
        """A value that leaves the cell, in memory that no later patch writes."""
        for node in reached([value], lambda node: node.all_input_nodes if shares(node) else []):
            if node.target is displaced_ops.put:
                return self.call(torch.ops.aten.clone.default, (value,), f"{value.name}_kept", None, value)
        return value

    def owned(self, value: fx.Node) -> fx.Node:
        """A value in memory of its own, where it may share some that is written later, or is large."""
        return self.call(torch.ops.aten.clone.default, (value,), f"{value.name}_kept") if shares(value) else value


def shares(node: fx.Node) -> bool:
    """Whether a value may be a view of another."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target.is_view) or operation_name(target) in _VIEWS
    return node.op != "call_function" or getattr(target, "__name__", "") in _VIEWS
