"""What the nodes of a rank program do to memory, from its liveness: what plans say is held against it.

    wait h_mb0        transfers +h                       held for good: parameters, buffers, optimizer states
    stage_1_forward   activations +saved +returned       held for the step: whole-batch inputs
    stage_1_backward  gradients +new, saved ones let go  held while in use: all the rest

Counted are tensors by storage. What kernels and the allocator need beside is not: a device needs some more.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Gathering, RankProgram, Reduction
from fxpipe.simulate.op_lists import Bytes
from passes.step_ops.closing import scattered_bytes
from tests.graph_memory import ARGUMENT, NEW, SAVED, CallMemory, Storage, call_memory


class Meter:
    """What the op at hand takes and lets go, and the most that there was meanwhile beside what was held before."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Another op."""
        self._taken: dict[str, int] = {}
        self._freed: dict[str, int] = {}
        self._sent: list[tuple[str, int, tuple[int, ...]]] = []
        self._level = self._kept = self._most = self._most_kept = 0

    def take(self, category: str, num_bytes: int) -> None:
        self._taken[category] = self._taken.get(category, 0) + num_bytes
        self._level += num_bytes
        self.see(0)

    def free(self, category: str, num_bytes: int, edges: tuple[int, ...]) -> None:
        if edges:
            self._sent.append((category, num_bytes, edges))
            self._kept += num_bytes
        else:
            self._freed[category] = self._freed.get(category, 0) + num_bytes
        self._level -= num_bytes

    def see(self, temporary: int) -> None:
        """Note `temporary` bytes beside what is held."""
        self._most = max(self._most, self._level + temporary)
        self._most_kept = max(self._most_kept, self._level + self._kept + temporary)

    def end(self) -> Bytes | None:
        """What the op did."""
        if not (self._taken or self._freed or self._sent or self._most_kept):
            return None
        parts = tuple(self._taken.items()), tuple(self._freed.items()), tuple(self._sent)
        return Bytes(*parts, self._most, self._most_kept)


class Buffer:
    """Memory that is held as long as anything refers to it: Python's own reference counts do the bookkeeping.

    `edges` are of the messages it was given to, which hold it until they have arrived.
    """

    __slots__ = ("_category", "_meter", "edges", "num_bytes")

    def __init__(self, meter: Meter, category: str, num_bytes: int) -> None:
        self._meter, self._category, self.num_bytes = meter, category, num_bytes
        self.edges: tuple[int, ...] = ()
        meter.take(category, num_bytes)

    def __del__(self) -> None:
        self._meter.free(self._category, self.num_bytes, self.edges)


def program_bytes(
    program: RankProgram, calls: Mapping[str, CallMemory], whole_bytes: Mapping[str | int, int]
) -> list[Bytes | None]:
    """What every node of one rank's program does to memory.

    Args:
        calls: of every graph the program calls, by name.
        whole_bytes: of every whole-batch input by name, and of every draw by index.
    """
    return list(_Walk(program, calls, whole_bytes, Meter()).run())


def held_bytes(program: RankProgram, optimizer_bytes: int) -> dict[str, int]:
    """What a rank holds all step long; `optimizer_bytes` per element of a parameter that has a gradient."""
    trained = sum(program.state[name].numel() for name in program.gradients)
    held = program.state.keys() - {*program.gathered}
    return {"state": sum(program.state[name].nbytes for name in held), "optimizer": trained * optimizer_bytes}


def graphs_memory(programs: Sequence[RankProgram]) -> dict[str, CallMemory]:
    """The memory of every graph that some rank calls."""
    return {name: call_memory(graph) for name, graph in {k: g for p in programs for k, g in p.modules.items()}.items()}


