"""In which order all ranks' messages of one form can be sent: that of one run of their programs.

rank 0   send 2 | wait 5           2, 5: whoever sends has waited for earlier messages only
rank 1   wait 2 | send 5
"""

from collections import deque
from collections.abc import Iterator, Sequence

from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan import ops
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.program_check import RankGraph
from fxpipe.plan.rank_program import Message


def send_order(programs: Sequence[RankGraph], messages: Sequence[Message]) -> SendOrder:
    """The order in which one run of all programs sends; what a step before has posted is there.

    Raises:
        CompileError: the run stops.
    """
    waiting, sent = [deque(_messages(program)) for program in programs], dict[int, None]()
    moved = True
    while moved:
        moved = False
        for nodes in waiting:
            while nodes and (nodes[0].target is ops.send or _edge(nodes[0]) in sent):
                node = nodes.popleft()
                if node.target is ops.send:
                    sent[_edge(node)] = None
                moved = True
    if any(waiting):
        raise CompileError("the programs of the ranks wait for each other; please report this")
    return SendOrder.of(messages, list(sent))


def _messages(program: RankGraph) -> Iterator[fx.Node]:
    """Sends, and waits for what was posted in this program."""
    for node in program.graph.nodes:
        if node.target is ops.send or (node.target is ops.wait and node.all_input_nodes[0].target is ops.recv):
            yield node


def _edge(node: fx.Node) -> int:
    """The edge of a send, or of the receive that is waited for."""
    if node.target is ops.wait:
        return int(node.all_input_nodes[0].args[2])  # type: ignore[arg-type]
    return int(node.args[3])  # type: ignore[arg-type]
