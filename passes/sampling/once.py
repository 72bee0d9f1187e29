"""Once in a call: what depends on its conditions alone, such as keys and values of text, is no work of every step.

every form   k = linear(text, w)             once     k = linear(text, w); v = ...; return (k, v)
             attention(q, k, v)              forms    k = known_in_call[0]; attention(q, k, v)

Forms are taken apart as they are written, so patches, groups, and turns of stages that make a value alike share it.
Nothing here sends or waits, so each rank may compute it again when it likes, for the same bits.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpipe.plan import ops, row_ops
from fxpipe.plan.sample_program import KNOWN, SampleProgram
from passes.sampling.fresh import CONSTANTS

_VIEWS = (operator.getitem, row_ops.cut_rows, ops.slice_batch)


def with_once(programs: Sequence[SampleProgram], of_call: Collection[str]) -> tuple[SampleProgram, ...]:
    """These programs with `once`, and without it in their forms, whose graphs are changed.

    Args:
        of_call: inputs that are taken not to change from step to step.
    """
    return tuple(_Once(of_call).taken_from(program) for program in programs)


@dataclass(frozen=True)
class _Source:
    """What a value is made of. `free`: it is a view of an input or of the model's tensors."""

    late: bool = False
    of_call: bool = False
    of_weights: bool = False
    free: bool = False

    @property
    def is_kept(self) -> bool:
        """What is made of weights alone is not: their casts, say, would be held beside them."""
        return not self.late and not self.free and (self.of_call or not self.of_weights)


class _Once:
    """The graph of a program's forms together; equal operations on equal operands are one."""

    def __init__(self, of_call: Collection[str]) -> None:
        self.of_call, self.graph = of_call, fx.Graph()
        self._nodes: dict[tuple[str, Any, str], fx.Node] = {}
        self._returned: dict[fx.Node, int] = {}

    def taken_from(self, program: SampleProgram) -> SampleProgram:
        graphs = [form.graph for form in program.forms.values()]
        kept = [self._kept(graph) for graph in graphs]
        if not self._returned:
            return program
        for graph, values in zip(graphs, kept, strict=True):
            _read(graph, values)
        self.graph.output(tuple(self._returned))
        self.graph.lint()
        return replace(program, once=self.graph)

    def _kept(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """The nodes that are read from `once`, and where it returns them."""
        sources: dict[fx.Node, _Source] = {}
        for node in graph.nodes:
            sources[node] = self._source(node, [sources[operand] for operand in node.all_input_nodes])
        kept = [n for n, s in sources.items() if s.is_kept and not all(sources[user].is_kept for user in n.users)]
        needed = set(kept)
        for node in reversed(graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node in needed:
                copies[node] = self._copy(node, copies)
        return {node: self._returned.setdefault(copies[node], len(self._returned)) for node in kept}

    def _source(self, node: fx.Node, operands: Sequence[_Source]) -> _Source:
        if node.op == "placeholder":
            return _Source(late=node.name not in self.of_call, of_call=True, free=True)
        if node.op == "get_attr":
            return _Source(of_weights=not str(node.target).startswith(CONSTANTS), free=True)
        views = node.target in _VIEWS or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)
        return _Source(
            late=not _is_pure(node) or any(one.late for one in operands),
            of_call=any(one.of_call for one in operands),
            of_weights=any(one.of_weights for one in operands),
            free=views and all(one.free for one in operands),
        )

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        args = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        key = node.op, node.target, repr(args)
        if key not in self._nodes:
            self._nodes[key] = self.graph.node_copy(node, copies.__getitem__)
        return self._nodes[key]


def _is_pure(node: fx.Node) -> bool:
    """Whether equal operands give equal results, and nothing else happens."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.op == "call_function" and node.target in _VIEWS


def _read(graph: fx.Graph, kept: dict[fx.Node, int]) -> None:
    """Read these values instead of computing them."""
    placeholders = graph.find_nodes(op="placeholder")
    last = next((node.prev for node in placeholders if node.name == "carried"), placeholders[-1])
    with graph.inserting_after(last):
        known = graph.placeholder(KNOWN)
    for node, index in kept.items():
        with graph.inserting_before(node):
            value = graph.call_function(operator.getitem, (known, index))
        value.meta = {key: node.meta[key] for key in ("val", "path") if key in node.meta}
        node.replace_all_uses_with(value)
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and (node.op == "get_attr" or _is_pure(node)):
            graph.erase_node(node)
    graph.lint()
