"""Backwards of a model's own in a captured graph: each is taken out, to be the graph of an operation's gradient.

z = round(x); t = tangent of z; g = t * 1; traced(z, x, t, g)     ->     y = own_gradient("Round 5f2c..", [z], [x], [])
                                                                          "Round 5f2c..": t -> t * 1

What depends on the tangents alone is its graph; what else it reads is saved.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from fxpipe.capture import functionalise, private
from fxpipe.capture.backwards import GRAPHS, OWN_GRADIENT, TRACED, own_refusal
from fxpipe.capture.fingerprint import step_fingerprint
from fxpipe.capture.reach import reached

aten = torch.ops.aten


def cut_out(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Make a graph of its own of every backward that was traced; `constants` by the names of their placeholders.

    Raises:
        CaptureError: a backward draws random numbers, or has an effect beside its result.
    """
    traced = graph.find_nodes(op="call_function", target=TRACED)
    if traced:
        _write_numbers(graph, constants)
    for node in traced:
        name, outs, inputs, given, grads = node.args
        tangents = [_before_writes(one) for one in given]
        for tangent, out in zip(tangents, outs, strict=True):
            for user in list(tangent.users):
                if not isinstance(user.meta.get("val"), torch.Tensor | list | tuple):
                    user.replace_input_with(tangent, out)
        inner = _between(name, graph, tangents, node)
        own, saved, sizes = _graph_of(name, inner, tangents, grads)
        _refuse_later_writes(name, node, saved)
        key = f"{name} {step_fingerprint(own, {})}"
        GRAPHS[key] = own
        with graph.inserting_before(node):
            args = key, _cut_off(graph, outs), inputs, _cut_off(graph, saved), sizes
            made = graph.call_function(OWN_GRADIENT, args)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        for one in (node, *reversed(inner), *tangents):
            graph.erase_node(one)


def _write_numbers(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Numbers that the trace keeps as tensors (`grad[mask] = 0`) are numbers of the graph, for a backward's to tell."""
    for node in graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        value = constants.get(node.args[0].name)
        if value is None or value.ndim or private.mode_of(value) is not None or value.device.type != "cpu":
            continue
        with graph.inserting_before(node):
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            made = graph.call_function(aten.full.default, ([], value.item()), options)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _before_writes(node: fx.Node) -> fx.Node:
    """The value that this one was, before a backward wrote into it."""
    while private.is_mutable(node.target):
        node = functionalise.written_by(node)
    return node


def _between(name: str, graph: fx.Graph, tangents: Sequence[fx.Node], end: fx.Node) -> list[fx.Node]:
    """What depends on the tangents, and on nothing behind `end`."""
    nodes = list(graph.nodes)
    behind = nodes[nodes.index(tangents[-1]) + 1 : nodes.index(end)]
    inner = dict.fromkeys(tangents)
    for node in behind:
        if any(one in inner for one in node.all_input_nodes):
            inner[node] = None
    if any(user is not end and user not in inner for node in inner for user in node.users):
        raise own_refusal(name, "its backward keeps what it computes")
    if any(node.target is TRACED for node in inner):
        raise own_refusal(name, "its backward has another one inside")
    depends = set(inner)
    for node in reversed(behind):  # what it computes for itself, or again
        if node.users and all(user is end or user in inner for user in node.users):
            inner[node] = None
    for node in behind:  # of a list, which nothing saves, all or none
        if node.target is operator.getitem and node not in depends and node.args[0] not in inner:
            inner.pop(node, None)
    return [node for node in behind if node in inner]


def _graph_of(
    name: str, inner: Sequence[fx.Node], tangents: Sequence[fx.Node], grads: Sequence[fx.Node]
) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """The graph of these nodes, the values that it reads beside the tangents, and the sizes."""
    own, read = {*inner, *tangents}, dict[fx.Node, None]()
    read |= dict.fromkeys(one for node in inner for one in node.all_input_nodes if one not in own)
    read |= dict.fromkeys(one for one in grads if one not in own)
    saved = [node for node in read if isinstance(node.meta["val"], torch.Tensor)]
    sizes = [node for node in read if node not in set(saved)]
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate((*tangents, *saved, *sizes)):
        env[node] = graph.placeholder(f"given_{number}")
        env[node].meta = {**node.meta, "kind": "given", "state": name}
    for node in inner:
        if not private.is_assertion(node.target):
            env[node] = graph.node_copy(node, lambda one: env[one])
            env[node].meta = dict(node.meta)
    graph.output(tuple(env[node] for node in grads))
    graph = functionalise.run(graph).graph
    graph.eliminate_dead_code()
    return graph, saved, sizes


def _refuse_later_writes(name: str, node: fx.Node, saved: Sequence[fx.Node]) -> None:
    """Refuse writes behind the function into what its backward reads, which autograd has not saved."""
    _, outs, *_ = node.args
    of_results = [node] if any(one in outs for one in saved) else []  # type: ignore[operator]
    read = set(reached([*saved, *of_results], _of_one_memory))
    for later in takewhile(lambda one: one is not node, reversed(node.graph.nodes)):
        if private.is_mutable(later.target) and functionalise.written_by(later) in read:
            raise own_refusal(name, "what its backward reads is written to after it has run")


def _of_one_memory(node: fx.Node) -> list[fx.Node]:
    """Values that may show the memory that this one shows."""
    above = [node.args[0]] if node.op == "call_function" and node.args and private.may_alias(node.target) else []
    below = [one for one in node.users if private.may_alias(one.target) and one.args[0] is node]
    return [one for one in (*above, *below) if isinstance(one, fx.Node)]


def _cut_off(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    found = []
    for node in nodes:
        found.append(graph.call_function(aten.detach.default, (node,)))
        found[-1].meta = dict(node.meta)
    return found
