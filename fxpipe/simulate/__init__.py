"""Simulation: walk the operations of all ranks with costs instead of tensors, and keep what happens when.

    rank 0: begin 0F0 | run 2 ms | send h | wait g | ...         rank 0 |0F0|      |0B0  |
    rank 1: begin 1F0 | wait h | run 2 ms | send g | ...   ->    rank 1     |1F0|1B0|

op_lists       what ranks do, as the simulator takes it      machine      ranks, messages and collectives in time
wires          messages that share ports                     collectives  sums that wait for all
rank_memory    bytes over time, from op lists                host_update  the optimizer on the host
sample_ops     programs of sampling as op lists             repeated     results on tensors without data
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from fxpipe.cluster import Cluster
from fxpipe.plan.timeline import NOT_ACTIONS, Event, RankMemory, Timeline, kind_of
from fxpipe.simulate.collectives import Collective
from fxpipe.simulate.machine import Machine
from fxpipe.simulate.op_lists import Op, StepOps, Transfer
from fxpipe.simulate.rank_memory import levels, rank_memory
from fxpipe.simulate.wires import Arrival


@dataclass(frozen=True)
class Clock:
    """A step as it goes: its seconds, when each rank waits or is done and the bytes it holds then, when each of its
    actions starts to compute, and the most bytes it holds at once."""

    seconds: float
    idle: tuple[tuple[tuple[float, float], ...], ...]
    idle_bytes: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    rank_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(self.rank_bytes)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Of every rank."""
        return tuple(sum(end - start for start, end in idle) for idle in self.idle)

    @property
    def idle_share(self) -> float:
        """Of all ranks' seconds."""
        return sum(self.idle_seconds) / (self.seconds * len(self.idle) or 1.0)


def simulate(step: StepOps, cluster: Cluster) -> Clock:
    """Run a step's ops to their end, without keeping what happens when; a rank without ops is never idle."""
    machine = Machine(step.ranks, cluster)
    machine.run()
    end, arrivals = machine.end_seconds, None if cluster.keeps_sent else machine.arrival_seconds
    bytes_of = zip(step.ranks, step.held, machine.begins, strict=True)
    found = [list(levels(ops, sum(held.values()), begins, arrivals)) for ops, held, begins in bytes_of]
    idle: list[list[_Idle]] = []
    for waits, last, of_rank in zip(machine.waits, machine.rank_ends, found, strict=True):
        if not of_rank:
            idle.append([])
            continue
        spans = [(start, stop, of_rank[place][1]) for start, stop, place in waits]
        idle.append(_joined([*spans, (last, end, of_rank[-1][1])]))
    starts = tuple(tuple(_starts(begins, waits)) for begins, waits in zip(machine.begins, machine.waits, strict=True))
    most = tuple(max((during for during, _ in of_rank), default=0) for of_rank in found)
    times = tuple(tuple((start, stop) for start, stop, _ in spans) for spans in idle)
    return Clock(end, times, tuple(tuple(size for *_, size in spans) for spans in idle), starts, most)


_Idle = tuple[float, float, int]
"""From, to, and the bytes held meanwhile."""


def _joined(spans: Sequence[_Idle]) -> list[_Idle]:
    """Waits that follow each other at once as one."""
    found: list[_Idle] = []
    for start, end, size in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end, max(found[-1][2], size)
        elif start < end:
            found.append((start, end, size))
    return found


def _starts(begins: Sequence[float], waits: Sequence[tuple[float, float, int]]) -> Iterator[float]:
    """When actions compute that begin at these seconds: after the waits that they begin with, and none of the next."""
    ends = {start: end for start, end, _ in waits}
    for begin, following in pairwise([*begins, inf]):
        while begin < following and begin in ends:
            begin = ends[begin]
        yield begin


def timeline(step: StepOps, cluster: Cluster) -> Timeline:
    """The events and the memory of a step's ops."""
    walked = walk(step.ranks, cluster)
    arrivals = None if cluster.keeps_sent else walked.arrival_seconds
    ranks = enumerate(zip(step.ranks, step.held, walked.op_seconds, strict=True))
    memory = tuple(rank_memory(rank, ops, held, seconds, arrivals) for rank, (ops, held, seconds) in ranks)
    return walked.timeline(memory)


def walk(op_lists: Sequence[Sequence[Op]], cluster: Cluster) -> "RecordingMachine":
    """Run one list of ops per rank to its end."""
    machine = RecordingMachine(op_lists, cluster)
    machine.run()
    return machine


class RecordingMachine(Machine):
    """A machine that keeps what it does: events, and when each op of each rank started and ended."""

    def __init__(self, op_lists: Sequence[Sequence[Op]], cluster: Cluster) -> None:
        super().__init__(op_lists, cluster)
        self.op_seconds: list[list[tuple[float, float]]] = [[] for _ in op_lists]
        self._events: list[Event] = []
        self._action: list[tuple[str, float]] = [("", 0.0) for _ in op_lists]
        self._sent: dict[int, tuple[str, Transfer]] = {}
        self._issued: dict[tuple[int, int], str] = {}  # (collective's edge, rank) -> action

    def timeline(self, memory: tuple[RankMemory, ...] = ()) -> Timeline:
        """The events as a step of all ranks."""
        return Timeline(tuple(sorted(self._events, key=_by_time)), len(self.op_seconds), memory)

    def _do(self, rank: int, op: Op, clock: float) -> float | None:
        end = super()._do(rank, op, clock)
        if end is not None:
            self.op_seconds[rank].append((clock, end))
        return end

    def _begin(self, rank: int, action: str, clock: float) -> None:
        name, start = self._action[rank]
        if name:
            self._events.append(Event(rank, name, kind_of(name), start, clock))
        self._action[rank] = action, clock

    def _send(self, rank: int, message: Transfer, clock: float) -> None:
        super()._send(rank, message, clock)
        self._sent[message.edge] = self._action[rank][0], message

    def _arrive(self, arrival: Arrival) -> None:
        super()._arrive(arrival)
        edge, start, end = arrival
        action, m = self._sent[edge]
        self._events.append(Event(m.src, action, "transfer", start, end, m.dst, edge, m.num_bytes, str(m)))

    def _issue(self, rank: int, collective: Collective, clock: float) -> tuple[float, float] | None:
        self._issued[collective.edge, rank] = self._action[rank][0]
        span = super()._issue(rank, collective, clock)
        if span is not None:
            what = -1, collective.edge, collective.num_bytes
            for peer in collective.ranks:
                action = self._issued[collective.edge, peer]
                self._events.append(Event(peer, action, collective.kind, *span, *what, str(collective)))
        return span

    def _wait(self, rank: int, op: Op, clock: float) -> float | None:
        end = super()._wait(rank, op, clock)
        if end is not None:
            awaited = op.collective or op.message
            assert awaited is not None
            source = -1 if op.message is None else op.message.src
            what = source, awaited.edge, awaited.num_bytes, str(awaited)
            self._events.append(Event(rank, self._action[rank][0], "wait", clock, end, *what))
        return end


def _by_time(event: Event) -> tuple[float, int, bool, float]:
    return event.start_seconds, event.rank, event.kind in NOT_ACTIONS, event.end_seconds
