"""Equal pipelines of which some stand for the others: what is walked first, since it is a small part of a large world.

32 pipelines of 2 ranks on 8 nodes of 8     each within a node                the first stands for all
 8 pipelines of 8 ranks, one in every node  all of them share nodes' ports    none stands for others
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import mul

import networkx as nx

from fxpipe.cluster import Cluster
from fxpipe.simulate.collectives import ring_ports


def stand_ins(cluster: Cluster, pipelines: Sequence[Sequence[int]]) -> list[int]:
    """The numbers of pipelines that are as good as all: those that share ports with each other, the first of each kind.

    Micro-batches of the first pipelines are the largest, so a step of these is about as long as that of all, and what
    all exchange at its end apart from sums over replicas comes on top.
    """
    ports = [{(level, number) for level, _, number in ring_ports(cluster, tuple(sorted(of)))} for of in pipelines]
    sharing = nx.Graph((number, port) for number, used in enumerate(ports) for port in used)
    sharing.add_nodes_from(range(len(pipelines)))
    first: dict[Hashable, list[int]] = {}
    for component in nx.connected_components(sharing):
        numbers = sorted(node for node in component if isinstance(node, int))
        kind = tuple(sorted(_kind(cluster, pipelines[number]) for number in numbers))
        first[kind] = min(first.get(kind, numbers), numbers)
    return sorted(number for numbers in first.values() for number in numbers)


def _kind(cluster: Cluster, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Which places are in one member of each level of the cluster, the members numbered as they come."""
    found = []
    for span in accumulate((level.size for level in cluster.levels), mul):
        members: dict[int, int] = {}
        found.append(tuple(members.setdefault(rank // span, len(members)) for rank in ranks))
    return tuple(found)
