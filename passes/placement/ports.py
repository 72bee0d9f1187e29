"""The busiest port of a placement: no step is shorter than all its messages and reductions take to pass there.

    8 stages over 2 nodes, M micro-batches    every one: main and skips of the cut between the nodes, gradients back
    2 replicas over 2 nodes                   every stage's reduction through the same two ports

Schedules are simulated with every transfer as a lag of its own, which hides that transfers queue: where links are slow
this bound is what a step takes.
"""

from collections.abc import Sequence
from itertools import pairwise

from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster
from fxpipe.cluster.network import Port, route
from fxpipe.simulation.collectives import ring_ports
from fxpipe.staged import Staged


def busiest_port_seconds(
    graph: BlockGraph, staged: Staged, batch_size: int, cluster: Cluster, gradient_bytes: Sequence[int]
) -> float:
    """Seconds in which the busiest port has something to send; `gradient_bytes` are per block, for reductions."""
    busy: dict[Port, float] = {}
    for (a, b), num_bytes in _rank_bytes(graph, staged, batch_size).items():
        link, ports = route(cluster, a, b)
        for port in ports:
            busy[port] = busy.get(port, 0.0) + num_bytes / link.bandwidth_bytes_per_second
    for stage, ranks in enumerate(staged.stage_ranks):
        size = sum(gradient_bytes[block] for block in staged.blocks(stage)) if len(ranks) > 1 else 0
        seconds = cluster.all_reduce_seconds(ranks, size)
        for port in ring_ports(cluster, tuple(sorted(ranks))) if size else ():
            busy[port] = busy.get(port, 0.0) + seconds
    return max(busy.values(), default=0.0)


def relayed_port_seconds(
    graph: BlockGraph, staged: Staged, batch_size: int, cluster: Cluster, gradient_bytes: Sequence[int]
) -> float:
    """The same where stages in a line, one rank each, hand on whatever a later stage reads."""
    busy: dict[Port, float] = {}
    for cut, (left, right) in zip(staged.boundaries[1:], pairwise(staged.stage_ranks), strict=False):
        for edge in (edge for edge in graph.edges if isinstance(edge.producer, int)):
            readers = [consumer for consumer in edge.consumers if isinstance(consumer, int)]
            if int(edge.producer) < cut <= max(readers, default=-1):
                back = [(right[0], left[0])] if edge.requires_grad else []
                for pair in [(left[0], right[0]), *back]:
                    link, ports = route(cluster, *pair)
                    for port in ports:
                        seconds = edge.num_bytes(batch_size) / link.bandwidth_bytes_per_second
                        busy[port] = busy.get(port, 0.0) + seconds
    return max(busy.values(), default=0.0)


def _rank_bytes(graph: BlockGraph, staged: Staged, batch_size: int) -> dict[tuple[int, int], float]:
    """Bytes a step from rank to rank: a value goes once to every rank that reads it, its gradient back."""
    found: dict[tuple[int, int], float] = {}
    stage_of, ranks = staged.stage_of_block, staged.stage_ranks
    for edge in (edge for edge in graph.edges if isinstance(edge.producer, int)):
        made = ranks[stage_of[int(edge.producer)]]
        readers = {ranks[stage_of[c]] for c in edge.consumers if isinstance(c, int)} - {made}
        for reading in readers:
            parts = max(len(made), len(reading))
            size = edge.num_bytes(batch_size) / parts
            for part in range(parts):
                pair = made[part % len(made)], reading[part % len(reading)]
                for a, b in (pair, pair[::-1]) if edge.requires_grad else (pair,):
                    if a != b:
                        found[a, b] = found.get((a, b), 0.0) + size
    return found
