"""Patterns that repeat: the shortest periods that the busiest rank and memory admit.

    greedy    every operation in its first free place, stages `hop` periods apart         many, within milliseconds
    CP-SAT    1, 2, 3 micro-batches in a period, ever shorter until none is found         few, and tight in memory

Their size is that of one micro-batch, whatever the number of micro-batches (Tessel: Lin et al., HPCA 2024).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from passes.schedules.building_block import Operation, placed
from passes.schedules.job_shop import JobShop
from passes.schedules.unrolling import Pattern

_HOPS = tuple(k / 20 for k in range(11))  # from as soon as possible to half a period between stages
_PERIODS = 1.0, 1.02, 1.04, 1.07, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6  # in multiples of the least
_COPIES = 1, 2, 3
_FIRST_STEP, _LAST_STEP = 0.02, 0.005  # of a period, as shares of it
_DEEPEST = 0.08  # what a period of several micro-batches may gain, as a share of it
_SUB_LIMIT = 0.4  # deterministic seconds for one period
_log = logging.getLogger(__name__)


def greedy_patterns(one: JobShop) -> Iterator[Pattern]:
    """Patterns of one micro-batch, made without a solver, that fit into memory."""
    if not len(one):
        return
    order = sorted(range(len(one)), key=lambda i: (one.actions[i].kind == "W", i))
    place = {i: k for k, i in enumerate(order)}
    least = least_period(one)
    for period in dict.fromkeys(int(least * factor) for factor in _PERIODS):
        for hop in _HOPS:
            starts = placed([_operation(one, i, place, int(hop * period)) for i in order], period)
            if starts is not None:
                pattern = Pattern(period, (tuple(starts[place[i]] for i in range(len(one))),))
                if fits(one, pattern):
                    yield pattern


def _operation(one: JobShop, i: int, place: dict[int, int], hop: int) -> Operation:
    needs = []
    for need, lag in one.needs[i]:
        hops = hop if one.actions[need].stage != one.actions[i].stage else 0
        needs.append((place[need], max(one.ticks[need] + lag, hops)))
    return Operation(one.rank[i], one.ticks[i], tuple(needs))


def least_period(one: JobShop) -> int:
    """No pattern takes fewer ticks per micro-batch: the busiest rank does not, nor does memory let it.

    What a micro-batch holds, times the least time for which it holds that, is at most the limit times the period.
    """
    load = max(sum(one.ticks[i] for i in mine) for mine in one.on_rank)
    held = [0] * one.num_ranks
    for forward in one.freeing:
        held[one.rank[forward]] += one.taken[forward] * _least_held_ticks(one, forward)
    limits = one.limits or held
    return max([1, load, *(ceil(h / limit) for h, limit in zip(held, limits, strict=True) if limit)])


def _least_held_ticks(one: JobShop, forward: int) -> int:
    """The longest path from the start of `forward` to the end of what frees its bytes."""
    end = {forward: one.ticks[forward]}
    for i in range(forward + 1, len(one)):
        arrivals = [end[need] + lag for need, lag in one.needs[i] if need in end]
        if arrivals:
            end[i] = max(arrivals) + one.ticks[i]
    return end[one.freeing[forward]]


def fits(one: JobShop, pattern: Pattern) -> bool:
    """Whether no rank ever holds more than its limit, however long the pattern goes on."""
    limits = one.limits
    return limits is None or all(p <= limit for p, limit in zip(peak_bytes(one, pattern), limits, strict=True))


def peak_bytes(one: JobShop, pattern: Pattern) -> list[int]:
    """The most bytes every rank holds once the pattern repeats; the peak is at the start of a forward."""
    period, peaks = pattern.period, [0] * one.num_ranks
    forwards = [(starts, forward) for starts in pattern.starts for forward in one.freeing]
    for starts, forward in forwards:
        now, held, rank = starts[forward], 0, one.rank[forward]
        for others, other in forwards:
            if one.rank[other] == rank:
                last = one.freeing[other]
                begun, ended = now - others[other], now - others[last] - one.ticks[last]
                held += one.taken[other] * (begun // period - ended // period)
        peaks[rank] = max(peaks[rank], held)
    return peaks


def tight_patterns(one: JobShop, *, limit: float, seed: int) -> tuple[list[Pattern], float]:
    """(patterns of ever fewer ticks per micro-batch, the deterministic seconds spent). Needs OR-tools.

    A period in which none is found in time counts as one that has none.
    """
    search = _Search(one, limit, seed)
    if len(one):
        search.from_below()
        for copies in _COPIES:
            search.between(copies)
    return search.found, search.spent


@dataclass
class _Search:
    one: JobShop
    limit: float
    seed: int
    spent: float = 0.0
    found: list[Pattern] = field(default_factory=list)

    def attempt(self, copies: int, period: int) -> bool:
        from passes.schedules.periodic import repeating

        limit = min(_SUB_LIMIT, self.limit - self.spent)
        pattern, cost = repeating(self.one, copies, period, limit=limit, seed=self.seed)
        self.spent += cost
        _log.debug("period %d of %d: %s", period, copies, "none found" if pattern is None else "found")
        self.found += [] if pattern is None else [pattern]
        return pattern is not None

    def from_below(self) -> None:
        """The first pattern of one micro-batch, by steps that double."""
        period, step = least_period(self.one), _FIRST_STEP
        while self.spent < self.limit and not self.attempt(1, period):
            period, step = period + max(1, int(period * step)), 2 * step

    def between(self, copies: int) -> None:
        """Bisect from the least that is possible, or somewhat less than the best so far, to that."""
        if not self.found:
            return
        best = min(pattern.period / pattern.copies for pattern in self.found)
        high = ceil(best * copies)
        low = max(least_period(self.one) * copies - 1, 0 if copies == 1 else int(high * (1 - _DEEPEST)))
        while self.spent < self.limit and high - low > max(1, int(_LAST_STEP * high)):
            middle = (low + high) // 2
            if self.attempt(copies, middle):
                high = middle
            else:
                low = middle
