"""Saved activations: the memory that autograd keeps from forward to backward, in bytes as functions of the batch.

    y = conv(x, w)     keeps x and w                    x: made outside, not counted
    z = silu(y)        keeps y                    ->    y: made by conv, 4*s*64*64 bytes, kept by silu
    t = z.view(-1)     keeps nothing                    z: made by silu, kept by mm, which reads it as t
    u = mm(t, v)       keeps t and v

Memory is counted by storage: a view keeps what it shows. Parameters, buffers, model inputs and draws are nobody's
activations. A frozen operation keeps nothing, but others may keep what it made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.costs.calls import Gradient, call_of, operand_nodes, tensors_in
from passes.costs.kept import kept_by


@dataclass(frozen=True, slots=True)
class Activation:
    """Memory that the node `maker` makes; `keepers` are the nodes whose backward reads it."""

    maker: str
    num_bytes: sympy.Expr
    keepers: frozenset[str]


@dataclass(frozen=True)
class SavedActivations:
    """All memory that some backward reads; `shown` gives every node whose value lies in it the position in `kept`."""

    kept: tuple[Activation, ...]
    shown: Mapping[str, int]


def saved_activations(capture: Capture, device: torch.device | str = "cpu") -> SavedActivations:
    """What autograd keeps when the captured graph runs on `device`, whose kernels may keep more than another's.

    Bytes are expressions of the batch symbol; numbers where the graph holds for one batch size only.
    """
    base = max(2, capture.inputs.batch_size) if capture.batch else capture.inputs.batch_size
    ledger = _Ledger(base, torch.device(device), _differentiated(capture.loss))
    for node in capture.graph.nodes:
        ledger.follow(node)
    return ledger.result()


def _differentiated(loss: fx.Node) -> set[fx.Node]:
    """The nodes that a gradient of the loss flows through."""
    found: set[fx.Node] = set()
    pending = [loss]
    while pending:
        node = pending.pop()
        if node not in found and node.meta["requires_grad"]:
            found.add(node)
            pending += node.all_input_nodes
    return found


class _Ledger:
    """All memory up to a node, by number: who made it, its bytes, and who keeps it."""

    def __init__(self, batch_size: int, device: torch.device, differentiated: set[fx.Node]) -> None:
        self._batch_size, self._device, self._differentiated = batch_size, device, differentiated
        self._makers: list[fx.Node] = []
        self._bytes: list[sympy.Expr] = []
        self._keepers: list[set[str]] = []
        self._places: dict[fx.Node, list[int]] = {}  # the memory of every tensor in a node's value

    def follow(self, node: fx.Node) -> None:
        """Note the memory of one more node."""
        num_tensors = len(tensors_in(node.meta.get("val")))
        if node.op == "placeholder":
            self._places[node] = [self._new(node, sympy.S.Zero) for _ in range(num_tensors)]
        elif node.op == "call_function" and num_tensors:
            if isinstance(node.target, torch._ops.OpOverload):
                self._call(node)
            else:
                source, index = node.args  # operator.getitem
                assert isinstance(source, fx.Node), node.format_node()
                before = len(tensors_in(source.meta["val"][:index]))
                self._places[node] = self._places[source][before : before + num_tensors]

    def _call(self, node: fx.Node) -> None:
        wanted = {n for n in node.all_input_nodes if node in self._differentiated and n.meta["requires_grad"]}
        gradients: dict[fx.Node, Gradient] = {n: "input" if n in wanted else "none" for n in node.all_input_nodes}
        found = kept_by(call_of(node, gradients), node.meta.get("autocast"), self._batch_size, self._device)
        place = {i: self._places[argument][item] for i, (argument, item) in enumerate(operand_nodes(node))}
        place |= {-1 - i: self._new(node, num_bytes) for i, num_bytes in enumerate(found.made_bytes)}
        self._places[node] = [place[memory] for memory in found.results]
        for memory in found.kept:
            self._keepers[place[memory]].add(node.name)

    def _new(self, maker: fx.Node, num_bytes: sympy.Expr) -> int:
        self._makers.append(maker)
        self._bytes.append(num_bytes)
        self._keepers.append(set())
        return len(self._makers) - 1

    def result(self) -> SavedActivations:
        """What is kept of what operations made."""
        kept = [i for i, keepers in enumerate(self._keepers) if keepers and self._makers[i].op == "call_function"]
        number = {memory: position for position, memory in enumerate(kept)}
        activations = [Activation(self._makers[i].name, self._bytes[i], frozenset(self._keepers[i])) for i in kept]
        first = {node.name: places[0] for node, places in self._places.items() if len(places) == 1}
        return SavedActivations(tuple(activations), {n: number[m] for n, m in first.items() if m in number})