class _Walk:
    """The values of a program, as buffers, at one point of it."""

    def __init__(
        self, program: RankProgram, calls: Mapping[str, CallMemory], whole_bytes: Mapping[str | int, int], meter: Meter
    ) -> None:
        self._program, self._calls, self._whole_bytes, self._meter = program, calls, whole_bytes, meter
        self._values: dict[fx.Node, Any] = {}
        self._kept: list[Buffer] = []  # the caller keeps inputs to the end of the step
        self._handlers: dict[Any, Callable[[fx.Node], Any]] = {
            ops.draw: self._drawn,
            ops.slice_batch: self._slice,
            ops.cat_batch: lambda node: Buffer(self._meter, "carried", node.meta["val"].nbytes),
            ops.take: lambda node: self._values[node.all_input_nodes[0]].pop(node.args[1]),
            ops.constant: self._filled,
            ops.recv: self._filled,
            ops.wait: lambda node: self._values[node.all_input_nodes[0]],
            ops.accumulate: self._total,
            ops.all_reduce: lambda node: self._flat(node, "gradients"),
            ops.reduce_scatter: self._scattering,
            ops.broadcast: lambda node: self._flat(node, "transfers"),
            ops.wait_reduced: self._reduced,
            ops.wait_values: lambda node: None,
            ops.gather: self._gathering,
            ops.wait_gathered: lambda node: self._values[node.all_input_nodes[0]][0],
            ops.add_weighted: partial(self._like, "activations"),
            ops.add_numbers: self._numbers,
            ops.number: self._numbers,
            torch.ops.aten.add.Tensor: partial(self._like, "gradients"),
            operator.getitem: lambda node: self._values[node.all_input_nodes[0]][node.args[1]],
        }

    def run(self) -> Iterator[Bytes | None]:
        """Node by node; what is still held then is what the caller gets."""
        last_use: dict[fx.Node, fx.Node] = {}
        for node in self._program.graph.nodes:
            last_use |= dict.fromkeys((node, *node.all_input_nodes), node)
        dies: dict[fx.Node, list[fx.Node]] = {}
        for value, user in last_use.items():
            dies.setdefault(user, []).append(value)
        for node in self._program.graph.nodes:
            self._meter.begin()
            if node.op != "output":
                self._values[node] = self._run(node)
                for value in dies.get(node, ()):
                    del self._values[value]
            yield self._meter.end()

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._given(node)
        if node.op == "call_module":
            return self._call(node)
        if node.target is ops.begin:
            return None
        if node.target is ops.send:
            value: Buffer | None = self._values[node.args[1]]  # type: ignore[index]
            if value is not None:
                value.edges = (*value.edges, int(node.args[3]))  # type: ignore[arg-type]
            return None
        return self._handlers[node.target](node)

    def _call(self, node: fx.Node) -> Any:
        """Follow a stage graph's segments, then own what it returns."""
        call, meter = self._calls[str(node.target)], self._meter
        values = [self._values[argument] for argument in node.args]  # type: ignore[index]
        saved = values[0] if "_backward" in str(node.target) else []
        inputs = list(saved)
        for segment in call.segments:
            meter.see(segment.peak_bytes)
            if segment.releases is not None:
                saved[segment.releases] = inputs[segment.releases] = None
        part = str(node.target)
        made: dict[int, Buffer] = {}
        results = []
        for position, storages in enumerate(call.outputs):
            is_gradient = "_backward" in part and position == len(call.outputs) - 1 and "_backward_input" not in part
            category = "gradients" if is_gradient else "activations"
            results.append([self._own(storage, category, values, inputs, made) for storage in storages])
        return tuple(results)

    def _own(
        self, storage: Storage, category: str, arguments: list[Any], saved: list[Any], made: dict[int, Buffer]
    ) -> Buffer | None:
        if storage.owner == NEW:
            if storage.index not in made:
                made[storage.index] = Buffer(self._meter, category, storage.num_bytes)
            return made[storage.index]
        return {ARGUMENT: arguments, SAVED: saved}[storage.owner][storage.index] if storage.owner != "state" else None

    def _given(self, node: fx.Node) -> Buffer | dict[Any, Buffer] | None:
        """A whole-batch input of this batch or the next, or all that the step before has made; nothing for the rest."""
        name = str(node.target)
        if name in self._program.inputs:
            return self._whole(name)
        if name.startswith("next_") and name.removeprefix("next_") in self._program.next_inputs:
            return self._whole(name.removeprefix("next_"))
        takes = [user for user in node.users if user.target is ops.take]
        return {user.args[1]: Buffer(self._meter, "carried", user.meta["val"].nbytes) for user in takes} or None

    def _whole(self, key: str | int) -> Buffer:
        buffer = Buffer(self._meter, "inputs", self._whole_bytes[key])
        self._kept.append(buffer)
        return buffer

    def _drawn(self, node: fx.Node) -> Buffer:
        """A dropout's mask is drawn from as many ones; other draws need less than is counted here."""
        buffer = Buffer(self._meter, "inputs", self._whole_bytes[node.args[1]])  # type: ignore[index]
        self._meter.see(buffer.num_bytes)
        return buffer

    def _slice(self, node: fx.Node) -> Buffer:
        """A narrow range of dimension 0 is a view; any other is copied to be contiguous."""
        arguments: Any = node.args
        whole, dim, outer, _, start, stop, batch_size = arguments
        buffer: Buffer = self._values[whole]
        if dim == 0 and outer == 1:
            return buffer
        return Buffer(self._meter, "inputs", buffer.num_bytes * (stop - start) // batch_size)

    def _filled(self, node: fx.Node) -> Buffer:
        """A tensor of the shape and type among the arguments: a receive's buffer, or a constant."""
        arguments: Any = node.args
        shape, dtype = arguments[3:5] if node.target is ops.recv else arguments[1:3]
        category = "transfers" if node.target is ops.recv else "activations"
        return Buffer(self._meter, category, dtype.itemsize * torch.Size(shape).numel())

    def _numbers(self, node: fx.Node) -> Buffer:
        return Buffer(self._meter, "activations", node.meta["val"].nbytes)

    def _like(self, category: str, node: fx.Node) -> Buffer:
        return Buffer(self._meter, category, self._values[node.all_input_nodes[-1]].num_bytes)

    def _total(self, node: fx.Node) -> Any:
        """Weight gradients are added up in place."""
        total, new = map(self._listed, node.args)
        return total or new

    def _listed(self, given: Any) -> Any:
        """The buffers of a list, or of the nodes in one."""
        return self._values[given] if isinstance(given, fx.Node) else [self._values[item] for item in given]

    def _flat(self, node: fx.Node, category: str) -> list[Buffer]:
        """Gradients are copied into one tensor to be summed, and the sums are parts of it; so are parameters."""
        reduction: Reduction = node.meta["reduction"]
        return [Buffer(self._meter, category, reduction.num_bytes)] * len(reduction.parameters)

    def _scattering(self, node: fx.Node) -> "_Scattering":
        """What others sum is copied into one tensor, and what they send comes into another; sums are where this rank's
        own gradients were."""
        reduction: Reduction = node.meta["reduction"]
        gradients = self._listed(node.args[1])
        own = [g for g, owner in zip(gradients, reduction.owners, strict=True) if owner == self._program.rank]
        num_bytes = scattered_bytes(reduction.num_bytes, sum(g.num_bytes for g in own), len(reduction.ranks))
        return _Scattering(own, Buffer(self._meter, "transfers", num_bytes))

    def _gathering(self, node: fx.Node) -> tuple[list[Buffer], Buffer]:
        """What others send stays as long as it is read, the copy of one's own until it is there."""
        gathering: Gathering = node.meta["gathering"]
        others = sum(self._program.state[name].nbytes for name in gathering.others(self._program.rank))
        weights = Buffer(self._meter, "gathered weights", others)
        return [weights], Buffer(self._meter, "transfers", gathering.num_bytes - others)

    def _reduced(self, node: fx.Node) -> list[Buffer]:
        found: list[Buffer] | _Scattering = self._values[node.all_input_nodes[0]]
        return found.sums if isinstance(found, _Scattering) else found


class _Scattering(NamedTuple):
    """A sum that is under way: this rank's part of it, and what goes over wires."""

    sums: list[Buffer]
    moved: Buffer
