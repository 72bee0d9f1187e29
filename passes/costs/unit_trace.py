"""The kernels of a unit's forward and backward by the storages they touch, put together from its operations' own.

    blocks [4, 8)    forward    conv(x) -> 1   silu(1) -> 2 ...               1: kept by silu's backward
                     backward   silu_backward(g, 1) -> 3   conv_backward(3, x) -> 4, 5 ...

As `passes.lowering` traces and cuts a stage, without tracing it: gradients of a value read twice are added, what leaves
a unit lies in a row, weight gradients have memory of their own, runs that are recomputed come before the first kernel
of the backward that needs them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import fx

from fxpipe.capture.reach import reached
from fxpipe.capture.sizes import concrete
from passes.costs.call_trace import CallTrace, Kernel, Line, MadeGradient
from passes.costs.operations import Operations, Place

Owner = Literal["new", "argument", "state"]


@dataclass
class UnitTrace:
    """Kernels of a unit. `lines` are the bytes of every storage, `argument` names those that come in: values by name,
    incoming gradients as "grad of" their value.

    `returned` and `input_gradients` are storages by value, `weight_gradients` storages; those in `again` are made in
    the backward as they were in the forward.
    """

    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    owner: list[Owner] = field(default_factory=list)
    argument: dict[int, str] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    input_gradients: dict[str, int] = field(default_factory=dict)
    weight_gradients: list[int] = field(default_factory=list)
    again: set[int] = field(default_factory=set)

    def new(self, line: Line, owner: Owner = "new") -> int:
        self.lines.append(line)
        self.owner.append(owner)
        return len(self.lines) - 1


class Tracer:
    """The kernels of these nodes, in the order of the graph.

    Args:
        returns: values that others read, and the loss.
        runs: nodes that the backward computes again, by name.
        local: nodes that no block owns.
    """

    def __init__(
        self,
        operations: Operations,
        nodes: Sequence[fx.Node],
        returns: Sequence[str],
        runs: Sequence[Collection[str]],
        local: Collection[str],
    ) -> None:
        self._local = set(local)
        self._operations, self._nodes, self._returns = operations, nodes, returns
        self._facts = operations.facts
        self._own = set(nodes)
        self._run_of = {name: number for number, run in enumerate(runs) for name in run}
        self.unit = UnitTrace()
        self._places: dict[fx.Node, list[int]] = {}  # the storage of every tensor of a node
        self._traces: dict[fx.Node, CallTrace] = {}
        self._storages: dict[fx.Node, list[int]] = {}  # by the numbers of a call's own trace
        self._origins: list[str] = []  # of every kernel of the forward
        self._runs: list[int | None] = []  # of every kernel of the backward
        self._gradients: dict[Place, MadeGradient] = {}

    def trace(self) -> UnitTrace:
        for node in self._nodes:
            self._forward(node)
        self._return()
        for node in reversed(self._nodes):
            self._backward(node)
        self._finish()
        if self._run_of or self._casts:
            self._recompute()
        return self.unit

    def _of(self, node: fx.Node) -> list[int]:
        """The storages of a node's tensors; those that come in are made known here."""
        if node not in self._places:
            facts, new = self._facts(node), self.unit.new
            found = [new((0, 0), "state") if facts.is_state else new(line, "argument") for line in facts.lines]
            if not facts.is_state:
                self.unit.argument |= dict.fromkeys(found, node.name)
            self._places[node] = found
        return self._places[node]

    def _forward(self, node: fx.Node) -> None:
        facts = self._facts(node)
        if not facts.lines:
            return
        if facts.item is not None:
            source, first = facts.item
            self._places[node] = self._of(source)[first : first + len(facts.lines)]
            return
        trace = self._traces[node] = self._operations.trace(node, self._arrived(node))
        number = [self._of(argument)[item] for argument, item in facts.operands]
        number += [self.unit.new(line) for line in trace.made]
        self._storages[node] = number
        self._places[node] = [number[i] for i in trace.outputs]
        self.unit.forward += [_numbered(kernel, number) for kernel in trace.forward]
        self._origins += [node.name] * len(trace.forward)

    def _arrived(self, node: fx.Node) -> frozenset[int]:
        """The operands that other units have made."""
        operands = enumerate(self._facts(node).operands)
        return frozenset([i for i, (n, _) in operands if n.op == "call_function" and n not in self._own])

    def _return(self) -> None:
        """What leaves lies in a row; where others read it, its gradient comes in."""
        capture, unit = self._operations.capture, self.unit
        for name in self._returns:
            node = capture.nodes[name]
            storage = self._of(node)[0]
            if not _in_a_row(node.meta["val"], self._operations.num_samples):
                copy = unit.new(self._facts(node).lines[0])
                unit.forward.append(Kernel((storage,), (copy,)))
                self._origins.append("")
                storage = copy
            unit.returned[name] = storage
            if self._facts(node).requires_grad:
                tangent = unit.new((0, 0), "argument")
                unit.argument[tangent] = f"grad of {name}"
                self._gradients[self._key(node, 0)] = MadeGradient(tangent, False, True)

    def _key(self, node: fx.Node, item: int) -> Place:
        """A tensor by the node of this unit that makes it."""
        while node in self._own and (shown := self._facts(node).item) is not None:
            node, item = shown[0], shown[1] + item
        return node, item

    def _backward(self, node: fx.Node) -> None:
        facts = self._facts(node)
        if node not in self._storages or not facts.requires_grad:
            return
        trace, number = self._traces[node], list(self._storages[node])
        incoming = [self._gradients.pop((node, i), None) for i in range(len(trace.outputs))]
        if not trace.gradients or all(gradient is None for gradient in incoming):
            return
        for i, tangent in enumerate(trace.tangents):
            if tangent is not None:
                known = incoming[i]
                number[tangent] = self._zeros(trace, tangent) if known is None else known.storage
        for kernel in trace.backward:
            self._emit(_numbered(kernel, number), self._run_of.get(node.name))
        for operand, made in trace.gradients.items():
            argument, item = facts.operands[operand]
            if self._facts(argument).requires_grad:
                found = MadeGradient(number[made.storage], made.view, made.contiguous)
                self._accumulate(self._key(argument, item), found)

    def _zeros(self, trace: CallTrace, tangent: int) -> int:
        storage = self.unit.new(trace.made[tangent - trace.num_operands])
        self._emit(Kernel((), (storage,)))
        return storage

    def _accumulate(self, key: Place, made: MadeGradient) -> None:
        known = self._gradients.get(key)
        if known is not None:
            total = self.unit.new(self._facts(key[0]).lines[key[1]])
            self._emit(Kernel((known.storage, made.storage), (total,)))
            made = MadeGradient(total, False, True)
        self._gradients[key] = made

    def _emit(self, kernel: Kernel, run: int | None = None) -> None:
        self.unit.backward.append(kernel)
        self._runs.append(run)

    def _finish(self) -> None:
        """What is returned of the backward: gradients of values in a row, of weights in memory of their own."""
        unit, seen = self.unit, set[int]()
        ends = list(self._gradients.items())
        for (node, item), made in ends:
            if node in self._own or self._facts(node).is_state:
                continue
            storage = made.storage if made.contiguous else self._copied(made.storage, node, item)
            unit.input_gradients[node.name] = storage
            seen.add(storage)
        for (node, item), made in ends:
            if node in self._own or not self._facts(node).is_state:
                continue
            alone = made.contiguous and not made.view and made.storage not in seen
            storage = made.storage if alone else self._copied(made.storage, node, item)
            unit.weight_gradients.append(storage)
            seen.add(storage)

    def _copied(self, storage: int, node: fx.Node, item: int) -> int:
        copy = self.unit.new(self._facts(node).lines[item])
        self._emit(Kernel((storage,), (copy,)))
        return copy

    # -- what is computed again

    @cached_property
    def _casts(self) -> set[int]:
        """What the forward makes by casting weights: made again rather than kept."""
        found: set[int] = set()
        for kernel in self.unit.forward:
            if kernel.casts and all(self.unit.owner[s] == "state" or s in found for s in kernel.reads):
                found.update(kernel.makes)
        return found

    def _recompute(self) -> None:
        """Put what runs compute again right before the first kernel that needs it.

        The backward of a run takes what comes into the run and computes the rest again; that of a block outside takes
        what it reads. What no block owns goes with those who read it.
        """
        maker = {s: place for place, kernel in enumerate(self.unit.forward) for s in kernel.makes}
        saved, wanted = self._saved(maker)

        def makers(storages: Iterable[int]) -> list[int]:
            return [maker[s] for s in storages if s in maker and s not in saved]

        needed = set(reached(makers(wanted), lambda place: makers(self.unit.forward[place].reads)))
        copies = {s: self.unit.new(self.unit.lines[s]) for place in needed for s in self.unit.forward[place].makes}
        self.unit.again.update(copies.values())
        done: set[int] = set()
        kernels: list[Kernel] = []
        for kernel in self.unit.backward:
            first = self._before(kernel, maker, needed, saved, done)
            kernels += [_renamed(self.unit.forward[place], copies) for place in sorted(first)]
            kernels.append(_renamed(kernel, copies))
        self.unit.backward = kernels

    def _saved(self, maker: Mapping[int, int]) -> tuple[set[int], list[int]]:
        """What the forward saves, and what is wanted again: by the backwards of runs, and casts of weights."""
        own = {name for node in self._nodes if (name := node.name) in self._run_of or name not in self._local}
        saved, of_runs, again = set[int](), [], list[int]()
        for kernel, run in zip(self.unit.backward, self._runs, strict=True):
            values = [s for s in kernel.reads if s in maker or s in self.unit.argument]
            again += [s for s in values if s in self._casts]
            if run is None:
                saved.update(s for s in values if s not in self._casts)
            else:
                of_runs += [(s, run) for s in values]
        wanted, seen = [*again, *(s for s, _ in of_runs)], set[tuple[int, int]]()
        while of_runs:
            storage, run = of_runs.pop()
            if storage in saved or storage in self._casts or (storage, run) in seen:
                continue
            seen.add((storage, run))
            origin = self._origins[maker[storage]] if storage in maker else None
            if origin is None or (self._run_of.get(origin) != run and origin in own):
                saved.add(storage)
            else:
                reads = self.unit.forward[maker[storage]].reads
                of_runs += [(s, run) for s in reads if s in maker or s in self.unit.argument]
        return saved, wanted

    def _before(
        self, kernel: Kernel, maker: Mapping[int, int], needed: set[int], saved: set[int], done: set[int]
    ) -> list[int]:
        """The forward's kernels that have to run again before one of the backward."""
        found, pending = [], [s for s in kernel.reads if s in maker and s not in saved]
        while pending:
            place = maker[pending.pop()]
            if place in needed and place not in done:
                done.add(place)
                found.append(place)
                pending += [s for s in self.unit.forward[place].reads if s in maker and s not in saved]
        return found


def _numbered(kernel: Kernel, number: Sequence[int]) -> Kernel:
    return Kernel(tuple([number[i] for i in kernel.reads]), tuple([number[i] for i in kernel.makes]), kernel.casts)


def _renamed(kernel: Kernel, copies: Mapping[int, int]) -> Kernel:
    return Kernel(tuple([copies.get(s, s) for s in kernel.reads]), tuple([copies.get(s, s) for s in kernel.makes]))


def _in_a_row(value: torch.Tensor, num_samples: int) -> bool:
    """Whether a tensor of so many samples is contiguous."""
    sizes, strides = concrete(tuple(value.shape), num_samples), concrete(tuple(value.stride()), num_samples)
    return torch.empty_strided(sizes, strides, device="meta").is_contiguous()
