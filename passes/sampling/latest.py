"""What patches that follow each other know of each other: of those before them this step, of the others the last.

patch 0    k = put(k, k_0, ...)      attention(q_0, k, v)      k: patch 0 of this step, 1 and 2 of the step before
patch 1    k_1 = put(k, k_1, ...)    attention(q_1, k, v)      k: patches 0 and 1 of this step, 2 of the step before
patch 2    ...                                                 k: all of this step

Keys and values, whatever is gathered, are written in place; borders, moments and parts of sums are kept one by one.
(Wang et al., "PipeFusion" (2024), section 4.1; moments as Li et al., "DistriFusion" (CVPR 2024), eq. 2.)
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpipe.capture.reach import reached
from fxpipe.plan import displaced_ops, row_ops
from fxpipe.plan.row_ops import Stretch
from passes.operations import operation_name
from passes.rows.layout import Rows
from passes.sampling.cells import CellWriter
from passes.sampling.displaced import Norms
from passes.sampling.exchanges import Exchange

_VIEWS = ("reshape", "contiguous", "to", "getitem", "cut_rows", "edge_rows", "put", "type_as", "flatten", "unflatten")


class Latest:
    """By name, the node of every value that patches read of each other; at first what the step before has carried."""

    def __init__(self, take: Callable[[str], fx.Node] | None) -> None:
        self._take = take
        self.nodes: dict[str, fx.Node] = {}

    def __getitem__(self, name: str) -> fx.Node:
        if name not in self.nodes:
            assert self._take is not None, name
            self.nodes[name] = self._take(name)
        return self.nodes[name]

    def __setitem__(self, name: str, node: fx.Node) -> None:
        self.nodes[name] = node


def name_of(exchange: Exchange, stage: int, run: int, src: int | None = None, dst: int | None = None) -> str:
    """Under which a value is kept: of all patches, of one, or of one for another."""
    ends = "" if src is None else f"_of_{src}" + ("" if dst is None else f"_for_{dst}")
    return f"{exchange.name}_{exchange.kind}_{stage}_{run}{ends}"


class LatestWriter(CellWriter):
    """Writes a cell whose patch follows others; what these tell is in `latest`."""

    def __init__(self, *args: Any, latest: Latest, stage: int, run: int, norms: Norms) -> None:
        super().__init__(*args)
        self.latest, self.stage, self.run, self.norms = latest, stage, run, norms

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
        if exchange.kind == "moments" and self.norms == "corrected":
            self.latest[f"{self._name(exchange, mine)}_before"] = self.latest[self._name(exchange, mine)]
        for message in self.messages.get(exchange.key, ()):
            if message.src == mine:
                value = value_for(message.dst)
                if value not in kept:
                    kept[value] = self.owned(value)
                self.latest[self._name(exchange, mine, message.dst if for_one else None)] = kept[value]
        read = [m.src for m in self.messages.get(exchange.key, ()) if m.dst == mine]
        return lambda: {src: self.latest[self._name(exchange, src, mine if for_one else None)] for src in read}

    def _name(self, exchange: Exchange, src: int | None = None, dst: int | None = None) -> str:
        return name_of(exchange, self.stage, self.run, src, dst)

    def gathered(self, node: fx.Node, value: fx.Node) -> Callable[[], fx.Node]:
        exchange: Exchange = node.meta["exchange"]
        assert exchange.state is not None
        stretches: list[Stretch] = [one for one in self.patch.stretches(exchange.state) if one[-1]]
        args = (self.latest[self._name(exchange)], value, exchange.state.dim, stretches)
        self.latest[self._name(exchange)] = put = self.call(displaced_ops.put, args, node.name, None, node)
        return lambda: put

    def merged(self, node: fx.Node, own: fx.Node, received: dict[int, fx.Node]) -> fx.Node:
        """Patches so far have moved since the step before; the others are taken to have moved as they."""
        exchange: Exchange = node.meta["exchange"]
        name, mine = self._name(exchange), self.patch.index
        if self.norms == "separate":
            return own
        if self.norms != "corrected" or len(self.patches) == 1:
            return super().merged(node, own, received)
        old = [self.latest[f"{name}_of_{patch}_before"] for patch in range(mine + 1)]
        args = (self.ordered(own, received), old, list(range(mine + 1)), self.counts(node))
        both = self.call(displaced_ops.corrected_moments, args, f"{node.name}_corrected")
        return self.call(operator.getitem, (both, 0), node.name, None, node)

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
