"""The work a schedule must contain, from the block graph and the stages alone: nothing is traced.

    stage 0: frozen prefix            0F                backward {1}, input_grad {}, weight_grad {1}
    stage 1: adapters           ->    1F 1B             edges {(0, 1)}, grad_edges {}

A stage has a backward where a value that it hands on, or the loss, requires grad, and a gradient goes from there to a
value that it reads or to a weight of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from fxpipe.capture import Capture
from fxpipe.plan.actions import Work
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged
from fxpipe.remembered import remembered
from passes.costs.gradient_flow import GradientFlow, gradient_flow

_CPU = torch.device("cpu")

Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class StepWork:
    """A captured step, of which `of` gives the work of any stages. What it finds of blocks that form a stage it keeps,
    as planners ask for the same ones again and again."""

    graph: BlockGraph
    flow: GradientFlow
    loss: str

    @staticmethod
    def in_capture(capture: Capture, graph: BlockGraph, device: torch.device = _CPU) -> "StepWork":
        return StepWork(graph, gradient_flow(capture, device), capture.result.name)

    @cached_property
    def of_blocks(self) -> Work:
        """The work of one micro-batch, were each block a stage."""
        count = len(self.graph.blocks)
        return self.of(Staged(tuple(range(count + 1)), ((0,),) * count, "", False, 1), 1)

    def of(self, staged: Staged, num_microbatches: int) -> Work:
        """The work of these stages, with the frozen components' in every micro-batch."""
        graph, stage_of = self.graph, staged.stage_of_block
        stages = [stage for stage in range(staged.num_stages) if staged.blocks(stage)]
        returns = {s: self._stage(staged.blocks(s)) for s in stages}
        between = [(e, stage_of[e.producer], {stage_of[c] for c in e.consumers if isinstance(c, int)})
                   for e in graph.edges if isinstance(e.producer, int)]  # fmt: skip
        pairs = [(e, a, b) for e, a, readers in between for b in readers if a != b]
        grads = frozenset((b, a) for e, a, b in pairs if returns[b][0] and self.flow.requires_grad(e.name))
        weights = frozenset(s for s in stages if returns[s][1])
        frozen_edges, component_edges = _of_components(graph, stage_of)
        return Work(
            num_stages=staged.num_stages,
            num_microbatches=num_microbatches,
            num_components=len(graph.components),
            empty=frozenset(range(staged.num_stages)) - frozenset(stages),
            backward=weights | {s for s, _ in grads},
            input_grad=frozenset(s for s, _ in grads),
            weight_grad=weights,
            edges=frozenset((a, b) for _, a, b in pairs),
            grad_edges=grads,
            frozen_edges=frozen_edges,
            component_edges=component_edges,
        )

    @remembered
    def _stage(self, blocks: range) -> tuple[bool, bool]:
        """Of blocks that form a stage: whether what they hand on requires grad, and whether weights get some of it."""
        nodes = {name for block in blocks for name in self.graph.blocks[block].nodes}
        values = [name for name in self._returns(blocks, nodes) if self.flow.requires_grad(name)]
        return bool(values), bool(self.flow.weights_behind(values, nodes))

    def _returns(self, blocks: range, nodes: set[str]) -> Iterator[str]:
        for edge in self.graph.edges:
            if edge.producer in blocks and any(consumer not in blocks for consumer in edge.consumers):
                yield edge.name
        if self.loss in nodes:
            yield self.loss


def _of_components(graph: BlockGraph, stage_of: tuple[int, ...]) -> tuple[Pairs, Pairs]:
    """What stages and other components read of frozen components."""
    number = {component.name: index for index, component in enumerate(graph.components)}
    edges = [(number[e.producer], c) for e in graph.edges if isinstance(e.producer, str) for c in e.consumers]
    frozen_edges = frozenset((a, stage_of[c]) for a, c in edges if isinstance(c, int))
    return frozen_edges, frozenset((a, number[c]) for a, c in edges if isinstance(c, str))
