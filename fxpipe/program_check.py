"""Check rank programs: every message sent once and received once, in one order per channel, and no rank waits forever.

Sends never block and every channel has one sender and one receiver, so the ranks are a Kahn network: one run of the
abstract machine that reaches every rank's end proves that no timing can deadlock.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from torch import fx

from fxpipe import ops
from fxpipe.errors import CompileError
from fxpipe.rank_program import Message, RankProgram


def check_programs(programs: Sequence[RankProgram], messages: Sequence[Message]) -> list[str]:
    """The faults of the programs, each with its place; empty when they are right."""
    planned: dict[tuple[int, int], list[int]] = {}
    for message in messages:
        planned.setdefault(message.channel, []).append(message.edge)
    faults: list[str] = []
    for end, function in enumerate((ops.send, ops.recv)):
        found = _by_channel(programs, function)
        for channel in sorted({*found, *planned}):
            faults += _order_faults(programs[channel[end]], channel, planned.get(channel, []), found.get(channel, []))
    faults += _shape_faults(programs, messages)
    return faults or list(_stuck(programs))


def require_programs(programs: Sequence[RankProgram], messages: Sequence[Message]) -> None:
    """Raise CompileError with every fault."""
    if faults := check_programs(programs, messages):
        raise CompileError("the rank programs are wrong; please report this\n" + "\n".join(faults))


def _by_channel(programs: Sequence[RankProgram], function: object) -> dict[tuple[int, int], list[fx.Node]]:
    """The sends or receives of every directed channel, in program order."""
    channels: dict[tuple[int, int], list[fx.Node]] = {}
    for program in programs:
        for node in program.graph.nodes:
            if node.target is function:
                channel = (program.rank, node.args[2]) if function is ops.send else (node.args[1], program.rank)
                channels.setdefault(channel, []).append(node)
    return channels


def _order_faults(
    program: RankProgram, channel: tuple[int, int], planned: Sequence[int], found: Sequence[fx.Node]
) -> Iterator[str]:
    """The first message of a channel that one end takes in another order than planned, in that end's program."""
    src, dst = channel
    edges = [node.args[3] if node.target is ops.send else node.args[2] for node in found]
    for position, (edge, wanted) in enumerate(zip_longest(edges, planned)):
        if edge != wanted:
            (*_, end) = program.graph.nodes  # where it shows that one is missing
            what = "sends" if program.rank == src else "receives"
            orders = f"channel {src} -> {dst}: planned edges {list(planned)}, rank {program.rank} {what} {edges}"
            yield f"{orders}\n{_at(program, found[position] if position < len(found) else end)}"
            return


def _shape_faults(programs: Sequence[RankProgram], messages: Sequence[Message]) -> Iterator[str]:
    by_edge = {message.edge: message for message in messages}
    for program in programs:
        waits = {node.args[0] for node in program.graph.nodes if node.target is ops.wait}
        for node in program.graph.nodes:
            if node.target is not ops.recv:
                continue
            message = by_edge.get(node.args[2])
            if message is not None and (tuple(node.args[3]), node.args[4]) != (message.shape, message.dtype):
                yield f"rank {program.rank} receives another shape than {message}\n" + _at(program, node)
            if node not in waits:
                yield f"rank {program.rank} never waits for a message\n" + _at(program, node)


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


def _at(program: RankProgram, node: fx.Node) -> str:
    nodes = list(program.graph.nodes)
    return _around(nodes, nodes.index(node))


def _around(nodes: Sequence[fx.Node], position: int) -> str:
    shown = range(max(0, position - 3), min(len(nodes), position + 2))
    return "\n".join(f"    {nodes[i].format_node()}" + ("  <-- HERE" if i == position else "") for i in shown)
