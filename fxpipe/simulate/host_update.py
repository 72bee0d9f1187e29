"""An optimizer whose states are on the host: what its step takes, after all else that a rank does in a step.

device    gradients, values ---.                  .---> values
host                           '---> update there '       2 copies down, 1 up, then 28 bytes a number in its memory
"""

from fxpipe.cluster.links import host_link
from fxpipe.simulate.op_lists import Op

_COPIES = 3
_UPDATE_BYTES = 28
"""Of AdamW in float32: value, gradient and two averages are read, all but the gradient written."""
_HOST_BYTES_PER_SECOND = 20e9
"""Assumed of a rank's share of a host; one core of a server did 5 of torch's loop over AdamW, 42 of the fused one."""


def host_update(device: str, num_elements: int, num_bytes: int) -> Op:
    """The update of so many numbers, as an op that ends a rank's step.

    Args:
        device: a cluster's name of it, which says how it is joined to its host.
        num_bytes: of the weights, and as many of their gradients.
    """
    link = host_link(device)
    copied = _COPIES * num_bytes / link.bandwidth_bytes_per_second + (2 * link.latency_seconds if num_bytes else 0.0)
    return Op("run", seconds=copied + _UPDATE_BYTES * num_elements / _HOST_BYTES_PER_SECOND)
