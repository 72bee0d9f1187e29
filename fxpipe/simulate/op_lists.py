"""Operations of ranks as the simulator takes them: what each does to the clock, and no tensors.

recv_h = recv(transport, 0, 8)    post    edge 8
h = wait(recv_h)                  wait    edge 8
out = stage_1_forward(h)     ->   run     its seconds
send(transport, out, 2, 9)        send    edge 9
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fxpipe.plan.timeline import COLLECTIVES
from fxpipe.simulate.collectives import Collective


class Transfer(Protocol):
    """A message as the simulator takes it: `fxpipe.plan.rank_program.Message`, or one that is only planned."""

    @property
    def edge(self) -> int: ...
    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def channel(self) -> tuple[int, int]: ...


ADAMW_BYTES = 8
"""Optimizer state per trained parameter: two float32 averages."""
_RING_STEPS = {"reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that all bytes pass a rank of a ring


class Bytes(NamedTuple):
    """What an op does to its rank's memory, by category.

    `taken` is there when it ends, `freed` no longer is; of what is `sent`, (category, bytes, edges), the op is the last
    use but these messages': it goes when they have arrived. `most` is the most beside what was held before, if what the
    op lets go has arrived by then; `most_kept` if it has not.
    """

    taken: tuple[tuple[str, int], ...] = ()
    freed: tuple[tuple[str, int], ...] = ()
    sent: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    most: int = 0
    most_kept: int = 0


class Op(NamedTuple):
    """One step of a rank.

    `kind` is "run" (takes `seconds`), "begin" (of the `action`), "send", "post" (a receive) or "wait" (of `message`),
    one of COLLECTIVES (issues `collective`) or "wait_" and one of these, or "none", which is free.
    """

    kind: str
    action: str = ""
    seconds: float = 0.0
    message: Transfer | None = None
    collective: Collective | None = None
    memory: Bytes | None = None


@dataclass(frozen=True, eq=False)
class StepOps:
    """A step: the ops of every rank, in order; `held` has what each holds all step long, bytes by category."""

    ranks: Sequence[Sequence[Op]]
    held: Sequence[Mapping[str, int]]

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks send; collectives as the rings that they may be made of."""
        sent = sum(op.message.num_bytes for ops in self.ranks for op in ops if op.kind == "send" and op.message)
        issued = (op.collective for ops in self.ranks for op in ops if op.collective and op.kind in COLLECTIVES)
        rings = {collective.edge: collective for collective in issued}.values()
        return sent + sum(_RING_STEPS[ring.kind] * (len(ring.ranks) - 1) * ring.num_bytes for ring in rings)
