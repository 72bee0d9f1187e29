"""The busiest port of a placement: no step is shorter than all its messages take to pass there.

    8 stages over 2 nodes, M micro-batches    every one: main and skips of the cut between the nodes, gradients back

Schedules are simulated with every transfer as a lag of its own, which hides that transfers queue: where links are slow
this bound is what a step takes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import lcm

from fxpipe.cluster import Cluster
from fxpipe.cluster.network import Port, route
from fxpipe.plan.block_graph import BlockGraph, Edge
from fxpipe.plan.staged import Staged

Ranks = tuple[int, ...]
_Hop = tuple[Ranks, Ranks, bool]


def message_seconds(graph: BlockGraph, staged: Staged, sizes: Sequence[int], cluster: Cluster) -> float:
    """Seconds in which the busiest port has something to send, reductions aside; `sizes` are samples of every
    micro-batch."""
    busy: dict[Port, float] = {}
    for (a, b), num_bytes in rank_bytes(graph, staged, sizes).items():
        link, ports = route(cluster, a, b)
        for port in ports:
            busy[port] = busy.get(port, 0.0) + num_bytes / link.bandwidth_bytes_per_second
    return max(busy.values(), default=0.0)


def rank_bytes(graph: BlockGraph, staged: Staged, sizes: Sequence[int]) -> dict[tuple[int, int], float]:
    """Bytes a step from rank to rank: a value one way, its gradient back."""
    there, back = Counter[_Hop](), Counter[_Hop]()  # bytes of a sample, or of a value that all samples share
    for edge in (edge for edge in graph.edges if isinstance(edge.producer, int)):
        for made, reading in _hops(edge, staged):
            there[made, reading, edge.batched] += edge.bytes_per_sample
            back[made, reading, edge.batched] += edge.requires_grad * edge.bytes_per_sample
    found, samples = dict[tuple[int, int], float](), dict[int, list[int]]()
    for hop, forward in there.items():
        made, reading, batched = hop
        turns = lcm(len(made), len(reading))
        if turns not in samples:
            samples[turns] = [sum(sizes[turn::turns]) for turn in range(turns)]
        for turn, num_samples in enumerate(samples[turns]):
            a, b = made[turn % len(made)], reading[turn % len(reading)]
            if a != b:
                times = num_samples if batched else 1
                found[a, b] = found.get((a, b), 0.0) + times * forward
                found[b, a] = found.get((b, a), 0.0) + times * back[hop]
    return found


def _hops(edge: Edge, staged: Staged) -> Iterator[tuple[Ranks, Ranks]]:
    """The ranks between which a value goes."""
    ranks, stages = staged.stage_ranks, [staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)]
    assert isinstance(edge.producer, int)
    made = staged.stage_of_block[edge.producer]
    return ((ranks[made], reading) for reading in {ranks[stage] for stage in stages} - {ranks[made]})
