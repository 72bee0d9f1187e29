"""Saved activations: the memory that autograd keeps from forward to backward, in bytes as functions of the batch.

    y = conv(x, w)     keeps x and w                    x: made outside, not counted
    z = silu(y)        keeps y                    ->    y: made by conv, 4*s*64*64 bytes, kept by silu
    t = z.view(-1)     keeps nothing                    z: made by silu, kept by mm, which reads it as t
    u = mm(t, v)       keeps t and v

Memory is counted by storage: a view keeps what it shows. Parameters, buffers, model inputs and draws are nobody's
activations, and neither are casts of them. A frozen operation keeps nothing, but others may keep what it made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fxpipe.capture import Capture, private
from fxpipe.capture.reach import reached
from fxpipe.capture.sizes import expression
from passes.costs.call_trace import Line
from passes.costs.operations import Operations


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
    ledger = _Ledger(Operations(capture, torch.device(device)), _differentiated(capture.result))
    for node in capture.graph.nodes:
        ledger.follow(node)
    return ledger.result()


def _differentiated(loss: fx.Node) -> set[fx.Node]:
    """The nodes that a gradient of the loss flows through."""
    starts = [loss] if loss.meta["requires_grad"] else []
    return set(reached(starts, lambda node: [n for n in node.all_input_nodes if n.meta["requires_grad"]]))


class _Ledger:
    """All memory up to a node, by number: who made it, its bytes, and who keeps it."""

    def __init__(self, operations: Operations, differentiated: set[fx.Node]) -> None:
        self._operations, self._differentiated = operations, differentiated
        self._makers: list[fx.Node] = []
        self._lines: list[Line] = []
        self._keepers: list[set[str]] = []
        self._places: dict[fx.Node, list[int]] = {}  # the memory of every tensor in a node's value
        self._weights: set[int] = set()  # weights and casts of them, which the backward makes again

    def follow(self, node: fx.Node) -> None:
        """Note the memory of one more node."""
        facts = self._operations.facts(node)
        if facts.item is not None:
            source, first = facts.item
            self._places[node] = self._places[source][first : first + len(facts.lines)]
        elif node.op == "placeholder" or (
            facts.lines and not facts.requires_grad and not private.may_alias(node.target)
        ):
            self._places[node] = [self._new(node, line) for line in facts.lines]
            self._weights.update(self._places[node] if facts.is_state else ())
        elif facts.lines:
            trace = self._operations.trace(node, frozenset())
            place = [self._places[argument][item] for argument, item in facts.operands]
            place += [self._new(node, line) for line in trace.made]
            self._places[node] = [place[memory] for memory in trace.outputs]
            for kernel in trace.forward:
                if kernel.casts and all(place[read] in self._weights for read in kernel.reads):
                    self._weights.update(place[made] for made in kernel.makes)
            for memory in trace.kept if node in self._differentiated else ():
                if place[memory] not in self._weights:
                    self._keepers[place[memory]].add(node.name)

    def _new(self, maker: fx.Node, line: Line) -> int:
        self._makers.append(maker)
        self._lines.append(line)
        self._keepers.append(set())
        return len(self._makers) - 1

    def result(self) -> SavedActivations:
        """What is kept of what operations made."""
        kept = [i for i, keepers in enumerate(self._keepers) if keepers and self._makers[i].op == "call_function"]
        number = {memory: position for position, memory in enumerate(kept)}
        activations = [Activation(self._makers[i].name, self._size(i), frozenset(self._keepers[i])) for i in kept]
        first = {node.name: places[0] for node, places in self._places.items() if len(places) == 1}
        return SavedActivations(tuple(activations), {n: number[m] for n, m in first.items() if m in number})

    def _size(self, memory: int) -> sympy.Expr:
        constant, each = self._lines[memory]
        (samples,) = self._operations.capture.batch or (sympy.S.Zero,)
        if constant < 0:  # it grows faster than a line: a product of samples
            maker = self._makers[memory]
            if memory in (places := self._places[maker]):
                return formula(private.tensors_in(maker.meta["val"])[places.index(memory)])
            count = self._operations.num_samples  # of something inside: through its bytes of these and of twice as many
            square = sympy.Rational(-constant, 2 * count**2)
            return sympy.expand(samples * (square * (samples - 3 * count) + each))
        return sympy.Add(constant, sympy.Mul(each, samples))


def formula(value: torch.Tensor) -> sympy.Expr:
    """Bytes of a tensor as an expression of the batch."""
    return sympy.Mul(value.dtype.itemsize, *(expression(size) for size in value.shape))
