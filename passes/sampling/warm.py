"""Fresh steps in another layout: the programs of an exact one become a form of those that steps end with.

displaced, 4 stages   fresh, displaced        fresh, displaced, warm     its weights are held, too
exact, 4 patches      fresh              ->
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxpipe.plan.sample_program import SampleProgram
from passes.sampling.groups import Alone


def with_warm(own: Alone, exact: Alone) -> Alone:
    """Programs and messages with the form "warm", which is the fresh one of exact programs for the same ranks."""
    (programs, messages), (others, sent) = own, exact
    of_rank = {program.rank: program for program in others}
    return [_joined(one, of_rank[one.rank]) for one in programs], {**messages, "warm": sent["fresh"]}


def _joined(own: SampleProgram, other: SampleProgram) -> SampleProgram:
    forms, inputs = {**own.forms, "warm": other.forms["fresh"]}, tuple(dict.fromkeys((*own.inputs, *other.inputs)))
    for form in forms.values():
        _take(form.graph, inputs)
    return replace(own, forms=forms, inputs=inputs, state={**own.state, **other.state})


def _take(graph: fx.Graph, inputs: Sequence[str]) -> None:
    """Have these inputs, in order, after the transport."""
    last, *others = graph.find_nodes(op="placeholder")
    there = {node.name: node for node in others}
    for name in inputs:
        with graph.inserting_after(last):
            node = there.get(name) or graph.placeholder(name)
        last.append(node)
        last = node
    graph.lint()
