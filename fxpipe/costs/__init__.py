"""What a node costs, as functions of the batch size, and the protocol that turns costs into seconds.

Counts are sympy expressions of the batch symbol; every free symbol stands for the number of samples. One
multiply-accumulate is two FLOPs. Types only: formulas are in `cost_models.flops`, devices in `cost_models.devices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, Protocol, runtime_checkable

import sympy
import torch
from torch import fx

Kind = Literal["convolution", "matrix", "attention"]
"""What multiplies: devices reach another part of their peak with each."""


@lru_cache(maxsize=1 << 16)
def evaluate(expression: sympy.Expr, num_samples: int) -> int:
    """The expression's value when every symbol is `num_samples`."""
    if expression.is_Integer:
        return int(expression)
    coefficient, rest = expression.as_coeff_Mul()
    if rest.is_Symbol and coefficient.is_Integer:  # nearly every count; `subs` takes ten times as long
        return int(coefficient) * num_samples
    return int(expression.subs(dict.fromkeys(expression.free_symbols, num_samples)))


@dataclass(frozen=True, slots=True)
class Counts:
    """A `NodeCost` at one batch size: plain integers, in FLOPs and bytes."""

    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    bytes_read: int
    bytes_written: int
    backward_input_bytes: int
    backward_weight_bytes: int


@dataclass(frozen=True, slots=True)
class NodeCost:
    """FLOPs and bytes of one graph node, or of several added up.

    The backward is in two parts: gradients of activations (*input*) and of parameters (*weight*). The forward's bytes
    are split into read and written; a backward part has one number for both. `dtype` is the type of the result, in
    which FLOPs are done (the widest one in a sum); None where nothing is computed. `kind` is None without FLOPs, and in
    a sum of several kinds. `uncosted` names operators whose FLOPs nobody counts: there are none of them in the counts.
    """

    forward_flops: sympy.Expr = sympy.S.Zero
    backward_input_flops: sympy.Expr = sympy.S.Zero
    backward_weight_flops: sympy.Expr = sympy.S.Zero
    bytes_read: sympy.Expr = sympy.S.Zero
    bytes_written: sympy.Expr = sympy.S.Zero
    backward_input_bytes: sympy.Expr = sympy.S.Zero
    backward_weight_bytes: sympy.Expr = sympy.S.Zero
    dtype: torch.dtype | None = None
    kind: Kind | None = None
    uncosted: frozenset[str] = frozenset()

    def __add__(self, other: NodeCost) -> NodeCost:
        return total_cost((self, other))

    def at(self, num_samples: int) -> Counts:
        """The counts for a batch of `num_samples` samples."""
        return Counts(**{name: evaluate(getattr(self, name), num_samples) for name in COUNT_NAMES})


COUNT_NAMES = tuple(field.name for field in fields(Counts))


def total_cost(costs: Iterable[NodeCost]) -> NodeCost:
    """The sum of many costs, in one step per field: far faster than adding pairwise."""
    terms = list(costs)
    dtype = None
    for term in terms:
        if term.dtype is not None:
            dtype = term.dtype if dtype is None else torch.promote_types(dtype, term.dtype)
    kinds = {term.kind for term in terms if term.kind is not None}
    sums = {name: sympy.Add(*(getattr(term, name) for term in terms)) for name in COUNT_NAMES}
    uncosted = frozenset().union(*(term.uncosted for term in terms))
    return NodeCost(**sums, dtype=dtype, kind=kinds.pop() if len(kinds) == 1 else None, uncosted=uncosted)


def uncosted_ops(costs: Iterable[NodeCost]) -> tuple[str, ...]:
    """The operators, by name, whose FLOPs these costs leave out."""
    return tuple(sorted({name for cost in costs for name in cost.uncosted}))


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of the nodes of one graph by name, forward and whole backward, at one number of samples."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]


class CostModel(Protocol):
    """Seconds of one node on one device. A block's seconds are the sum over its nodes.

    Time is not linear in the counts, so a sum's cost does not give the sum's time: it gives the time of one fused
    kernel, a lower bound.
    """

    def forward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds of the node's forward on `num_samples` samples."""
        ...

    def backward_input_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds to compute the gradients of the node's activations."""
        ...

    def backward_weight_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds to compute the gradients of the node's parameters."""
        ...

    def backward_seconds(self, cost: NodeCost, num_samples: int) -> float:
        """Seconds of the whole backward: both parts."""
        ...


@runtime_checkable
class GraphCostModel(Protocol):
    """A cost model that knows the nodes of one graph apart, as one made from measurements does."""

    def node_seconds(self, graph: fx.Graph, costs: Mapping[str, NodeCost], num_samples: int) -> Seconds:
        """Seconds of every node in `costs`; refuses a graph it does not know."""
        ...


def node_seconds(model: CostModel, graph: fx.Graph, costs: Mapping[str, NodeCost], num_samples: int) -> Seconds:
    """Seconds of every node, by name: the model's own where it knows the graph, else from each node's cost."""
    if isinstance(model, GraphCostModel):
        return model.node_seconds(graph, costs, num_samples)
    forward = {name: model.forward_seconds(cost, num_samples) for name, cost in costs.items()}
    return Seconds(forward, {name: model.backward_seconds(cost, num_samples) for name, cost in costs.items()})
