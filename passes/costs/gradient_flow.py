"""Through which values of the captured graph gradients flow, as autograd has it, without tracing any stage.

    y = linear(x, w, b)           y: w, b                x is an input
    m, i = max(y, 1)              m: y                   indices have no gradient
    z = mul(m, zeros_like(y))     z: m                   nor has what is only made like another value

The histories of an operation's results lead to the operands that get a gradient. What a capture marks as
`requires_grad` goes by types alone, and is certain only where it says no.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.capture import Capture
from fxpipe.capture.reach import reached
from passes.costs.operations import Operations

Place = tuple[str, int]
"""A node's name, and which of its tensors."""


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """To which values each value hands its gradient: none, where it isn't among `sources`. `trained` are the
    placeholders of parameters that require grad."""

    sources: Mapping[Place, frozenset[Place]]
    trained: frozenset[str]

    def requires_grad(self, name: str) -> bool:
        """Whether a gradient flows through a node's value, which is one tensor."""
        return name in self.trained or (name, 0) in self.sources

    def weights_behind(self, values: Iterable[str], nodes: Collection[str]) -> set[str]:
        """The parameters' placeholders that get a gradient from some of `values` by way of `nodes` alone."""

        def behind(place: Place) -> Iterable[Place]:
            return self.sources.get(place, ()) if place[0] in nodes and place[0] not in self.trained else ()

        return {name for name, _ in reached([(name, 0) for name in values], behind) if name in self.trained}


def gradient_flow(capture: Capture, device: torch.device) -> GradientFlow:
    """Of the whole graph, whose autocasts are for `device`; an operation's does not depend on the batch."""
    operations = Operations(capture, device)
    trained: set[str] = set()
    sources: dict[Place, frozenset[Place]] = {}
    for node in capture.graph.nodes:
        if node.op == "placeholder" and node.meta["requires_grad"]:
            trained.add(node.name)
            sources[node.name, 0] = frozenset()
        elif node.op == "call_function" and node.meta["requires_grad"]:
            sources |= _of_node(operations, node, sources)
    return GradientFlow({place: found for place, found in sources.items() if found}, frozenset(trained))


def _of_node(
    operations: Operations, node: fx.Node, sources: Mapping[Place, frozenset[Place]]
) -> Mapping[Place, frozenset[Place]]:
    """The operands that get a gradient of each of a node's tensors."""
    facts = operations.facts(node)
    if facts.item is not None:
        source, first = facts.item[0].name, facts.item[1]
        tensors = range(len(facts.lines))
        return {(node.name, i): sources[source, first + i] for i in tensors if (source, first + i) in sources}
    places = [(argument.name, item) for argument, item in facts.operands]
    if not any(place in sources for place in places):
        return {}
    found = [frozenset(places[i] for i in of if places[i] in sources) for of in operations.gradient_paths(node)]
    return {(node.name, i): those for i, those in enumerate(found) if those}
