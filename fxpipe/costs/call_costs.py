"""What the graphs that rank programs call are made of, block by block, and the seconds a cost model makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from fxpipe.costs import CostModel, NodeCost, Seconds

PARTS = ("forward", "backward", "backward_input", "backward_weight")

Block = int | str | None
"""A block's index or a component's name; None for nodes that any unit computes for itself."""


@dataclass(frozen=True)
class CallCost:
    """One graph: which part of a unit (one of PARTS), for how many samples, and the captured nodes of each block.

    `recompute` says that the backward makes the forward's values again.
    """

    part: str
    num_samples: int
    blocks: Mapping[Block, tuple[str, ...]]
    recompute: bool = False

    def seconds(self, model: CostModel, costs: Mapping[str, NodeCost], of_nodes: Seconds) -> dict[Block, float]:
        """Seconds of each block in this graph; `costs` and `of_nodes` are by node, the latter at `num_samples`."""
        assert self.part in PARTS, self.part
        whole = of_nodes.forward if self.part == "forward" else of_nodes.backward

        def of_node(name: str) -> float:
            again = of_nodes.forward[name] if self.recompute and self.part in ("backward", "backward_input") else 0.0
            if self.part in ("forward", "backward"):
                return whole[name] + again
            return whole[name] * self._share(model, costs[name]) + again

        return {block: sum(map(of_node, nodes)) for block, nodes in self.blocks.items()}

    def _share(self, model: CostModel, cost: NodeCost) -> float:
        """The part of a node's backward that is its input's, or its weights', gradient."""
        inputs = model.backward_input_seconds(cost, self.num_samples)
        weights = model.backward_weight_seconds(cost, self.num_samples)
        of_inputs = inputs / (inputs + weights) if inputs + weights else 1.0
        return of_inputs if self.part == "backward_input" else 1.0 - of_inputs


def drawing_seconds(model: CostModel, target: str, num_bytes: int) -> float:
    """Seconds to draw random numbers: on a processor they count, and a profile knows; on devices they hardly do."""
    speeds = getattr(model, "speeds", None)
    return float(speeds.drawing_seconds(target, num_bytes)) if speeds else 0.0


def moving_seconds(model: CostModel, bytes_read: int, bytes_written: int) -> float:
    """Seconds of one kernel that only moves memory, such as the sum of two gradients; as measured, in a profile."""
    speeds = getattr(model, "speeds", None)
    if speeds:
        return float((bytes_read + bytes_written) / speeds.moving)
    cost = NodeCost(bytes_read=sympy.Integer(bytes_read), bytes_written=sympy.Integer(bytes_written))
    return model.forward_seconds(cost, 1)
