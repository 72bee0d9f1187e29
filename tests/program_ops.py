"""What rank programs do, read off their graphs: plans, which are written down without them, are held against it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.analysis import CostedStep
from fxpipe.back_end import BackEnd
from fxpipe.capture.sizes import concrete
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.plan import ops
from fxpipe.plan.rank_program import Gathering, Message, RankProgram, Reduction
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.step import StepPlan
from fxpipe.program import Program
from fxpipe.simulate.collectives import Collective
from fxpipe.simulate.host_update import host_update
from fxpipe.simulate.op_lists import ADAMW_BYTES, Op, StepOps
from fxpipe.simulate.sample_ops import message_op
from tests.call_costs import CallCost, call_costs, piece_costs
from tests.program_memory import graphs_memory, held_bytes, program_bytes


def calls_of(back: BackEnd, order: Schedule) -> dict[str, CallCost]:
    """What the graphs cost that programs of this order call, by name."""
    return {**call_costs(back.graphs), **piece_costs(back.graphs, order)}


def back_of(program: Program) -> BackEnd:
    """What lowers a program."""
    found = program.lower.__self__  # type: ignore[attr-defined]
    assert isinstance(found, BackEnd)
    return found


def program_step_ops(
    step: StepPlan, costed: CostedStep, back: BackEnd, cluster: Cluster, optimizer_bytes: int = ADAMW_BYTES
) -> StepOps:
    """What every rank does, for how long, and in how many bytes."""
    model, table = costed.model, costed.costs
    seconds = {
        name: sum(call.seconds(table, node_seconds(model, table, call.num_samples)).values())
        for name, call in calls_of(back, step.schedule).items()
    }
    whole = whole_bytes(costed, step.batch_size)
    draws = {index: model.drawing_seconds(draw.target, whole[index]) for index, draw in step.draws.items()}
    calls = graphs_memory(step.programs)
    ranks = [
        [op._replace(memory=memory) for op, memory in zip(of_rank, program_bytes(program, calls, whole), strict=True)]
        for of_rank, program in zip(
            program_ops(step.programs, step.messages, model, draws, seconds), step.programs, strict=True
        )
    ]
    if step.offloaded:
        optimizer_bytes = 0
        ranks = [[*of, host_update(cluster.device, *_trained(p))] for of, p in zip(ranks, step.programs, strict=True)]
    return StepOps(ranks, [held_bytes(program, optimizer_bytes) for program in step.programs])


def _trained(program: RankProgram) -> tuple[int, int]:
    """Elements and bytes of what a rank trains."""
    trained = [program.state[name] for name in program.gradients]
    return sum(tensor.numel() for tensor in trained), sum(tensor.nbytes for tensor in trained)


def whole_bytes(costed: CostedStep, batch_size: int) -> dict[str | int, int]:
    """Bytes of every whole-batch input, by its name in the programs, and of every random draw, by index."""
    captured, found = costed.captured, dict[str | int, int]()
    for node in captured.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] in ("input", "draw"):
            key = node.name if node.meta["kind"] == "input" else captured.draws[node.name].index
            value = node.meta["val"]
            found[key] = torch.Size(concrete(tuple(value.shape), batch_size)).numel() * value.dtype.itemsize
    return found


def program_ops(
    programs: Sequence[RankProgram],
    messages: Sequence[Message],
    model: CostModel,
    draw_seconds: Mapping[int, float],
    seconds: Mapping[str, float],
) -> list[list[Op]]:
    """One op per node of every rank's program; `draw_seconds` are by a draw's index, `seconds` by a graph's name."""
    given = {message.edge: message for message in messages}, model, draw_seconds, seconds
    return [[_op(node, program, *given) for node in program.graph.nodes] for program in programs]


def _op(
    node: fx.Node,
    program: RankProgram,
    by_edge: Mapping[int, Message],
    model: CostModel,
    draw_seconds: Mapping[int, float],
    seconds: Mapping[str, float],
) -> Op:
    if node.op == "call_module":
        name = str(node.target)
        computes = any(inner.op == "call_function" for inner in program.modules[name].nodes)
        return Op("run", seconds=seconds[name]) if computes else Op("none")  # a list of parameters
    if (shared := message_op(node, by_edge)) is not None:
        return shared
    if node.target in ops.COLLECTIVES:
        collective = _collective(node)
        return Op(collective.kind, collective=collective)
    if node.target in ops.WAITS:
        collective = _collective(node.all_input_nodes[0])
        return Op(f"wait_{collective.kind}", collective=collective)
    if node.target is ops.draw:
        return Op("run", seconds=draw_seconds.get(node.args[1], 0.0))  # type: ignore[arg-type]
    if node.target in (ops.accumulate, torch.ops.aten.add.Tensor):
        size = value_bytes(node.args[-1], program)
        return Op("run", seconds=model.moving_seconds(2 * size, size))
    return Op("none")


def _collective(node: fx.Node) -> Collective:
    if "gathering" in node.meta:
        gathering: Gathering = node.meta["gathering"]
        return Collective(gathering.edge, "all_gather", gathering.ranks, gathering.num_bytes)
    reduction: Reduction = node.meta["reduction"]
    kind = {ops.reduce_scatter: "reduce_scatter", ops.broadcast: "all_gather"}.get(node.target, "reduce")  # type: ignore[arg-type]
    edge = reduction.values_edge if node.target is ops.broadcast else reduction.edge
    return Collective(edge, kind, reduction.ranks, reduction.num_bytes)


def value_bytes(node: Any, program: RankProgram) -> int:
    """Bytes of a tensor of a rank program, or of all tensors of a list: of nodes, of what a stage graph returns, of a
    rank's own sums."""
    if not isinstance(node, fx.Node):
        return sum(value_bytes(item, program) for item in node)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if node.target is torch.ops.aten.add.Tensor or node.target is ops.accumulate:
        return value_bytes(node.args[-1], program)
    if node.target is ops.wait_reduced:
        reduction: Reduction = node.meta["reduction"]
        return sum(program.state[name].nbytes for name in reduction.owned(program.rank))
    call, index = node.args
    assert isinstance(call, fx.Node), node.format_node()
    (output,) = program.modules[str(call.target)].find_nodes(op="output")
    return sum(item.meta["val"].nbytes for item in output.args[0][index])
