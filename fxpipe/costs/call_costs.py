"""What the graphs that rank programs call are made of, block by block, and the seconds a cost model makes of it.

stage_1_backward = {block 4: (conv, silu), block 5: (linear,)}     ->     {block 4: 2.1 ms, block 5: 0.8 ms}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fxpipe.costs.model import NodeSeconds
from fxpipe.costs.polynomials import Floats
from fxpipe.costs.table import CostTable

Part = Literal["forward", "backward", "backward_input", "backward_weight"]

Block = int | str | None
"""A block's index or a component's name; None for nodes that any unit computes for itself."""


@dataclass(frozen=True)
class CallCost:
    """One graph: which part of a unit, for how many samples, and the captured nodes of each block.

    The backward computes the nodes in `again` anew, where it is whole or gives input gradients.
    """

    part: Part
    num_samples: int
    blocks: Mapping[Block, tuple[str, ...]]
    again: frozenset[str] = frozenset()

    def seconds(self, table: CostTable, of_nodes: NodeSeconds) -> dict[Block, float]:
        """Seconds of each block in this graph; `of_nodes` are those of the table at `num_samples`."""
        taken: Floats = getattr(of_nodes, self.part)
        again = self.again if self.part in ("backward", "backward_input") else ()
        found = {}
        for block, nodes in self.blocks.items():
            anew = table.positions([name for name in nodes if name in again])
            found[block] = float(taken[table.positions(nodes)].sum() + of_nodes.forward[anew].sum())
        return found
