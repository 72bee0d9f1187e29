"""What every unit reads and gives: stages and frozen components of a placement, before anything is traced.

stage 1      reads  h_3 (of stage 0), emb (of stage 0)
             gives  h_7 to stage 2, h_5 to stages 2 and 3
             back   the gradient of h_3 to stage 0
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from fxpipe.plan.block_graph import BlockGraph, Edge
from fxpipe.plan.staged import Staged
from passes.costs.call_bytes import UnitKey
from passes.costs.gradient_flow import GradientFlow


@dataclass
class Unit:
    """One stage or component; values by name.

    `makers` are the units that the values it reads come from, in order, `readers` those that read each value it gives.
    """

    makers: dict[str, UnitKey] = field(default_factory=dict)
    readers: dict[str, list[UnitKey]] = field(default_factory=dict)


class Dataflow(Protocol):
    """What crosses between blocks, and which of it has a gradient: of a case, or of a step to be lowered."""

    @property
    def graph(self) -> BlockGraph: ...
    @property
    def flow(self) -> GradientFlow: ...


@dataclass(frozen=True, eq=False)
class Units:
    """All units of a placement."""

    step: Dataflow
    staged: Staged

    @cached_property
    def edges(self) -> Mapping[str, Edge]:
        return {edge.name: edge for edge in self.step.graph.edges}

    @cached_property
    def components(self) -> Mapping[str, int]:
        return {component.name: number for number, component in enumerate(self.step.graph.components)}

    def unit_of(self, owner: int | str) -> UnitKey:
        """Where a block or component is."""
        return ("F", self.staged.stage_of_block[owner]) if isinstance(owner, int) else ("T", self.components[owner])

    @cached_property
    def table(self) -> Mapping[UnitKey, Unit]:
        found = {("F", stage): Unit() for stage in range(self.staged.num_stages)}
        found |= {("T", number): Unit() for number in self.components.values()}
        for edge in self.step.graph.edges:
            made = self.unit_of(edge.producer)
            readers = sorted({self.unit_of(consumer) for consumer in edge.consumers} - {made})
            for reader in readers:
                found[made].readers.setdefault(edge.name, []).append(reader)
                found[reader].makers.setdefault(edge.name, made)
        return found

    def returns_gradient(self, name: str) -> bool:
        """Whether readers of a value give a gradient back to its maker."""
        return isinstance(self.edges[name].producer, int) and self.step.flow.requires_grad(name)
