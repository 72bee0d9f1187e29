"""The costs of all nodes of a graph as arrays: what cost models take them by.

conv: 4.1 G*s FLOPs, ...                  forward_flops   [4.1e9, 0, ...] at one sample
silu: 2.6 M*s bytes, ...        ->        groups          [(bfloat16, convolution), (bfloat16, None), ...]
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxpipe.capture.fingerprint import graph_fingerprint
from fxpipe.costs import COUNT_NAMES, NodeCost, OperationKind
from fxpipe.costs.polynomials import Floats, Polynomials


@dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """The counts of `NodeCost` at a number of samples, in FLOPs and bytes: a number per node of a table."""

    forward_flops: Floats
    backward_input_flops: Floats
    backward_weight_flops: Floats
    bytes_read: Floats
    bytes_written: Floats
    backward_input_bytes: Floats
    backward_weight_bytes: Floats


@dataclass(frozen=True, eq=False, repr=False)
class CostTable(Mapping[str, NodeCost]):
    """The cost of every node of `graph`, by name; None where the costs are of no graph's nodes.

    The arrays have a number per node, in this order.
    """

    costs: Mapping[str, NodeCost]
    graph: fx.Graph | None = None

    @classmethod
    def of(cls, costs: Iterable[NodeCost]) -> "CostTable":
        """Costs of no graph, named by their places."""
        return cls({str(place): cost for place, cost in enumerate(costs)})

    def __getitem__(self, name: str) -> NodeCost:
        return self.costs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.costs)

    def __len__(self) -> int:
        return len(self.costs)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The place of every node in the arrays."""
        return {name: position for position, name in enumerate(self.costs)}

    def positions(self, names: Iterable[str]) -> NDArray[np.intp]:
        """The places of some nodes."""
        return np.array([self.position[name] for name in names], dtype=np.intp)

    def by_name(self, values: Floats) -> dict[str, float]:
        """An array, node by node."""
        return dict(zip(self.costs, values.tolist(), strict=True))

    def counts(self, num_samples: int) -> Counts:
        """What every node costs for so many samples."""
        values = self._counts.at(num_samples).reshape(len(COUNT_NAMES), -1)
        return Counts(**dict(zip(COUNT_NAMES, values, strict=True)))

    @cached_property
    def groups(self) -> tuple[tuple[torch.dtype | None, OperationKind | None], ...]:
        """The types and kinds there are: what devices treat alike."""
        return tuple(dict.fromkeys((cost.dtype, cost.kind) for cost in self.costs.values()))

    @cached_property
    def group(self) -> NDArray[np.intp]:
        """The group of every node."""
        numbers = {group: number for number, group in enumerate(self.groups)}
        return np.array([numbers[cost.dtype, cost.kind] for cost in self.costs.values()], dtype=np.intp)

    @cached_property
    def fingerprint(self) -> str:
        """Of the graph, for models that know one graph only; empty where there is none."""
        return graph_fingerprint(self.graph) if self.graph else ""

    @cached_property
    def _counts(self) -> Polynomials:
        return Polynomials(getattr(cost, name) for name in COUNT_NAMES for cost in self.costs.values())
