"""A pattern that repeats, and the orders of any number of micro-batches that follow from it.

starts 0 10 | 24 38, period 30        rank 0: F0 F1 B0 F2 B1 ...      in the order of start + micro-batch * period
                                ->    rank 1: F0 B0 F1 B1 F2 ...      every rank then starts as early as it can
"""

from dataclasses import dataclass, replace

from fxpipe.schedule import Action
from passes.schedules.job_shop import JobShop, Orders, job_shop, run
from passes.schedules.problem import Problem

_SAMPLE, _SAMPLE_PER_RANK = 24, 4  # micro-batches that show how a pattern goes on


@dataclass(frozen=True)
class Pattern:
    """Operation i of micro-batch c starts at `starts[c][i]` ticks; the next as many micro-batches a period later."""

    period: int
    starts: tuple[tuple[int, ...], ...]

    @property
    def copies(self) -> int:
        """Micro-batches of a period."""
        return len(self.starts)

    @property
    def flight(self) -> int:
        """The ticks from the first start of a micro-batch to its last."""
        return max(max(starts) - min(starts) for starts in self.starts)

    def start(self, operation: int, microbatch: int) -> int:
        rounds, copy = divmod(microbatch, self.copies)
        return self.starts[copy][operation] + rounds * self.period


def one_microbatch(problem: Problem, split: frozenset[int]) -> JobShop:
    """What repeats: the operations of a single micro-batch without frozen work."""
    work = replace(
        problem.work, num_microbatches=1, num_components=0, frozen_edges=frozenset(), component_edges=frozenset()
    )
    seconds = {kind: times for kind, times in problem.seconds.items() if kind != "T"}
    return job_shop(replace(problem, work=work, seconds=seconds, frozen_ranks=()), split)


def unrolled_starts(shop: JobShop, one: JobShop, pattern: Pattern) -> list[int]:
    """When the pattern starts every operation of `shop`; frozen work comes before everything, one after the other."""
    before = min(map(min, pattern.starts), default=0) - len(shop)
    return [
        before + i if a.kind == "T" else pattern.start(one.index[Action(a.stage, a.kind, 0)], a.microbatch)
        for i, a in enumerate(shop.actions)
    ]


def unrolled(shop: JobShop, starts: list[int]) -> Orders:
    """Every rank in the order of `starts`; among equals an operation of no length goes first."""
    key = [(start, shop.ticks[i] > 0, i) for i, start in enumerate(starts)]
    return tuple(tuple(sorted(mine, key=key.__getitem__)) for mine in shop.on_rank)


def unrolled_orders(shop: JobShop, one: JobShop, pattern: Pattern) -> Orders:
    """The orders of the pattern as it is."""
    return unrolled(shop, unrolled_starts(shop, one, pattern))


def sample(problem: Problem, shop: JobShop, split: frozenset[int]) -> JobShop:
    """`shop`, or the same problem with as many micro-batches as show how a pattern goes on."""
    count = max(_SAMPLE, _SAMPLE_PER_RANK * shop.num_ranks)
    if shop.num_microbatches <= count:
        return shop
    return job_shop(replace(problem, work=replace(problem.work, num_microbatches=count)), split)


def estimated_ticks(few: JobShop, one: JobShop, pattern: Pattern, num_microbatches: int) -> float:
    """The makespan of the pattern's orders: that of `few` micro-batches, and as much for each of the others as for the
    second half of these."""
    known = run(few, unrolled_orders(few, one, pattern))
    ends = [0] * few.num_microbatches
    for action, start, ticks in zip(few.actions, known.start, few.ticks, strict=True):
        ends[action.microbatch] = max(ends[action.microbatch], start + ticks)
    more = num_microbatches - few.num_microbatches
    half = few.num_microbatches // 2
    return known.ticks + more * (ends[-1] - ends[half - 1]) / (few.num_microbatches - half) if more else known.ticks
