"""Steps that follow each other as one straight line, so that what holds for a step can be asked of a sequence.

fresh      recv a; wait a; carries done(a)            step 0: recv a; wait a
displaced  b = take; wait b; recv b, which it carries  step 1: wait done(a); recv b   step 2: wait b; recv b'   ...

A prediction that comes in patches is waited for in the next step: each patch where that reads the same patch of an
input, all others at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan import ops
from fxpipe.plan.displaced_ops import done, own_rows
from fxpipe.plan.program_check import require_programs
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import SampleProgram

STEADY = ("fresh", "displaced", "displaced", "last")


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
    """Raise CompileError unless these forms, one after the other, are right programs.

    Every carried receive is waited for once, in the next step; channels have one order; nobody waits forever.
    """
    num_edges = 1 + max((message.edge for of_form in messages.values() for message in of_form), default=0)
    steps = [unrolled(program, sequence, num_edges) for program in programs]
    sent = [
        replace(message, edge=message.edge + step * num_edges)
        for step, form in enumerate(sequence)
        for message in messages[form]
    ]
    require_programs(steps, sent)


def unrolled(program: SampleProgram, sequence: Sequence[str], num_edges: int) -> Unrolled:
    """The forms of `sequence` as one graph, in which a value is taken from where the step before has carried it."""
    graph, carried, coming = fx.Graph(), dict[str, fx.Node](), list[list[fx.Node]]()
    arguments: dict[str, fx.Node] = {}
    for step, form in enumerate(sequence):
        carried, coming = _add_step(program, form, step, num_edges, graph, arguments, carried, coming)
    _arrive(graph, coming)
    graph.output(None)
    return Unrolled(program.rank, graph)


def _add_step(
    program: SampleProgram, form: str, step: int, num_edges: int, graph: fx.Graph, arguments: dict[str, fx.Node],
    carried: dict[str, fx.Node], coming: list[list[fx.Node]],
) -> tuple[dict[str, fx.Node], list[list[fx.Node]]]:  # fmt: skip
    """Copy one form; what it carries, and of every patch of its prediction what is on its way."""
    env: dict[fx.Node, Any] = {}
    for node in program.forms[form].graph.nodes:
        if node.op == "placeholder":
            if node.name not in arguments:
                arguments[node.name] = graph.placeholder(node.name)
            env[node] = arguments[node.name]
        elif node.op == "output":
            result = node.args[0]
            prediction, carries = result if isinstance(result, tuple) else (result, {})
            _arrive(graph, coming)
            parts = prediction if isinstance(prediction, list | tuple) else []
            sent = [[env[piece] for piece in part if piece.target is ops.recv] for part in parts]
            return {name: env[value] for name, value in carries.items()}, sent
        elif node.target is ops.take:
            if node.args[1] not in carried:
                raise CompileError(
                    f"step {step}, {form}: rank {program.rank} takes {node.args[1]}, which the step before has "
                    "not carried, or which is taken already; please report this"
                )
            env[node] = carried.pop(node.args[1])
        elif node.target is ops.wait and env[node.args[0]].target is done:
            env[node] = env[node.args[0]].args[0]
        else:
            if node.target is own_rows:
                _arrive(graph, coming[node.args[1] : node.args[1] + 1])
            copy = graph.node_copy(node, env.__getitem__)
            copy.args = _renumbered(copy, step * num_edges)
            env[node] = copy
    raise AssertionError("a form ends with its output")


def _arrive(graph: fx.Graph, parts: list[list[fx.Node]]) -> None:
    """Wait for what has not been waited for."""
    for part in parts:
        while part:
            graph.call_function(ops.wait, (part.pop(0),))


def _renumbered(node: fx.Node, more: int) -> tuple[Any, ...]:
    """The arguments of a copy, with the edge of its step."""
    place = {ops.send: 3, ops.recv: 2}.get(node.target)  # type: ignore[arg-type]
    if place is None:
        return node.args
    return (*node.args[:place], node.args[place] + more, *node.args[place + 1 :])  # type: ignore[operator]
