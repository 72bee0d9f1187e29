"""Steps that follow each other as one straight line, so that what holds for a step can be asked of a sequence.

fresh      recv a; wait a; carries done(a)            step 0: recv a; wait a
displaced  b = take; wait b; recv b, which it carries  step 1: wait done(a); recv b   step 2: wait b; recv b'   ...

A prediction that comes in patches is waited for in the next step: each patch where that reads the same patch of an
input, all others at its end; a single one before anything else.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan import ops
from fxpipe.plan.displaced_ops import done, held, own_rows
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import KNOWN, SampleProgram

_MESSAGES = (ops.send, ops.recv, ops.wait, done)
STEADY = ("fresh", "displaced", "displaced", "last")
ENDS = "ends a step"
"""In `meta` of a step's last node: whether something crosses to the next one."""


@dataclass(frozen=True)
class Unrolled:
    """One rank's steps, one after the other; the edges of step k have k times `num_edges` added."""

    rank: int
    graph: fx.Graph


def require_sequence(
    programs: Sequence[SampleProgram],
    messages: Mapping[str, Sequence[Message]],
    sequence: Sequence[str] = STEADY,
) -> None:
    """Raise CompileError unless these forms, one after the other, are right programs, of all ranks or of some.

    Every carried receive is waited for once, in the next step; channels have one order; nobody waits forever: before a
    rank sends it waits for what comes earlier in the order of all messages alone.
    """
    graphs, sent = in_sequence(programs, messages, sequence)
    require_programs(graphs, sent, {message.edge: position for position, message in enumerate(sent)})


def in_sequence(
    programs: Sequence[SampleProgram],
    messages: Mapping[str, Sequence[Message]],
    sequence: Sequence[str],
    whole: bool = False,
) -> tuple[list[Unrolled], list[Message]]:
    """These forms one after the other on every rank, their messages alone or the `whole` of them; and all messages of
    these ranks, in order."""
    num_edges = 1 + max((message.edge for of_form in messages.values() for message in of_form), default=0)
    steps = [unrolled(program, sequence, num_edges, whole) for program in programs]
    ranks = {program.rank for program in programs}
    own = {form: [m for m in messages[form] if m.src in ranks or m.dst in ranks] for form in dict.fromkeys(sequence)}
    sent = [
        replace(message, edge=message.edge + step * num_edges)
        for step, form in enumerate(sequence)
        for message in own[form]
    ]
    return steps, sent


def unrolled(program: SampleProgram, sequence: Sequence[str], num_edges: int, whole: bool) -> Unrolled:
    """The forms of `sequence` as one graph; of messages alone, what is computed between them stands for nothing.

    The whole of them holds to a step's end what that carries, and to the last one's what is computed once.
    """
    graph, carried, coming = fx.Graph(), dict[str, fx.Node](), list[list[fx.Node]]()
    value = graph.placeholder("transport" if whole else "value")
    inputs = {name: graph.placeholder(name) for name in program.inputs if whole}
    known: Sequence[fx.Node] = ()
    for step, form in enumerate(sequence):
        env: defaultdict[fx.Node, fx.Node] = defaultdict(lambda: value)
        nodes = program.forms[form].graph.nodes
        if len(coming) == 1:
            _arrive(graph, coming)
        for node in nodes:
            if node.target is own_rows:
                _arrive(graph, coming[node.args[1] : node.args[1] + 1])
            if node.op == "placeholder":
                env[node] = inputs.get(node.name, value)
            elif whole and is_known(node):
                known = known or _once(graph, program, inputs)
                env[node] = known[node.args[1]]
            elif node.target is ops.take:
                if node.args[1] not in carried:
                    raise CompileError(
                        f"step {step}, {form}: rank {program.rank} takes {node.args[1]}, which the step before has "
                        "not carried, or which is taken already; please report this"
                    )
                env[node] = carried.pop(node.args[1])
            elif node.target is ops.wait and env[node.args[0]].target is done:
                (env[node],) = env[node.args[0]].all_input_nodes
            elif node.target in _MESSAGES or (whole and node.op != "output"):
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].args = _renumbered(node.target, env[node].args, step * num_edges)
        _arrive(graph, coming)
        (*_, output) = nodes
        prediction, carries = output.args[0] if _carries(output) else (output.args[0], {})
        parts = prediction if isinstance(prediction, list | tuple) else ()
        coming = [[env[piece] for piece in part if piece.target is ops.recv] for part in parts]
        carried = {name: env[node] for name, node in carries.items()}
        if whole and carries:
            graph.call_function(held, ([*carried.values()],))
        next(iter(reversed(graph.nodes))).meta[ENDS] = bool(carries)
    _arrive(graph, coming)
    graph.output(tuple(known) or None)
    for node in (node for node in graph.nodes if node.target is done and not node.users):
        graph.erase_node(node)  # what arrived so, is read as it is
    return Unrolled(program.rank, graph)


def is_known(node: fx.Node) -> bool:
    """Whether it is read of what is computed once in a call."""
    return node.target is getitem and isinstance(node.args[0], fx.Node) and node.args[0].target == KNOWN


def _once(graph: fx.Graph, program: SampleProgram, inputs: Mapping[str, fx.Node]) -> Sequence[fx.Node]:
    """What every form knows, computed where it is first read."""
    assert program.once is not None
    returned: Any = graph.graph_copy(
        program.once, {n: inputs[n.name] for n in program.once.find_nodes(op="placeholder")}
    )
    return tuple(returned)


def _carries(output: fx.Node) -> bool:
    """Whether a form returns, beside what it predicts, what it carries."""
    returned = output.args[0]
    return isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)


def _arrive(graph: fx.Graph, parts: Sequence[list[fx.Node]]) -> None:
    """Wait for what has not been waited for."""
    for part in parts:
        while part:
            graph.call_function(ops.wait, (part.pop(0),))


def _renumbered(target: Any, args: tuple[Any, ...], more: int) -> tuple[Any, ...]:
    """The arguments of a message's copy, with the edge of its step."""
    place = {ops.send: 3, ops.recv: 2}.get(target)
    return args if place is None else (*args[:place], args[place] + more, *args[place + 1 :])
