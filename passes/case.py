"""What is planned: one costed step, and the machines it runs on.

blocks       seconds, weights, saved bytes at any micro-batch size      `fxpipe.costs.block_costs`
frozen       seconds and temporaries of every layer of every component  `passes.costs.frozen_layers`
calls        bytes of the forward and backward of any stage             `passes.costs.call_bytes`
work         what a schedule of any stages must contain                 `passes.costs.work`
machines     a cluster, a number of ranks, a memory limit per rank
"""

from dataclasses import dataclass

from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.costs.model import CostModel
from fxpipe.plan.block_graph import BlockGraph
from passes.costs.call_bytes import CallBytesOf
from passes.costs.frozen_layers import FrozenLayers
from passes.costs.gradient_flow import GradientFlow
from passes.costs.work import StepWork


@dataclass(frozen=True, eq=False)
class Case:
    """A step of `batch_size` samples on the first `world_size` ranks of a cluster; `limit_bytes` are of one rank.

    Unless `divisible` its frozen part mixes samples.
    """

    graph: BlockGraph
    costs: BlockCosts
    frozen: FrozenLayers
    work: StepWork
    calls: CallBytesOf
    model: CostModel
    cluster: Cluster
    world_size: int
    batch_size: int
    limit_bytes: int | None = None
    divisible: bool = True

    @property
    def flow(self) -> GradientFlow:
        """Where gradients flow."""
        return self.work.flow

    @property
    def blocks(self) -> range:
        return range(len(self.graph.blocks))

    def adding_seconds(self, num_bytes: int) -> float:
        """Adding so many bytes of gradients to those of earlier micro-batches."""
        return self.model.moving_seconds(2 * num_bytes, num_bytes)

    def fits(self, peak_bytes: int) -> bool:
        return self.limit_bytes is None or peak_bytes <= self.limit_bytes
