"""Simulation: walk the rank programs with costs instead of tensors.

    rank 0: run 2.0 | send 5 | run 2.0            rank 0  |2.0s   |2.0s   |
    rank 1: wait 5 | run 3.0               ->     0 -> 1          |1.0|
                                                  rank 1  |waits      |3.0s      |

Every rank is one compute stream that keeps the order of its program. Every channel sends one message at a time, first
in first out. Sends never block; a wait ends when its message has arrived. Ranks advance in the order of their clocks.
"""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe import ops
from fxpipe.call_costs import moving_seconds
from fxpipe.costs import CostModel
from fxpipe.rank_program import Message, RankProgram
from fxpipe.timeline import Event, kind_of

Transfer = Callable[[int, int, int], float]
"""Seconds of one message: (source rank, target rank, bytes)."""


@dataclass(frozen=True, slots=True)
class Op:
    """One node of a rank program: `run` takes time (`seconds`, or those of the blocks of `call`), `begin`, `send`,
    `wait` do what they say, `none` is free."""

    kind: str
    call: str = ""
    seconds: float = 0.0
    message: Message | None = None


@dataclass(frozen=True)
class Walked:
    """All events, and when each node of each rank's program started and ended."""

    events: tuple[Event, ...]
    node_seconds: tuple[tuple[tuple[float, float], ...], ...]
    arrival_seconds: Mapping[int, float]

    @property
    def makespan_seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)


def program_ops(programs: Sequence[RankProgram], messages: Sequence[Message], model: CostModel) -> list[list[Op]]:
    """One op per node of every rank's program."""
    by_edge = {message.edge: message for message in messages}
    return [[_op(node, program, by_edge, model) for node in program.graph.nodes] for program in programs]


def _op(node: fx.Node, program: RankProgram, by_edge: Mapping[int, Message], model: CostModel) -> Op:
    if node.op == "call_module":
        return Op("run", call=str(node.target))
    if node.target is ops.begin:
        return Op("begin", call=str(node.args[1]))
    if node.target is ops.send:
        return Op("send", message=by_edge[node.args[3]])  # type: ignore[index]
    if node.target is ops.wait:
        (receive,) = node.all_input_nodes
        return Op("wait", message=by_edge[receive.args[2]])  # type: ignore[index]
    if node.target in (ops.accumulate, torch.ops.aten.add.Tensor):
        size = value_bytes(node.all_input_nodes[-1], program)
        return Op("run", seconds=moving_seconds(model, 2 * size, size))
    return Op("none")


def value_bytes(node: fx.Node, program: RankProgram) -> int:
    """Bytes of a tensor of a rank program, or of all tensors of a list that a stage graph returns."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if node.target is torch.ops.aten.add.Tensor or node.target is ops.accumulate:
        return value_bytes(node.all_input_nodes[-1], program)
    call, index = node.args
    assert isinstance(call, fx.Node), node.format_node()
    (output,) = program.modules[str(call.target)].find_nodes(op="output")
    return sum(item.meta["val"].nbytes for item in output.args[0][index])


def walk(op_lists: Sequence[Sequence[Op]], seconds: Mapping[str, float], transfer: Transfer) -> Walked:
    """Run all programs to their end; `seconds` is by graph name."""
    return _Machine(op_lists, seconds, transfer).run()


class _Machine:
    """Clocks of ranks and channels. `_ready` holds (time, rank) of the ranks that can go on."""

    def __init__(self, op_lists: Sequence[Sequence[Op]], seconds: Mapping[str, float], transfer: Transfer) -> None:
        self._ops, self._seconds, self._transfer = op_lists, seconds, transfer
        self._events: list[Event] = []
        self._nodes: list[list[tuple[float, float]]] = [[] for _ in op_lists]
        self._arrival: dict[int, float] = {}
        self._waiting: dict[int, tuple[int, float]] = {}  # edge -> rank that waits, since when
        self._channel_free: dict[tuple[int, int], float] = {}
        self._action: list[tuple[str, float]] = [("", 0.0) for _ in op_lists]
        self._ready = [(0.0, rank) for rank in range(len(op_lists))]

    def run(self) -> Walked:
        while self._ready:
            clock, rank = heapq.heappop(self._ready)
            self._advance(rank, clock)
        assert not self._waiting, f"ranks wait forever for edges {sorted(self._waiting)}"
        nodes = tuple(map(tuple, self._nodes))
        return Walked(tuple(sorted(self._events, key=_by_time)), nodes, self._arrival)

    def _advance(self, rank: int, clock: float) -> None:
        """Run one rank until time passes for it: others may have something to do before."""
        nodes = self._nodes[rank]
        for op in self._ops[rank][len(nodes) :]:
            end = clock
            if op.kind == "begin":
                self._begin(rank, op.call, clock)
            elif op.kind == "run":
                end += op.seconds + (self._seconds[op.call] if op.call else 0.0)
            elif op.kind == "send":
                self._send(rank, op, clock)
            elif op.kind == "wait":
                assert op.message is not None
                if op.message.edge not in self._arrival:
                    self._waiting[op.message.edge] = rank, clock
                    return
                end = max(clock, self._arrival[op.message.edge])
                self._wait(rank, op.message, clock, end)
            nodes.append((clock, end))
            if end > clock:
                heapq.heappush(self._ready, (end, rank))
                return
        self._begin(rank, "", clock)

    def _begin(self, rank: int, action: str, clock: float) -> None:
        name, start = self._action[rank]
        if name:
            self._events.append(Event(rank, name, kind_of(name), start, clock))
        self._action[rank] = action, clock

    def _send(self, rank: int, op: Op, clock: float) -> None:
        message = op.message
        assert message is not None
        start = max(clock, self._channel_free.get(message.channel, 0.0))
        end = start + self._transfer(message.src, message.dst, message.num_bytes)
        self._channel_free[message.channel] = self._arrival[message.edge] = end
        name = self._action[rank][0]
        sent = Event(rank, name, "transfer", start, end, message.dst, message.edge, message.num_bytes, str(message))
        self._events.append(sent)
        if message.edge in self._waiting:
            waiter, since = self._waiting.pop(message.edge)
            heapq.heappush(self._ready, (since, waiter))

    def _wait(self, rank: int, message: Message, start: float, end: float) -> None:
        name = self._action[rank][0]
        self._events.append(
            Event(rank, name, "wait", start, end, message.src, message.edge, message.num_bytes, str(message))
        )


def _by_time(event: Event) -> tuple[float, int, bool, float]:
    return event.start_seconds, event.rank, event.kind in ("wait", "transfer"), event.end_seconds


def noisy_makespans(
    op_lists: Sequence[Sequence[Op]],
    blocks: Mapping[str, Mapping[int | str | None, float]],
    transfer: Transfer,
    num_runs: int,
    seed: int,
    noise: float = 0.1,
) -> tuple[float, ...]:
    """Makespans, sorted, when every block's time is wrong by a factor of its own, up to `noise`, all step long."""
    generator = random.Random(seed)
    keys = list(dict.fromkeys(key for times in blocks.values() for key in times))
    found = []
    for _ in range(num_runs):
        factor = {key: 1 + generator.uniform(-noise, noise) for key in keys}
        seconds = {name: sum(t * factor[key] for key, t in times.items()) for name, times in blocks.items()}
        found.append(walk(op_lists, seconds, transfer).makespan_seconds)
    return tuple(sorted(found))
