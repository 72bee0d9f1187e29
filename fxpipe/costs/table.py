"""The costs of all nodes of a graph as arrays, for cost models that take them all at once.

conv: 4.1 G*s FLOPs, ...                  forward_flops   [4.1e9, 0, ...] at one sample
silu: 2.6 M*s bytes, ...        ->        groups          [(bfloat16, convolution), (bfloat16, None), ...]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxpipe.costs import COUNT_NAMES, CostModel, GraphCostModel, Kind, NodeCost
from fxpipe.costs.polynomials import Floats, Polynomials


@dataclass(frozen=True, eq=False)
class CostTable:
    """The cost of every node of a graph, by name."""

    costs: Mapping[str, NodeCost]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The place of every node in the arrays."""
        return {name: position for position, name in enumerate(self.costs)}

    @cached_property
    def groups(self) -> tuple[tuple[torch.dtype | None, Kind | None], ...]:
        """The types and kinds there are: what devices treat alike."""
        return tuple(dict.fromkeys((cost.dtype, cost.kind) for cost in self.costs.values()))

    @cached_property
    def group(self) -> NDArray[np.intp]:
        """The group of every node."""
        numbers = {group: number for number, group in enumerate(self.groups)}
        return np.array([numbers[cost.dtype, cost.kind] for cost in self.costs.values()], dtype=np.intp)

    @cached_property
    def _counts(self) -> Polynomials:
        return Polynomials(getattr(cost, name) for name in COUNT_NAMES for cost in self.costs.values())

    def counts(self, num_samples: int) -> dict[str, Floats]:
        """Every count of `NodeCost` by name, in FLOPs and bytes: a number per node."""
        values = self._counts.at(num_samples).reshape(len(COUNT_NAMES), -1)
        return dict(zip(COUNT_NAMES, values, strict=True))


@dataclass(frozen=True, eq=False)
class PartSeconds:
    """Seconds of every node in the order of a table: forward, and the two parts of the backward."""

    forward: Floats
    backward_input: Floats
    backward_weight: Floats


SecondsAt = Callable[[int], PartSeconds]
"""The seconds at a number of samples."""


@runtime_checkable
class TableCostModel(Protocol):
    """A cost model that takes the nodes of a graph all at once."""

    def of_table(self, graph: fx.Graph, table: CostTable) -> SecondsAt:
        """The seconds of these nodes; refuses a graph it does not know."""
        ...


def seconds_of_table(model: CostModel, graph: fx.Graph, table: CostTable) -> SecondsAt:
    """Any cost model's seconds of all nodes, in the fastest way it offers; those of `fxpipe.costs.node_seconds`."""
    if isinstance(model, TableCostModel) and not _is_changed(type(model)):
        return model.of_table(graph, table)
    return lambda num_samples: _one_by_one(model, graph, table, num_samples)


def _is_changed(given: type) -> bool:
    """Whether a subclass computes the seconds of a node in a way that its inherited `of_table` does not know of."""
    names = {"forward_seconds", "backward_input_seconds", "backward_weight_seconds", "backward_seconds", "node_seconds"}
    for base in given.__mro__:
        if "of_table" in vars(base):
            return False
        if names & set(vars(base)):
            return True
    return False


def _one_by_one(model: CostModel, graph: fx.Graph, table: CostTable, num_samples: int) -> PartSeconds:
    costs = table.costs.values()
    inputs = np.array([model.backward_input_seconds(cost, num_samples) for cost in costs])
    weights = np.array([model.backward_weight_seconds(cost, num_samples) for cost in costs])
    if not isinstance(model, GraphCostModel):
        return PartSeconds(np.array([model.forward_seconds(cost, num_samples) for cost in costs]), inputs, weights)
    known = model.node_seconds(graph, table.costs, num_samples)
    forward, backward = (np.array([of[name] for name in table.costs]) for of in (known.forward, known.backward))
    return PartSeconds(forward, *shared_out(backward, inputs, weights))


def shared_out(backward: Floats, inputs: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Whole backwards in two parts, in the proportions of others: all of it the inputs' where there are none."""
    both = inputs + weights
    part = np.divide(inputs, both, out=np.ones_like(both), where=both > 0)
    return backward * part, backward * (1 - part)
