"""Stages of a pipeline of one rank: buckets of gradients, which are reduced while earlier blocks' backward goes on.

gradients, MiB    12 9 14 8 | 30 | 6 20 | 25         every bucket as soon as it has 25 MiB, from the last block on

Source: Li et al., "PyTorch Distributed", VLDB 2020.
"""

from fxpipe.costs.block_costs import BlockCosts

BUCKET_BYTES = 25 * 2**20
"""PyTorch's own."""


def buckets(costs: BlockCosts, bucket_bytes: float) -> tuple[int, ...]:
    """Boundaries of runs of blocks; those that read one weight are in one."""
    found, left = [costs.num_blocks], 0
    for block in range(costs.num_blocks - 1, 0, -1):
        left += costs.trained_bytes[block]
        if left >= bucket_bytes and not any(min(of) < block <= max(of) for of in costs.shared.values()):
            found.append(block)
            left = 0
    return (0, *reversed(found))
