"""Repeat one micro-batch's actions with a period, without a solver: the earliest free place for each, one by one.

    one micro-batch   rank 0  F0 .  .  F3 I3 .  .  I0      every period another one starts, and no two overlap
                      rank 1  .  F1 F2 .  .  I2 I1 .   ->  rank 0  F0 . . F3 I3 F0' . I0 F3' I3' ...
                                                           after that the ranks start as early as they can

The longer a micro-batch lives, the more of them are held at once. So a stage waits `hop` ticks for the one before it:
with half a period for two stages per rank that is the memory of 1F1B, and idle time only at the two ends (ZB-V of
Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, sections 3 and 4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_GROWTH = 1.02  # of the period, where a block does not fit


@dataclass(frozen=True)
class Operation:
    """Where and how long, and (number of an earlier operation, ticks from its start) that it waits for."""

    rank: int
    ticks: int
    needs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """Operation i starts at `starts[i]`, and again every `period` ticks."""

    period: int
    starts: tuple[int, ...]


def shortest_block(operations: Callable[[int], Sequence[Operation]], least: int) -> Block:
    """The block of the shortest period from `least` upwards in which every operation finds a place.

    Args:
        operations: those of a period, for what they need may depend on it; each after all that it needs.
    """
    period = max(least, 1)
    while (starts := placed(operations(period), period)) is None:
        period = max(period + 1, int(period * _GROWTH))
    return Block(period, starts)


def placed(operations: Sequence[Operation], period: int) -> tuple[int, ...] | None:
    starts: list[int] = []
    busy: dict[int, list[tuple[int, int]]] = {}
    for operation in operations:
        ready = max((starts[need] + gap for need, gap in operation.needs), default=0)
        taken = busy.setdefault(operation.rank, [])
        start = _free(ready, operation.ticks, taken, period)
        if start is None:
            return None
        starts.append(start)
        taken.append((start, operation.ticks))
    return tuple(starts)


def _free(ready: int, ticks: int, taken: Sequence[tuple[int, int]], period: int) -> int | None:
    """The earliest start from `ready` on whose repetitions overlap with none of those `taken`."""
    ends = (ready + (start + length - ready) % period for start, length in taken)
    for start in sorted({ready, *ends}):
        free = all((start - s) % period >= n and (s - start) % period >= ticks for s, n in taken)
        if free and ticks <= period:
            return start
    return None
