"""What a node costs, as functions of the batch size; what devices make of it is in the files beside this one.

    conv    4.1 G*s FLOPs, 2.6 M*s bytes       node costs -> `table`, arrays -> `model`, seconds on a device
    silu    0 FLOPs, 5.2 M*s bytes             -> `block_costs`, for planners

Counts are sympy expressions of the batch symbol; every free symbol stands for the number of samples. One
multiply-accumulate is two FLOPs. Formulas are in `cost_models.flops`, devices in `cost_models.devices`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import sympy
import torch

OperationKind = Literal["convolution", "matrix", "attention"]
"""What multiplies: devices reach another part of their peak with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    kind: OperationKind | None = None
    uncosted: frozenset[str] = frozenset()


COUNT_NAMES = tuple(field.name for field in fields(NodeCost) if field.default is sympy.S.Zero)
"""The fields that are counts, in FLOPs or bytes."""


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
