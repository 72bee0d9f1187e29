"""Repeat one micro-batch's actions with a period: the earliest free place for each, one by one.

    one micro-batch   rank 0  F0 .  .  F3 I3 .  .  I0      every period another one starts, and no two overlap
                      rank 1  .  F1 F2 .  .  I2 I1 .   ->  rank 0  F0 . . F3 I3 F0' . I0 F3' I3' ...
                                                           W wherever the rank is idle, or right before the
                                                           forward that needs its memory

The longer a micro-batch lives, the more of them are held at once. So a stage waits a hop for the one before it: with
half a period for two stages per rank that is the memory of 1F1B, and idle time only at the two ends (ZB-V of Qi et al.,
"Pipeline Parallelism with Controllable Memory", NeurIPS 2024, sections 3 and 4).
"""

from collections.abc import Sequence

from passes.schedules.job_shop import JobShop

_GROWTH = 1.02  # of the period, where a block does not fit
_MOST_HOPS = 2  # shares of a period between stages: less than half of one would not hold 1F1B's micro-batches


def block_precedences(shop: JobShop, copies: int) -> dict[int, list[int]]:
    """What operations wait for so that ranks keep the order of a repeated block, all but frozen ones and W.

    A forward waits for the weight gradients before it in that order, so that a rank holds no more than the blocks do.

    Args:
        copies: micro-batches after which the ranks of the stages repeat; a block has so many.
    """
    actions, size = shop.actions, copies * len(shop) // shop.num_microbatches
    period, first = shortest_block(shop, copies)

    def key(i: int) -> tuple[int, int, str, int]:
        rounds, place = divmod(i, size)
        return first[place] + rounds * period, actions[i].stage, actions[i].kind, actions[i].microbatch

    found: dict[int, list[int]] = {}
    for mine in shop.on_rank:
        previous, weights = list[int](), list[int]()
        for i in sorted((i for i in mine if actions[i].kind != "T"), key=key):
            if actions[i].kind == "W":
                weights.append(i)
                continue
            found[i] = previous
            if actions[i].kind == "F":
                found[i] = previous + weights
                weights = []
            previous = [i]
    return found


def shortest_block(shop: JobShop, copies: int) -> tuple[int, dict[int, int]]:
    """The shortest period in which every operation of `copies` micro-batches finds a place, and their starts.

    Operations take their places in turn, weight gradients last.
    """
    size = min(copies * len(shop) // shop.num_microbatches, len(shop))
    actions = shop.actions[:size]
    pattern = sorted(
        (i for i in range(size) if actions[i].kind != "T"),
        key=lambda i: (actions[i].microbatch, actions[i].kind == "W"),
    )
    stages: dict[int, set[int]] = {}
    load: dict[int, int] = {}
    for i in pattern:
        stages.setdefault(shop.rank[i], set()).add(actions[i].stage)
        load[shop.rank[i]] = load.get(shop.rank[i], 0) + shop.ticks[i]
    hops = max([_MOST_HOPS, *map(len, stages.values())])
    period = max([1, *load.values()])
    while (starts := _placed(shop, pattern, copies, hops, period)) is None:
        period = max(period + 1, int(period * _GROWTH))
    return period, starts


def _placed(shop: JobShop, pattern: Sequence[int], copies: int, hops: int, period: int) -> dict[int, int] | None:
    """The earliest start of each in turn; None where one finds no place."""
    actions, size, apart = shop.actions, len(shop) // shop.num_microbatches, period // copies
    starts: dict[int, int] = {}
    busy: dict[int, list[tuple[int, int]]] = {}
    for i in pattern:
        ready = starts[i - size] + apart if actions[i].microbatch else 0
        for n, _ in shop.needs[i]:
            if n in starts and actions[n].microbatch == actions[i].microbatch:
                hop = apart // hops if actions[n].stage != actions[i].stage else 0
                ready = max(ready, starts[n] + max(shop.ticks[n], hop))
        taken = busy.setdefault(shop.rank[i], [])
        start = _free(ready, shop.ticks[i], taken, period)
        if start is None:
            return None
        starts[i] = start
        taken.append((start, shop.ticks[i]))
    return starts


def _free(ready: int, ticks: int, taken: Sequence[tuple[int, int]], period: int) -> int | None:
    """The earliest start from `ready` on whose repetitions overlap with none of those `taken`."""
    ends = (ready + (start + length - ready) % period for start, length in taken)
    for start in sorted({ready, *ends}):
        free = all((start - s) % period >= n and (s - start) % period >= ticks for s, n in taken)
        if free and ticks <= period:
            return start
    return None
