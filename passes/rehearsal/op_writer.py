"""Op lists of all ranks, written action by action: what the simulator walks where there are no rank programs.

writer.begin(0, "0F0"); writer.run(0, 0.2); writer.send(m)          rank 0: begin 0F0, run 0.2 s, send 0
writer.begin(1, "1F0"); writer.wait(m); writer.run(1, 0.2)    ->    rank 1: begin 1F0, wait 0, run 0.2 s
"""

from collections.abc import Sequence
from itertools import count

import torch

from fxpipe.rank_program import Message
from fxpipe.simulation.collectives import Collective
from fxpipe.simulation.op_lists import Op
from fxpipe.timeline import END

_STEPS = {"reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that all bytes pass a rank


class OpWriter:
    """The ops of every rank; messages and collectives are numbered as they are made."""

    def __init__(self, world_size: int) -> None:
        self.ops: list[list[Op]] = [[] for _ in range(world_size)]
        self.wire_bytes = 0
        self._edges = count()

    def begin(self, rank: int, action: str) -> None:
        self.ops[rank].append(Op("begin", action))

    def run(self, rank: int, seconds: float) -> None:
        self.ops[rank].append(Op("run", seconds=seconds))

    def message(self, source: int, target: int, num_bytes: int, name: str, kind: str) -> Message:
        """A message to be sent and waited for; all its bytes go over wires."""
        self.wire_bytes += num_bytes
        return Message(next(self._edges), source, target, None, name, -1, kind, (num_bytes,), torch.uint8)

    def send(self, message: Message) -> None:
        self.ops[message.src].append(Op("send", message=message))

    def wait(self, message: Message) -> None:
        self.ops[message.dst].append(Op("wait", message=message))

    def collective(self, kind: str, ranks: Sequence[int], num_bytes: int) -> Collective:
        """A collective to be issued and waited for on all its ranks; counted as the rings that it may be made of."""
        ordered = tuple(sorted(ranks))
        self.wire_bytes += _STEPS[kind] * (len(ordered) - 1) * num_bytes
        return Collective(next(self._edges), kind, ordered, num_bytes)

    def issue(self, rank: int, collective: Collective) -> None:
        self.ops[rank].append(Op(collective.kind, collective=collective))

    def wait_for(self, rank: int, collective: Collective) -> None:
        self.ops[rank].append(Op(f"wait_{collective.kind}", collective=collective))

    def end(self, rank: int) -> None:
        """What follows is after the last action."""
        self.begin(rank, END)
