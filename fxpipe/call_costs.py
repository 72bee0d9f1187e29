"""What the graphs that rank programs call cost, block by block, and the seconds a cost model makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from fxpipe.costs import CostModel, NodeCost

PARTS = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class CallCost:
    """One graph: which part of a unit (one of PARTS), for how many samples, and the cost of its nodes by block.

    A block's key is its index or a component's name; None holds the nodes that any unit computes for itself.
    """

    part: str
    num_samples: int
    blocks: Mapping[int | str | None, tuple[NodeCost, ...]]

    def seconds(self, model: CostModel) -> dict[int | str | None, float]:
        """Seconds of each block in this graph."""
        assert self.part in PARTS, self.part
        of_node = getattr(model, f"{self.part}_seconds")
        return {key: sum(of_node(cost, self.num_samples) for cost in costs) for key, costs in self.blocks.items()}


def moving_seconds(model: CostModel, bytes_read: int, bytes_written: int) -> float:
    """Seconds of one kernel that only moves memory, such as the sum of two gradients."""
    cost = NodeCost(bytes_read=sympy.Integer(bytes_read), bytes_written=sympy.Integer(bytes_written))
    return model.forward_seconds(cost, 1)
