"""The discrete-event core: ranks that run their ops, messages that travel, collectives that wait for all.

    rank 0: run 2.0 | send 5 | run 2.0            rank 0  |2.0s   |2.0s   |
    rank 1: wait 5 | run 3.0               ->     0 -> 1          |1.0|
                                                  rank 1  |waits      |3.0s      |

Every rank is one compute stream that keeps the order of its ops; one without any is not there. Sends never block, nor
does the issue of a collective; a wait ends when its message has arrived, or its collective is over. A message's bytes
move when it is sent and its receive is posted, where some rank posts one: so they do on gloo, and by design on NCCL.
`wires` says how long messages take that share links, `collectives` when a collective runs. Where messages take time
from computation (`Link.taken_share`, `overhead_seconds`), a rank owes it from a send, the wait for a receive, or the
issue of a collective on; it pays while it waits, or else with what it computes next.
"""

import heapq
from collections.abc import Sequence
from math import inf

from fxpipe.cluster import Cluster
from fxpipe.errors import ScheduleError
from fxpipe.plan.timeline import COLLECTIVES
from fxpipe.simulate.collectives import Collective, SimulatedCollectives, taken_seconds
from fxpipe.simulate.op_lists import Op, Transfer
from fxpipe.simulate.wires import Arrival, Wires

_WAITS = {"wait", *(f"wait_{kind}" for kind in COLLECTIVES)}
_SHARED = {"send", "post", *COLLECTIVES}  # what may begin something on links


class Machine:
    """Clocks of ranks. `_ready` holds (time, rank) of the ranks that can go on."""

    def __init__(self, op_lists: Sequence[Sequence[Op]], cluster: Cluster) -> None:
        self._ops, self._cluster = op_lists, cluster
        self._takes = any(level.link.taken_share or level.link.overhead_seconds for level in cluster.levels)
        self._owed = [0.0] * len(op_lists)
        absent = {rank for rank, ops in enumerate(op_lists) if not ops}
        self._wires, self._collectives = Wires(cluster), SimulatedCollectives(cluster, absent)
        self._position = [0] * len(op_lists)
        self._ready = [(0.0, rank) for rank in range(len(op_lists))]
        self.arrival_seconds: dict[int, float] = {}  # by edge: when a message has arrived, or a collective is over
        # Edges whose receive is yet to be posted.
        self._to_post = {op.message.edge for ops in op_lists for op in ops if op.kind == "post" and op.message}
        self._held: set[int] = set()  # edges of those that are sent before
        self._waiting: dict[int, list[tuple[int, float]]] = {}  # edge -> ranks that wait, since when
        self.end_seconds = 0.0
        self.rank_ends = [0.0] * len(op_lists)
        self.waits: list[list[tuple[float, float, int]]] = [[] for _ in op_lists]  # from, to, at which op
        self.begins: list[list[float]] = [[] for _ in op_lists]  # of every action

    def run(self) -> None:
        """What happens first goes first: a rank's next op, or a message's arrival."""
        now = 0.0
        while True:
            clock = self._ready[0][0] if self._ready else inf
            if clock > now and (due := self._wires.next_seconds) <= clock:
                if due == inf:
                    break
                now = due
                for arrival in self._wires.advance(due):
                    self._arrive(arrival)
            else:
                clock, rank = heapq.heappop(self._ready)
                now = max(now, clock)
                self._advance(rank, clock)
        if self._waiting:
            raise ScheduleError(f"ranks wait forever for edges {sorted(self._waiting)}, which nobody sends in time")

    def _advance(self, rank: int, since: float) -> None:
        """Run one rank until it waits, or uses a link later than `since`: others may have something to send before."""
        clock, ops = since, self._ops[rank]
        for position in range(self._position[rank], len(ops)):
            op = ops[position]
            if clock > since and op.kind in _SHARED:
                heapq.heappush(self._ready, (clock, rank))
            elif (end := self._do(rank, op, clock)) is not None:
                if end > clock and op.kind != "run":
                    self.waits[rank].append((clock, end, position))
                clock = end
                continue
            self._position[rank] = position
            return
        self._position[rank] = len(ops)
        self._begin(rank, "", clock)
        self.rank_ends[rank] = clock
        self.end_seconds = max(self.end_seconds, clock)

    def _do(self, rank: int, op: Op, clock: float) -> float | None:
        """When the op ends that begins at `clock`; None if nobody knows yet."""
        kind = op.kind
        if kind == "run":
            if not op.seconds:
                return clock  # what takes no time pays nothing, wherever it stands
            owed, self._owed[rank] = self._owed[rank], 0.0
            return clock + op.seconds + owed
        if kind == "begin":
            self.begins[rank].append(clock)
            self._begin(rank, op.action, clock)
        elif kind == "send":
            assert op.message is not None
            self._send(rank, op.message, clock)
        elif kind == "post":
            assert op.message is not None
            self._post(op.message, clock)
        elif kind in COLLECTIVES:
            assert op.collective is not None
            self._issue(rank, op.collective, clock)
        elif kind != "none":
            assert kind in _WAITS, f"no op does {kind!r}"
            return self._wait(rank, op, clock)
        return clock

    def _wait(self, rank: int, op: Op, clock: float) -> float | None:
        awaited = op.collective or op.message
        assert awaited is not None, op
        if awaited.edge not in self.arrival_seconds:
            self._waiting.setdefault(awaited.edge, []).append((rank, clock))
            return None
        end = max(clock, self.arrival_seconds[awaited.edge])
        if op.message is not None:
            self._owe(rank, op.message)
        self._owed[rank] = max(0.0, self._owed[rank] - (end - clock))
        return end

    def _owe(self, rank: int, message: Transfer) -> None:
        if self._takes:
            self._owed[rank] += self._cluster.taken_seconds(*message.channel, message.num_bytes)

    def _begin(self, rank: int, action: str, clock: float) -> None:
        pass

    def _send(self, rank: int, message: Transfer, clock: float) -> None:
        self._owe(rank, message)
        if message.edge in self._to_post:
            self._held.add(message.edge)
        else:
            self._wires.send(clock, message.edge, message.channel, message.num_bytes)

    def _post(self, message: Transfer, clock: float) -> None:
        self._to_post.discard(message.edge)
        if message.edge in self._held:
            self._held.remove(message.edge)
            self._wires.send(clock, message.edge, message.channel, message.num_bytes)

    def _issue(self, rank: int, collective: Collective, clock: float) -> tuple[float, float] | None:
        span = self._collectives.issue(clock, rank, collective)
        if self._takes:
            self._owed[rank] += taken_seconds(self._cluster, rank, collective)
        if span is not None:
            self._finish(collective.edge, span[1])
        return span

    def _arrive(self, arrival: Arrival) -> None:
        self._finish(arrival.edge, arrival.end_seconds)

    def _finish(self, edge: int, end: float) -> None:
        self.arrival_seconds[edge] = end
        for rank, since in self._waiting.pop(edge, ()):
            heapq.heappush(self._ready, (since, rank))
