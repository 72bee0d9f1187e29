"""Seconds of a denoiser's operations, forward."""

import operator
from collections.abc import Iterable

import torch
from torch import fx

from cost_models.flops import node_costs
from fxpipe.costs.model import CostModel, node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.plan import displaced_ops, ops, row_ops

_VIEWS = (operator.getitem, ops.slice_batch, row_ops.edge_rows)


def operation_seconds(model: CostModel, nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """Of every operation, by its value in `meta["val"]`; those that are none of ATen's move bytes alone, or nothing."""
    operations = [node for node in nodes if node.op == "call_function" and node.target not in _VIEWS]
    of_aten = [node for node in operations if isinstance(node.target, torch._ops.OpOverload)]
    for read in {operand for node in of_aten for operand in (node, *node.all_input_nodes)}:
        read.meta["requires_grad"] = False
    costs = node_costs(of_aten)
    found = dict(zip(costs, node_seconds(model, CostTable.of(costs.values()), 1).forward.tolist(), strict=True))
    for node in operations:
        value = (node.args[1] if node.target is displaced_ops.put else node).meta.get("val")  # type: ignore[union-attr]
        if node not in found and isinstance(value, torch.Tensor):
            found[node] = model.moving_seconds(value.nbytes, value.nbytes)
    return found
