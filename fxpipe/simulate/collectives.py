"""Collectives under way: when each begins and ends.

    rank 0: issue reduce 7 | run    | run | wait 7 |         7 begins when the last rank has issued it
    rank 1: run | issue reduce 7 | run    | wait 7 |         and lasts `Cluster.all_reduce_seconds`

Collectives of the same ranks run one after the other, in the order in which every one of these ranks issues them; so do
those of other ranks whose rings use a port in common, as a node's: the sums of eight stages, each over two nodes, leave
each node one by one. What messages use of the links meanwhile is not counted.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fxpipe.cluster import Cluster
from fxpipe.cluster.network import Port, route
from fxpipe.errors import ScheduleError
from fxpipe.plan.block_graph import human_bytes
from fxpipe.plan.timeline import COLLECTIVES

_SECONDS: Mapping[str, Callable[[Cluster, Sequence[int], float], float]] = {
    "reduce": Cluster.all_reduce_seconds,
    "all_gather": Cluster.all_gather_seconds,
    "reduce_scatter": Cluster.all_gather_seconds,  # the same messages the other way round
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of several ranks; `kind` is one of COLLECTIVES, `edge` its id, unlike those of messages too.

    `ranks` ascend. `num_bytes` are of the whole: all of a rank's gradients before an all-reduce or a reduce-scatter,
    everything that an all-gather has gathered.
    """

    edge: int
    kind: str
    ranks: tuple[int, ...]
    num_bytes: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{COLLECTIVES[self.kind]} of {human_bytes(self.num_bytes)} over ranks {ranks}"


class _Issued(NamedTuple):
    """A group's collectives: their edges as the first rank issues them, and how many every rank has issued."""

    order: list[int]
    counts: dict[int, int]


class SimulatedCollectives:
    """All that are under way on a cluster."""

    def __init__(self, cluster: Cluster, absent: Collection[int] = ()) -> None:
        """`absent` are ranks that nobody waits for: they do as others do."""
        self._cluster, self._absent = cluster, absent
        self._issued: dict[int, dict[int, float]] = {}  # edge -> rank -> when
        self._groups: dict[tuple[int, ...], _Issued] = {}
        self._group_of: dict[int, _Issued] = {}  # by edge: many ranks are hashed for long
        self._free: dict[tuple[int, ...] | Port, float] = {}  # by group, and by port

    def issue(self, now: float, rank: int, collective: Collective) -> tuple[float, float] | None:
        """Rank `rank` begins it at `now` seconds; its start and end, once all its ranks have issued it, else None.

        Calls come in the order of time.
        """
        group = collective.ranks
        self._keep_order(rank, collective)
        times = self._issued.setdefault(collective.edge, {})
        times[rank] = now
        if len(times) < len(self._group_of[collective.edge].counts):
            return None
        uses: list[tuple[int, ...] | Port] = [group, *ring_ports(self._cluster, group)]
        start = max(*times.values(), *(self._free.get(use, 0.0) for use in uses))
        end = start + _seconds(self._cluster, collective.kind, group, collective.num_bytes)
        self._free.update(dict.fromkeys(uses, end))
        return start, end

    def _keep_order(self, rank: int, collective: Collective) -> None:
        if collective.edge not in self._group_of:
            if collective.ranks not in self._groups:
                present = (peer for peer in collective.ranks if peer not in self._absent)
                self._groups[collective.ranks] = _Issued([], dict.fromkeys(present, 0))
            self._group_of[collective.edge] = self._groups[collective.ranks]
        order, counts = self._group_of[collective.edge]
        assert rank in counts, f"rank {rank} issues {collective}"
        count = counts[rank]
        if count == len(order):
            order.append(collective.edge)
        if order[count] != collective.edge:
            raise ScheduleError(
                f"rank {rank} issues collective {collective.edge} where another rank of {collective.ranks} has issued "
                f"{order[count]}; a group's ranks issue theirs in one order"
            )
        counts[rank] = count + 1


def taken_seconds(cluster: Cluster, rank: int, collective: Collective) -> float:
    """What a collective costs one of its ranks in computation; an all-reduce goes around twice."""
    rounds = 2 if collective.kind == "reduce" else 1
    return rounds * cluster.ring_taken_seconds(collective.ranks, rank, collective.num_bytes)


@lru_cache(maxsize=1 << 12)
def ring_ports(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Port, ...]:
    """The ports that a ring over these ranks uses."""
    hops = (route(cluster, ranks[i - 1], ranks[i])[1] for i in range(len(ranks)) if len(ranks) > 1)
    return tuple(dict.fromkeys(port for ports in hops for port in ports))


@lru_cache(maxsize=1 << 12)
def _seconds(cluster: Cluster, kind: str, ranks: tuple[int, ...], num_bytes: int) -> float:
    return _SECONDS[kind](cluster, ranks, num_bytes)
