"""Seconds of every block for one micro-batch: what placements and schedules are made for."""

from dataclasses import dataclass

from fxpipe.costs.block_costs import BlockCosts


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of every block, forward and backward, and of every component, for one micro-batch of `num_samples`.

    `input_gradient` is the part of each backward that others wait for where it is split; half where left out.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    components: tuple[float, ...]
    num_samples: int
    input_gradient: tuple[float, ...] = ()

    @staticmethod
    def of(costs: BlockCosts, num_samples: int) -> "BlockTimes":
        """Times for a micro-batch of so many samples."""
        times = costs.at(num_samples)
        whole = times.forward_seconds, times.backward_seconds, times.component_seconds
        return BlockTimes(*whole, num_samples, times.input_gradient_seconds)

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))
