"""Check programs against communicators: every rank's operations, started as `Turns` says, on a machine that moves a
message only when both of its ends are the oldest open operations of their ranks on its communicator.

    rank 0   send 2 | wait 5                       batch {2, 5}
    rank 1   wait 2 | send 5        batch {2}      batch {5}      both arrive: the machine comes to the end

What moves never keeps another from moving, so that one run stands for every timing.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.lanes import Lanes, SendOrder, Turns
from fxpipe.plan.program_check import RankGraph
from fxpipe.plan.transport import Channel

Lane = str | Channel
"""A channel's own communicator, or the shared one."""


class Step(NamedTuple):
    """One thing a rank does: "send" and "recv" on a channel's own communicator, a "batch" on the shared one, "start" a
    reduction, or "wait"; with the edges that it is about."""

    kind: str
    edges: tuple[int, ...]


def check_lanes(programs: Sequence[RankGraph], lanes: Lanes, order: SendOrder) -> list[str]:
    """The faults of all ranks' programs of one form on these communicators; empty when they are right."""
    faults = [fault for program in programs for fault in _order_faults(program, order)]
    return faults or list(_stuck({p.rank: deque(_steps(p, lanes, order)) for p in programs}, lanes, order))


def _posted(node: fx.Node) -> Any:
    return node.args[0]


def _edge(node: fx.Node) -> int:
    """The edge of a send, of a receive, of a reduction, or of what is waited for."""
    if node.target in ops.WAITS:
        node = _posted(node)
    return int(node.args[2 if node.target is ops.recv else 3])  # type: ignore[arg-type]


def _is_wait(node: fx.Node) -> bool:
    """For what was started in this program; the rest has arrived."""
    return node.target in ops.WAITS and _posted(node).target in (ops.recv, *ops.COLLECTIVES)


def _order_faults(program: RankGraph, order: SendOrder) -> Iterator[str]:
    """Sends that come after a later send, or after a wait for something later."""
    latest = -1
    for node in program.graph.nodes:
        if node.target is ops.send or _is_wait(node):
            position = order.positions[_edge(node)]
            if node.target is ops.send and position < latest:
                yield f"rank {program.rank} sends edge {_edge(node)} after something later"
            latest = max(latest, position)


def _steps(program: RankGraph, lanes: Lanes, order: SendOrder) -> Iterator[Step]:
    """What a rank does, in order, as its transport does it."""
    by_edge = {message.edge: message for message in order.messages}
    edges = [message.edge for message in order.messages]
    at = {order.positions[edge]: edge for edge in edges}
    turns = Turns(position for position, _ in order.incoming(program.rank, lanes.shared))

    def batch(position: float) -> Iterator[Step]:
        due = turns.due(position)
        if due:
            yield Step("batch", tuple(at[position] for position in due))

    for node in program.graph.nodes:
        if node.target in (ops.send, ops.recv):
            edge = _edge(node)
            if by_edge[edge].channel in lanes.own:
                yield Step("send" if node.target is ops.send else "recv", (edge,))
            elif node.target is ops.send:
                turns.send(order.positions[edge])
        elif node.target in ops.COLLECTIVES:
            yield Step("start", (_edge(node),))
        elif _is_wait(node):
            yield from batch(order.positions[_edge(node)])
            yield Step("wait", (_edge(node),))
    yield from batch(math.inf)


def _stuck(left: dict[int, deque[Step]], lanes: Lanes, order: SendOrder) -> Iterator[str]:
    """Run every rank until all end; what is left waits for what can never come."""
    ends = {message.edge: message.channel for message in order.messages}
    members = {edge: {rank for rank, steps in left.items() if Step("start", (edge,)) in steps} for edge in
               {step.edges[0] for steps in left.values() for step in steps if step.kind == "start"}}  # fmt: skip
    queues: dict[tuple[int, Lane], deque[set[int]]] = defaultdict(deque)  # by rank and communicator: open operations
    started: dict[int, set[int]] = defaultdict(set)  # ranks by reduction
    begun: dict[tuple[int, int], set[int]] = {}  # by rank and edge: what is open of the operation that it is one of
    moved = True
    while moved:
        moved = False
        for rank, steps in left.items():
            while steps and (steps[0].kind != "wait" or _arrived(steps[0].edges[0], rank, begun, members, started)):
                kind, edges = steps.popleft()
                moved = True
                if kind == "start":
                    started[edges[0]].add(rank)
                elif kind != "wait":
                    lane: Lane = "shared" if kind == "batch" else ends[edges[0]]
                    queues[rank, lane].append(set(edges))
                    begun |= dict.fromkeys(((rank, edge) for edge in edges), queues[rank, lane][-1])
        for (rank, lane), queue in queues.items():
            for edge in sorted(queue[0]) if queue else ():
                other = queues.get((sum(ends[edge]) - rank, lane))
                if other and edge in other[0]:
                    other[0].discard(edge)
                    queue[0].discard(edge)
                    moved = True
        for queue in queues.values():
            while queue and not queue[0]:
                queue.popleft()
    for rank, steps in left.items():
        if steps:
            yield f"rank {rank} waits forever for edge {steps[0].edges[0]} on these communicators"
    for (rank, lane), queue in queues.items():
        if queue:
            yield f"rank {rank} has edges {sorted(queue[0])} open on communicator {lane} forever"


def _arrived(
    edge: int, rank: int, begun: dict[tuple[int, int], set[int]], members: dict[int, set[int]],
    started: dict[int, set[int]],
) -> bool:  # fmt: skip
    """Whether a rank that waits goes on: its whole operation has ended."""
    return started[edge] == members[edge] if edge in members else begun.get((rank, edge), {edge}) == set()
