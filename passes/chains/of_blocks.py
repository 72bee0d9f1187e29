"""The chain of a captured step's blocks on a cluster.

    block graph   0 --main--> 1 --main--> 2 --main--> 3      across the cut before block 2 go main and skip: stages
                  '-------------skip----------^              send to the next one only, so a skip is passed on
    cluster       8x8xA100+EFA      a stage of 8 replicas: all-reduce within a node; 8 messages share a node's port

Replicas of a stage are neighbouring ranks. Sums over blocks count a tied weight, and a value that two blocks keep, in
each of them.
"""

from collections.abc import Iterable

from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster
from fxpipe.cluster.links import Link
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.memory import ADAMW_BYTES
from passes.chains.chain import Chain

_SMALL, _LARGE = 1 << 20, 1 << 30  # bytes: collectives change their algorithm with size; these two give a line


def chain_of(
    graph: BlockGraph,
    costs: BlockCosts,
    cluster: Cluster,
    num_devices: int,
    *,
    replicas: Iterable[int] | None = None,
    optimizer_bytes: int = ADAMW_BYTES,
) -> Chain:
    """The chain of all blocks, with links for stages of so many `replicas`: the divisors of `num_devices` if left out.

    `optimizer_bytes` are those of a trained weight's optimizer state. Frozen components are not in the chain.

    Raises:
        CompileError: the cluster has fewer devices.
    """
    cluster.require(num_devices)
    counts = [r for r in range(1, num_devices + 1) if num_devices % r == 0] if replicas is None else list(replicas)
    elements = zip(costs.parameter_bytes, costs.trained_bytes, costs.trained_elements, strict=True)

    def seconds(num_samples: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        at = costs.at(num_samples)
        return at.forward_seconds, at.backward_seconds

    return Chain(
        seconds,
        cut_bytes(graph, gradients=False),
        cut_bytes(graph, gradients=True),
        tuple(map(float, costs.trained_bytes)),
        tuple(map(float, costs.saved_bytes(1))),
        tuple(float(held + gradient + optimizer_bytes * count) for held, gradient, count in elements),
        {r: message_link(cluster, num_devices, r) for r in counts},
        {r: all_reduce_link(cluster, num_devices, r) for r in counts if r > 1},
    )


def cut_bytes(graph: BlockGraph, gradients: bool) -> tuple[float, ...]:
    """Bytes per sample across the cut before every block and after the last: of values, or of gradients back."""
    crossing = [0.0] * (len(graph.blocks) + 1)
    for edge in graph.edges:
        readers = [c for c in edge.consumers if isinstance(c, int)]
        if isinstance(edge.producer, int) and readers and (edge.requires_grad or not gradients):
            for position in range(edge.producer + 1, max(readers) + 1):
                crossing[position] += edge.bytes_per_sample
    return tuple(crossing)


def message_link(cluster: Cluster, num_devices: int, replicas: int) -> Link:
    """The slowest link from a stage to the next when all stages send at once."""
    if 2 * replicas > num_devices:  # no next stage: no message is ever sent
        return Link(f"{replicas} replicas", 1.0, 0.0)
    pairs = [(rank, rank + replicas, _LARGE) for rank in range(num_devices - replicas)]
    latency = max(cluster.transfer_seconds(a, b, 1) for a, b, _ in pairs)
    slowest = max(cluster.concurrent_seconds(pairs))
    return Link(f"{replicas} replicas", _LARGE / (slowest - latency), latency)


def all_reduce_link(cluster: Cluster, num_devices: int, replicas: int) -> Link:
    """Gradient bytes over seconds of the slowest stage's all-reduce, from a small and a large one."""
    groups = [range(first, first + replicas) for first in range(0, num_devices - replicas + 1, replicas)]
    small, large = (max(cluster.all_reduce_seconds(group, size) for group in groups) for size in (_SMALL, _LARGE))
    bandwidth = (_LARGE - _SMALL) / (large - small)
    return Link(f"{replicas} replicas", bandwidth, max(0.0, small - _SMALL / bandwidth))
