"""Emulation: the real rank programs over a real transport, on devices that sleep instead of computing.

    rank 0: out = stage_0_forward(h)               rank 0: sleep 24 ms; out = zeros like stage_0_forward's
            send(transport, out, 1, 5)      ->             send(transport, out, 1, 5)
    rank 1: h = wait(recv_h)                       rank 1: h = wait(recv_h), no sooner than the link would bring it

Such a run shows whether programs, executor and transport do what the simulator says of them: order, waits, overlap. It
says nothing about planned durations and the model of the links, which are the simulator's own.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxpipe
from benchmarks.emulation.network import EmulatedDevice, EmulatedNetwork, EmulatedTransport
from fxpipe.capture.sizes import concrete
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel, NodeSeconds
from fxpipe.costs.table import CostTable
from fxpipe.errors import CompileError
from fxpipe.plan import ops
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.timeline import Timeline
from fxpipe.plan.transport import Transport
from fxpipe.run.observe import Recording
from fxpipe.run.run_rank import run_rank
from fxpipe.run.transport import run_ranks
from fxpipe.simulate.op_lists import Op

_COMPUTED = (ops.draw, ops.accumulate, torch.ops.aten.add.Tensor)


def emulate(program: fxpipe.Program, model: CostModel, cluster: Cluster) -> Timeline:
    """Run one step, every rank a thread of this process; its events, to hold against those of `program.simulate`.

    Durations should be long against what sleeps and thread switches add, a few tenths of a millisecond per action on an
    idle machine: see `Slower`.

    Raises:
        CompileError: the program is not one for the CPU, where the emulated tensors are.
    """
    step = program.step
    if step.device.type != "cpu":
        raise CompileError(f"emulation has its tensors on the CPU; compile for it, not for {step.device.type}")
    planned = program.costed.priced(model).ops(program.plan, program.schedule, cluster)
    devices = [EmulatedDevice() for _ in step.programs]
    ranks = zip(step.programs, planned.ranks, devices, strict=True)
    modules = [emulated(of_rank, op_list, device) for of_rank, op_list, device in ranks]
    whole, network, recording = _whole_values(program), EmulatedNetwork(cluster), Recording()

    def body(transport: Transport) -> None:
        rank = transport.rank
        transport.all_gather(torch.zeros(1), "all ranks, to begin at once").wait()
        on_network = EmulatedTransport(transport, network, devices[rank])
        run_rank(modules[rank], step.programs[rank], on_network, whole.__getitem__, whole, recording)

    run_ranks(len(step.programs), body)
    return recording.timeline()


def _whole_values(program: fxpipe.Program) -> Any:
    """Zeros for every whole-batch input, by its name in the programs, and for every random draw, by index."""
    capture, found = program.capture, dict[str | int, Tensor]()
    for node in capture.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] in ("input", "draw"):
            key = node.name if node.meta["kind"] == "input" else capture.draws[node.name].index
            value = node.meta["val"]
            found[key] = torch.zeros(concrete(tuple(value.shape), program.step.batch_size), dtype=value.dtype)
    return found


def emulated(program: RankProgram, op_list: Sequence[Op], device: EmulatedDevice) -> fx.GraphModule:
    """The program with a sleep where it first computes in an action, as long as the simulator lets pass on its rank; in
    place of stage graphs, sums of gradients and random draws."""
    graph, root, seconds, action = copy.deepcopy(program.graph), nn.Module(), defaultdict[str, float](float), ""
    for op in op_list:
        action = op.action if op.kind == "begin" else action
        seconds[action] += op.seconds
    action = ""
    results = {name: _results(of_stage) for name, of_stage in program.modules.items()}
    for index, node in enumerate(list(graph.nodes)):
        action = str(node.args[1]) if node.target is ops.begin else action
        if node.op == "call_module" or node.target in _COMPUTED:
            drawn, planned = node.target is ops.draw, seconds.pop(action, 0.0)
            root.add_module(f"sleep_{index}", _Sleep(device, planned, results.get(str(node.target)), drawn))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(f"sleep_{index}", node.args))
            graph.erase_node(node)
    return fx.GraphModule(root, graph, class_name=f"rank_{program.rank}")


def _results(graph: fx.Graph) -> list[list[Any]]:
    """Zeros like what a stage graph returns; as nobody writes into them, one tensor serves for all of a kind."""
    (output,) = graph.find_nodes(op="output")
    parts: Any = output.args[0]
    zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def zeros_like(value: Tensor) -> Tensor:
        key = value.shape, value.dtype
        return zeros[key] if key in zeros else zeros.setdefault(key, torch.zeros(key[0], dtype=key[1]))

    return [[pytree.tree_map(zeros_like, item.meta["val"]) for item in part] for part in parts]


class _Sleep(nn.Module):
    """Takes a while and returns `results`, or where there are none what is `drawn`, or else what it was given first: a
    sum, still zero."""

    def __init__(self, device: EmulatedDevice, seconds: float, results: list[list[Any]] | None, drawn: bool) -> None:
        super().__init__()
        self._device, self._seconds, self._results, self._drawn = device, seconds, results, drawn

    def forward(self, *args: Any) -> Any:
        self._device.compute(self._seconds)
        if self._drawn:
            return ops.draw(*args)
        return args[0] if self._results is None else tuple(map(list, self._results))


@dataclass(frozen=True)
class Slower(CostModel):
    """A cost model of a device that takes `factor` times as long as another's."""

    model: CostModel
    factor: float

    @property
    def memory_bytes(self) -> int | None:
        return self.model.memory_bytes

    def seconds(self, table: CostTable, num_samples: int) -> NodeSeconds:
        found = self.model.seconds(table, num_samples)
        parts = (found.forward, found.backward_input, found.backward_weight, found.backward)
        return NodeSeconds(*(self.factor * seconds for seconds in parts))

    def moving_seconds(self, bytes_read: int, bytes_written: int) -> float:
        return self.factor * self.model.moving_seconds(bytes_read, bytes_written)

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        return self.factor * self.model.drawing_seconds(target, num_bytes)
