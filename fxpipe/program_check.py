"""Check rank programs: every message sent once and received once, in one order per channel, and no rank waits forever.

Sends never block and every channel has one sender and one receiver, so the ranks are a Kahn network: one run of the
abstract machine that reaches every rank's end proves that no timing can deadlock.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from fxpipe import ops
from fxpipe.errors import CompileError
from fxpipe.rank_program import Message, RankProgram


def check_programs(programs: Sequence[RankProgram], messages: Sequence[Message]) -> list[str]:
    """The faults of the programs, each with its place; empty when they are right."""
    sent, posted = _by_channel(programs, ops.send), _by_channel(programs, ops.recv)
    planned: dict[tuple[int, int], list[int]] = {}
    for message in messages:
        planned.setdefault(message.channel, []).append(message.edge)
    faults = []
    for channel in sorted({*sent, *posted, *planned}):
        orders = [table.get(channel, []) for table in (planned, sent, posted)]
        if orders[0] != orders[1] or orders[0] != orders[2]:
            src, dst = channel
            faults.append(
                f"channel {src} -> {dst}: planned {orders[0]}, sent {orders[1]}, received {orders[2]} (edges in order)"
            )
    faults += _shape_faults(programs, messages)
    return faults or list(_stuck(programs))


def require_programs(programs: Sequence[RankProgram], messages: Sequence[Message]) -> None:
    """Raise CompileError with every fault."""
    if faults := check_programs(programs, messages):
        raise CompileError("the rank programs are wrong; please report this\n" + "\n".join(faults))


def _by_channel(programs: Sequence[RankProgram], function: object) -> dict[tuple[int, int], list[int]]:
    """Edges in program order, for `send` or `recv`, of every directed channel."""
    channels: dict[tuple[int, int], list[int]] = {}
    for program in programs:
        for node in program.graph.nodes:
            if node.target is function:
                peer, edge = (node.args[2], node.args[3]) if function is ops.send else (node.args[1], node.args[2])
                channel = (program.rank, peer) if function is ops.send else (peer, program.rank)
                channels.setdefault(channel, []).append(edge)
    return channels


def _shape_faults(programs: Sequence[RankProgram], messages: Sequence[Message]) -> Iterator[str]:
    by_edge = {message.edge: message for message in messages}
    for program in programs:
        waits = {node.args[0] for node in program.graph.nodes if node.target is ops.wait}
        for node in program.graph.nodes:
            if node.target is not ops.recv:
                continue
            message = by_edge[node.args[2]]
            if (tuple(node.args[3]), node.args[4]) != (message.shape, message.dtype):
                yield f"rank {program.rank}: {node.format_node()} receives another shape than {message}"
            if node not in waits:
                yield f"rank {program.rank}: {node.name} is received and never waited for"


def _stuck(programs: Sequence[RankProgram]) -> Iterator[str]:
    """Run every rank until all end; what is left waits for a message that nobody can send."""
    nodes = [list(program.graph.nodes) for program in programs]
    position = [0] * len(programs)
    sent: set[int] = set()
    moved = True
    while moved:
        moved = False
        for rank, program_nodes in enumerate(nodes):
            while position[rank] < len(program_nodes) and _can_run(program_nodes[position[rank]], sent):
                node = program_nodes[position[rank]]
                if node.target is ops.send:
                    sent.add(node.args[3])
                position[rank] += 1
                moved = True
    for rank, program_nodes in enumerate(nodes):
        if position[rank] < len(program_nodes):
            yield f"rank {rank} waits forever:\n" + _around(program_nodes, position[rank])


def _can_run(node: fx.Node, sent: set[int]) -> bool:
    if node.target is not ops.wait:
        return True
    receive = node.args[0]
    assert isinstance(receive, fx.Node)
    return receive.args[2] in sent


def _around(nodes: Sequence[fx.Node], position: int) -> str:
    shown = range(max(0, position - 3), min(len(nodes), position + 2))
    return "\n".join(f"    {nodes[i].format_node()}" + ("  <-- HERE" if i == position else "") for i in shown)
