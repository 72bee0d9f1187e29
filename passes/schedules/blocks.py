"""Repeat one micro-batch's actions with a period: the earliest free place for each, one by one.

    one micro-batch   rank 0  F0 .  .  F3 I3 .  .  I0      every period another one starts, and no two overlap
                      rank 1  .  F1 F2 .  .  I2 I1 .   ->  rank 0  F0 . . F3 I3 F0' . I0 F3' I3' ...
                                                           W wherever the rank is idle, or right before the
                                                           forward that needs its memory

The longer a micro-batch lives, the more of them are held at once. So a stage waits a hop for the one before it: with
half a period for two stages per rank that is the memory of 1F1B, and idle time only at the two ends (ZB-V of Qi et al.,
"Pipeline Parallelism with Controllable Memory", NeurIPS 2024, sections 3 and 4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.schedules.job_shop import JobShop

_GROWTH = 1.02  # of the period, where a block does not fit
_MOST_HOPS = 2  # shares of a period between stages: less than half of one would not hold 1F1B's micro-batches


@dataclass(frozen=True)
class Operation:
    """Where and how long, and (number of an earlier operation, ticks from its start) that it waits for."""

    rank: int
    ticks: int
    needs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BuildingBlock:
    """Operation i starts at `starts[i]`, and again every `period` ticks."""

    period: int
    starts: tuple[int, ...]


def block_precedences(shop: JobShop, copies: int) -> dict[int, list[int]]:
    """What operations wait for so that ranks keep the order of a repeated block, all but frozen ones and W.

    A forward waits for the weight gradients before it in that order, so that a rank holds no more than the blocks do.

    Args:
        copies: micro-batches after which the ranks of the stages repeat; a block has so many.
    """
    actions, size = shop.actions, len(shop) // shop.num_microbatches
    several = [i for i in range(min(copies * size, len(shop))) if actions[i].kind != "T"]
    if not several:
        return {}
    pattern = sorted(several, key=lambda i: (actions[i].microbatch, actions[i].kind == "W"))
    block = _block(shop, pattern, copies)
    first = dict(zip(pattern, block.starts, strict=True))

    def key(i: int) -> tuple[int, int, str, int]:
        rounds, place = divmod(i, copies * size)
        return first[place] + rounds * block.period, actions[i].stage, actions[i].kind, actions[i].microbatch

    found: dict[int, list[int]] = {}
    for mine in shop.on_rank:
        _keep_order(shop, sorted((i for i in mine if actions[i].kind != "T"), key=key), found)
    return found


def _keep_order(shop: JobShop, order: Sequence[int], found: dict[int, list[int]]) -> None:
    previous, weights = -1, list[int]()
    for i in order:
        kind = shop.actions[i].kind
        if kind == "W":
            weights.append(i)
            continue
        found[i] = [previous] if previous >= 0 else []
        if kind == "F":
            found[i] += weights
            weights.clear()
        previous = i


def _block(shop: JobShop, pattern: Sequence[int], copies: int) -> BuildingBlock:
    index = {i: k for k, i in enumerate(pattern)}
    size = len(shop) // shop.num_microbatches
    stages: dict[int, set[int]] = {}
    load: dict[int, int] = {}
    for i in pattern:
        stages.setdefault(shop.rank[i], set()).add(shop.actions[i].stage)
        load[shop.rank[i]] = load.get(shop.rank[i], 0) + shop.ticks[i]
    hops = max(_MOST_HOPS, *map(len, stages.values()))

    def operations(period: int) -> list[Operation]:
        apart = period // copies
        found = []
        for i in pattern:
            action = shop.actions[i]
            same = [n for n, _ in shop.needs[i] if n in index and shop.actions[n].microbatch == action.microbatch]
            hop = {n: apart // hops if shop.actions[n].stage != action.stage else 0 for n in same}
            gaps = [(index[n], max(shop.ticks[n], hop[n])) for n in same]
            if action.microbatch:
                gaps.append((index[i - size], apart))
            found.append(Operation(shop.rank[i], shop.ticks[i], tuple(gaps)))
        return found

    return shortest_block(operations, max(load.values()))


def shortest_block(operations: Callable[[int], Sequence[Operation]], least: int) -> BuildingBlock:
    """The block of the shortest period from `least` upwards in which every operation finds a place.

    Args:
        operations: those of a period, for what they need may depend on it; each after all that it needs.
    """
    period = max(least, 1)
    while (starts := placed(operations(period), period)) is None:
        period = max(period + 1, int(period * _GROWTH))
    return BuildingBlock(period, starts)


def placed(operations: Sequence[Operation], period: int) -> tuple[int, ...] | None:
    """The earliest start of each in turn; None where one finds no place."""
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
