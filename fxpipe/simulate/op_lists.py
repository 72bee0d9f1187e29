"""Operations of ranks as the simulator takes them: what each does to the clock, and no tensors.

recv_h = recv(transport, 0, 8)    post    edge 8
h = wait(recv_h)                  wait    edge 8
out = stage_1_forward(h)     ->   run     stage_1_forward's seconds
send(transport, out, 2, 9)        send    edge 9
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from fxpipe.costs.model import CostModel
from fxpipe.plan import ops
from fxpipe.plan.rank_program import Gathering, Message, RankProgram, Reduction
from fxpipe.plan.timeline import COLLECTIVES
from fxpipe.simulate.collectives import Collective


class Transfer(Protocol):
    """A message as the simulator takes it: `fxpipe.plan.rank_program.Message`, or one that is only planned."""

    @property
    def edge(self) -> int: ...
    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def channel(self) -> tuple[int, int]: ...


_RING_STEPS = {"reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that all bytes pass a rank of a ring


class Bytes(NamedTuple):
    """What an op does to its rank's memory, by category.

    `taken` is there when it ends, `freed` no longer is; of what is `sent`, (category, bytes, edges), the op is the last
    use but these messages': it goes when they have arrived. `most` is the most beside what was held before, if what the
    op lets go has arrived by then; `most_kept` if it has not.
    """

    taken: tuple[tuple[str, int], ...] = ()
    freed: tuple[tuple[str, int], ...] = ()
    sent: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    most: int = 0
    most_kept: int = 0


class Op(NamedTuple):
    """One step of a rank.

    `kind` is "run" (takes `seconds`, and those of the graph `call`), "begin" (of the action `call`), "send", "post" (a
    receive) or "wait" (of `message`), one of COLLECTIVES (issues `collective`) or "wait_" and one of these, or "none",
    which is free.
    """

    kind: str
    call: str = ""
    seconds: float = 0.0
    message: Transfer | None = None
    collective: Collective | None = None
    memory: Bytes | None = None


@dataclass(frozen=True, eq=False)
class StepOps:
    """A step: the ops of every rank, in order; `held` has what each holds all step long, bytes by category.

    `seconds` are of the graphs that ops call.
    """

    ranks: Sequence[Sequence[Op]]
    held: Sequence[Mapping[str, int]]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks send; collectives as the rings that they may be made of."""
        sent = sum(op.message.num_bytes for ops in self.ranks for op in ops if op.kind == "send" and op.message)
        issued = (op.collective for ops in self.ranks for op in ops if op.collective and op.kind in COLLECTIVES)
        rings = {collective.edge: collective for collective in issued}.values()
        return sent + sum(_RING_STEPS[ring.kind] * (len(ring.ranks) - 1) * ring.num_bytes for ring in rings)


def program_ops(
    programs: Sequence[RankProgram],
    messages: Sequence[Message],
    model: CostModel,
    draw_seconds: Mapping[int, float],
) -> list[list[Op]]:
    """One op per node of every rank's program; `draw_seconds` are by a draw's index."""
    by_edge = {message.edge: message for message in messages}
    return [[_op(node, program, by_edge, model, draw_seconds) for node in program.graph.nodes] for program in programs]


def _op(
    node: fx.Node,
    program: RankProgram,
    by_edge: Mapping[int, Message],
    model: CostModel,
    draw_seconds: Mapping[int, float],
) -> Op:
    if node.op == "call_module":
        name = str(node.target)
        computes = any(inner.op == "call_function" for inner in program.modules[name].nodes)
        return Op("run", call=name) if computes else Op("none")  # a list of parameters
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


def message_op(node: fx.Node, by_edge: Mapping[int, Message]) -> Op | None:
    """What begins an action, sends, posts a receive or waits, in programs of training and of sampling alike."""
    if node.target is ops.begin:
        return Op("begin", call=str(node.args[1]))
    if node.target is ops.send:
        return Op("send", message=by_edge[node.args[3]])  # type: ignore[index]
    if node.target is ops.recv:
        return Op("post", message=by_edge[node.args[2]])  # type: ignore[index]
    if node.target is ops.wait:
        (receive,) = node.all_input_nodes
        return Op("wait", message=by_edge[receive.args[2]])  # type: ignore[index]
    return None


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
