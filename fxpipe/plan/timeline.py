"""Timelines: what every rank does when, predicted by the simulator or recorded from a run, in the same terms.

rank 0  |0F0 |0F1 |wait|0B0   |0B1   |          an action's event lasts from its begin to the next action's,
rank 1       |wait|1F0 |1B0   |...              waits inside it are events of their own
0 -> 1       |main h[0]|main h[1]|              a transfer lasts from its send to its arrival
0 and 1      |reduce|                           so does a collective, from its start to its end, on each of its ranks
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fxpipe.plan.block_graph import human_bytes

COLLECTIVES = {"reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
NOT_ACTIONS = ("wait", "transfer", *COLLECTIVES)
END = "end of step"


@dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time on a rank, in seconds from the start of the step.

    `kind` is an action's letter, "end" (what follows the last action), "wait" (inside the action, for the message
    `edge` of rank `peer`, or for the collective `edge`, where `peer` is -1), "transfer" (of the message `edge` to rank
    `peer`, sent in the action), or a collective's (`edge`, issued in the action). `label` names what is moved.
    """

    rank: int
    action: str
    kind: str
    start_seconds: float
    end_seconds: float
    peer: int = -1
    edge: int = -1
    num_bytes: int = 0
    label: str = ""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank over a step.

    `points` are (seconds, bytes), each valid until the next; `at_peak` says what the peak consists of.
    """

    rank: int
    points: tuple[tuple[float, int], ...]
    at_peak: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks; `memory` is there in predictions only."""

    events: tuple[Event, ...]
    num_ranks: int
    memory: tuple[RankMemory, ...] = ()

    @cached_property
    def actions(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind not in NOT_ACTIONS)

    @cached_property
    def waits(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind == "wait")

    @cached_property
    def transfers(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind == "transfer")

    @cached_property
    def collectives(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind in COLLECTIVES)

    @cached_property
    def makespan_seconds(self) -> float:
        """From the start of the step until all ranks are done; what is read a step later may be under way yet."""
        return max((e.end_seconds for e in self.events if e.kind != "transfer"), default=0.0)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank computes: its actions less the waits inside."""
        busy = [0.0] * self.num_ranks
        for event in self.actions:
            busy[event.rank] += event.seconds
        for event in self.waits:
            busy[event.rank] -= event.seconds
        return tuple(busy)

    @property
    def bubble_ratio(self) -> float:
        """Idle share of ranks x makespan."""
        total = self.makespan_seconds * self.num_ranks
        return 1.0 - sum(self.busy_seconds) / total if total else 0.0

    @cached_property
    def channel_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes of the messages sent over every directed channel."""
        total: dict[tuple[int, int], int] = {}
        for event in self.transfers:
            channel = event.rank, event.peer
            total[channel] = total.get(channel, 0) + event.num_bytes
        return dict(sorted(total.items()))

    @cached_property
    def reduced_bytes(self) -> tuple[int, ...]:
        """Bytes of the collectives that each rank takes part in, as they are before or after: not those on the wire."""
        total = [0] * self.num_ranks
        for event in self.collectives:
            total[event.rank] += event.num_bytes
        return tuple(total)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most memory each rank needs at once."""
        return tuple(memory.peak_bytes for memory in self.memory)

    def __str__(self) -> str:
        lines = [f"step: {human_seconds(self.makespan_seconds)}, bubbles {self.bubble_ratio:.1%}"]
        for rank, busy in enumerate(self.busy_seconds):
            share = busy / self.makespan_seconds if self.makespan_seconds else 0.0
            peak = f", peak {human_bytes(self.peak_bytes[rank])}" if self.memory else ""
            lines.append(f"  rank {rank}: busy {human_seconds(busy)} ({share:.1%}){peak}")
        return "\n".join(lines)


def kind_of(action: str) -> str:
    """The letter of an action's text, a forward's where that is a word; "end" for what follows the last action."""
    return "end" if action == END else next((c for c in action if c.isupper()), "F")


def human_seconds(seconds: float) -> str:
    """`1.234 s`, `12.3 ms` or `45.6 us`."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
