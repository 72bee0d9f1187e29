"""Check rank programs: every message sent once and received once, in one order per channel, and no rank waits forever.

Sends never block and every channel has one sender and one receiver; a reduction over replicas is started without
blocking too, and waited for by each of its ranks. All ranks know one order of both, and each sends only after waits for
what is earlier in it: of all that never comes, the first has a sender that waits for something earlier still, so that
no timing can deadlock. Some ranks' programs can be checked without the others'.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan import ops
from fxpipe.plan.rank_program import Gathering, Message, Reduction


class RankGraph(Protocol):
    """One rank's straight-line graph, of training or of sampling."""

    @property
    def rank(self) -> int: ...

    @property
    def graph(self) -> fx.Graph: ...


def check_programs(
    programs: Sequence[RankGraph],
    messages: Sequence[Message],
    positions: Mapping[int, int],
    reductions: Sequence[Reduction | Gathering] = (),
) -> list[str]:
    """The faults of some ranks' programs, each with its place; empty when they are right. `positions` in the order of
    all are those of messages, and of reductions when the last rank starts them, by edge."""
    by_rank = {program.rank: program for program in programs}
    planned: dict[tuple[int, int], list[int]] = {}
    for message in messages:
        planned.setdefault(message.channel, []).append(message.edge)
    faults: list[str] = []
    for end, function in enumerate((ops.send, ops.recv)):
        found = _by_channel(programs, function)
        for channel in sorted(channel for channel in {*found, *planned} if channel[end] in by_rank):
            faults += _order_faults(by_rank[channel[end]], channel, planned.get(channel, []), found.get(channel, []))
    faults += _shape_faults(programs, messages)
    faults += _reduction_faults(programs, reductions)
    return faults or list(_early_faults(programs, positions))


def require_programs(
    programs: Sequence[RankGraph],
    messages: Sequence[Message],
    positions: Mapping[int, int],
    reductions: Sequence[Reduction | Gathering] = (),
) -> None:
    """Raise CompileError with every fault."""
    if faults := check_programs(programs, messages, positions, reductions):
        raise CompileError("the rank programs are wrong; please report this\n" + "\n".join(faults))


def _by_channel(programs: Sequence[RankGraph], function: object) -> dict[tuple[int, int], list[fx.Node]]:
    """The sends or receives of every directed channel, in program order."""
    channels: dict[tuple[int, int], list[fx.Node]] = {}
    for program in programs:
        for node in program.graph.nodes:
            if node.target is function:
                channel = (program.rank, node.args[2]) if function is ops.send else (node.args[1], program.rank)
                channels.setdefault(channel, []).append(node)
    return channels


def _order_faults(
    program: RankGraph, channel: tuple[int, int], planned: Sequence[int], found: Sequence[fx.Node]
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


def _shape_faults(programs: Sequence[RankGraph], messages: Sequence[Message]) -> Iterator[str]:
    by_edge = {message.edge: message for message in messages}
    for program in programs:
        waits = Counter(node.args[0] for node in program.graph.nodes if node.target is ops.wait)
        for node in program.graph.nodes:
            if node.target is not ops.recv:
                continue
            message = by_edge.get(node.args[2])
            if message is not None and (tuple(node.args[3]), node.args[4]) != (message.shape, message.dtype):
                yield f"rank {program.rank} receives another shape than {message}\n" + _at(program, node)
            if waits[node] != 1:
                often = "twice" if waits[node] else "never"
                yield f"rank {program.rank} {often} waits for a message\n" + _at(program, node)


def _reduction_faults(programs: Sequence[RankGraph], reductions: Sequence[Reduction | Gathering]) -> Iterator[str]:
    """Every rank of a reduction starts it once, over the same ranks and to the same owners, and waits for it; so for
    the broadcast of what they have trained, and what is gathered. The order is the schedule's."""
    planned: dict[Any, tuple[Any, ...]] = {}  # by edge: what is done, by which ranks, to which owners
    for of in reductions:
        if isinstance(of, Gathering):
            planned[of.edge] = ops.gather, of.ranks, of.owners
            continue
        planned[of.edge] = (ops.reduce_scatter, of.ranks, of.owners) if of.owners else (ops.all_reduce, of.ranks)
        if of.values_edge >= 0:
            planned[of.values_edge] = ops.broadcast, of.ranks, of.owners
    for program in programs:
        waited = {node.args[0] for node in program.graph.nodes if node.target in ops.WAITS}
        started = [node for node in program.graph.nodes if node.target in ops.COLLECTIVES]
        for node in started:
            found = node.target, *(tuple(ranks) for ranks in (node.args[2], *node.args[4:]))
            if planned.get(node.args[3]) != found or program.rank not in found[1]:
                yield f"rank {program.rank} starts a reduction that is not planned\n" + _at(program, node)
            if node not in waited:
                yield f"rank {program.rank} never waits for a reduction\n" + _at(program, node)
        edges = sorted(node.args[3] for node in started)
        wanted = sorted(edge for edge, (_, ranks, *_) in planned.items() if program.rank in ranks)
        if edges != wanted:
            yield f"rank {program.rank} starts the reductions {edges}, planned are {wanted}"


def _early_faults(programs: Sequence[RankGraph], positions: Mapping[int, int]) -> Iterator[str]:
    """Sends, and starts of reductions, that come after a wait for what may not be there before them."""
    for program in programs:
        latest = -1
        for node in program.graph.nodes:
            if node.target in ops.WAITS:
                latest = max(latest, positions[_edge(node.args[0])])
            elif node.target in (ops.send, *ops.COLLECTIVES) and positions[_edge(node)] <= latest:
                yield f"rank {program.rank} waits before it sends, for what may come later\n" + _at(program, node)
                break


def _edge(node: Any) -> int:
    """The edge of a send, a receive or a reduction."""
    return int(node.args[2 if node.target is ops.recv else 3])


def _at(program: RankGraph, node: fx.Node) -> str:
    nodes = list(program.graph.nodes)
    return _around(nodes, nodes.index(node))


def _around(nodes: Sequence[fx.Node], position: int) -> str:
    shown = range(max(0, position - 3), min(len(nodes), position + 2))
    return "\n".join(f"    {nodes[i].format_node()}" + ("  <-- HERE" if i == position else "") for i in shown)
