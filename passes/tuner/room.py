"""Room for the next batch's frozen work: idle time in which it may take so many bytes at once.

idle of a rank      0.2 s, 3 GiB left     0.1 s, 1 GiB left     0.3 s, 5 GiB left
4 samples, 2 GiB    0.2                                         0.3
16 samples, 8 GiB   none: not even once training is over
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.plan.staged import Staged
from fxpipe.simulate import Clock
from passes.case import Case
from passes.fill.problem import Interval
from passes.tuner.memory import made_bytes


@dataclass(frozen=True, eq=False)
class Room:
    """Idle time of every rank in which an operation of frozen work may take up to `most` bytes; None: any."""

    idle: tuple[tuple[Interval, ...], ...]
    most: float | None

    @staticmethod
    def everywhere(clock: Clock, most: float | None = None) -> Room:
        return Room(clock.idle, most)

    @staticmethod
    def within(clock: Clock, left: Sequence[int], most: float) -> Room | None:
        """Where what is `left` on a rank beside the bytes it holds is enough; None where that is not so at the end."""
        idle = []
        for spans, held, size in zip(clock.idle, clock.idle_bytes, left, strict=True):
            if held and size - held[-1] < most and spans[-1][1] == clock.seconds:
                return None
            idle.append(tuple(span for span, used in zip(spans, held, strict=True) if size - used >= most))
        return Room(tuple(idle), most)

    @cached_property
    def idle_seconds(self) -> tuple[float, ...]:
        """Of every rank."""
        return tuple(sum(end - start for start, end in spans) for spans in self.idle)


def rooms(case: Case, staged: Staged, clock: Clock) -> list[Room]:
    """For as many samples at once as a batch has, and ever fewer; all idle time where memory is not limited."""
    limit = case.limit_bytes
    if limit is None:
        return [Room.everywhere(clock)]
    weights, made = case.costs.component_bytes, made_bytes(case, staged, case.batch_size)
    left = [
        limit - made[rank] - sum(w for c, w in enumerate(weights) if staged.may_run(c, rank))
        for rank in range(staged.world_size)
    ]
    sizes = [case.batch_size, *(2**k for k in reversed(range((case.batch_size - 1).bit_length())))]
    found = [Room.within(clock, left, case.frozen.most_bytes(size)) for size in sizes]
    return [room for room in found if room is not None] or [Room.everywhere(clock, 0.0)]
