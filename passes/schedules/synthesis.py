"""Find a schedule and say how far from the shortest it can be.

    Problem  ->  named schedules, lists, blocks that repeat   the best of them
                 lower bounds                                 stop where they meet
                 CP-SAT: patterns, windows, the whole         improve, and raise the bound
             ->  Synthesis: schedule, makespan, lower bound, gap

Nothing depends on a clock: time is counted in steps, so that a seed and a budget give one result.
"""

import os
from dataclasses import dataclass

from fxpipe.errors import CompileError
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import require
from passes.schedules import schedule_cache
from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.job_shop import JobShop, job_shop, within_limits
from passes.schedules.portfolio import Found, is_closed, listed, named, references, repeated
from passes.schedules.problem import Problem, fits
from passes.schedules.schedule_cache import Entry
from passes.schedules.solver import require_solver

__all__ = ["Synthesis", "references", "synthesise"]


@dataclass(frozen=True)
class Synthesis:
    """A schedule, and what is known about it.

    No schedule of the same work on the same ranks within the same memory is shorter than `lower_bound_seconds`;
    `gap` is makespan / lower bound - 1, `method` says what found the schedule.
    """

    schedule: Schedule
    makespan_seconds: float
    lower_bound_seconds: float
    gap: float
    bubble_ratio: float
    method: str

    def __str__(self) -> str:
        bound = "proven shortest" if self.gap == 0 else f"at most {self.gap:.1%} above the shortest"
        return (
            f"{self.schedule.name}: {self.makespan_seconds:.6g} s, lower bound {self.lower_bound_seconds:.6g} s "
            f"({bound}), {self.bubble_ratio:.1%} idle, by {self.method}"
        )


def synthesise(
    problem: Problem,
    budget_seconds: float = 2.0,
    seed: int = 0,
    *,
    cache: str | os.PathLike[str] | None = None,
) -> Synthesis:
    """The best schedule found within about `budget_seconds`, never worse than a named one that fits into memory.

    A problem that was solved before in this process, with the same budget and seed, is looked up; so is the same with
    all times longer or shorter by one factor, or by less than a thousandth of the longest.

    Args:
        cache: a folder that keeps what is found for other processes; the environment's FXPIPE_CACHE where left out,
            and none where that is not set.

    Raises:
        CompileError: the budget is negative, a rank cannot hold even one micro-batch, or OR-tools is missing where the
            budget leaves time for it and a gap is open.
    """
    if not budget_seconds >= 0:
        raise CompileError(f"budget_seconds={budget_seconds}; give zero or more seconds")
    relaxed = job_shop(problem, problem.splittable, relaxed=True)
    _require_room(problem, relaxed)
    bound = lower_bound_ticks(relaxed) * relaxed.seconds_per_tick
    folder = cache if cache is not None else os.environ.get(schedule_cache.ENVIRONMENT) or None
    name = schedule_cache.key(problem, budget_seconds, seed)
    entry = schedule_cache.find(name, problem, folder)
    if entry is not None:
        return _recalled(problem, entry, bound)
    told = _told(problem, *_searched(problem, relaxed, bound, budget_seconds, seed))
    times = schedule_cache.times_of(problem)
    schedule_cache.keep(name, Entry(told.schedule, times, told.lower_bound_seconds, told.method), folder)
    return told


def _recalled(problem: Problem, entry: Entry, bound: float) -> Synthesis:
    """What was found for these times, or for times that are nearly these: then names may be better."""
    best = Found(entry.schedule, problem.simulate(entry.schedule).makespan_seconds, entry.method)
    rivals = () if schedule_cache.is_scaled(entry, problem) else named(problem)
    best = min((best, *rivals), key=lambda found: found.seconds)
    return _told(problem, best, max(bound, schedule_cache.bound_seconds(entry, problem)))


def _searched(
    problem: Problem, relaxed: JobShop, bound: float, budget_seconds: float, seed: int
) -> tuple[Found, float]:
    """(the best schedule found, a lower bound in seconds of at least `bound`)."""
    # every name, every block, every rule
    known = sorted(named(problem), key=lambda found: found.seconds)[:1]
    shops = {split: job_shop(problem, split) for split in {problem.splittable, frozenset[int]()}}
    for split in sorted(shops, key=len, reverse=True):
        limit = budget_seconds / 8 / len(shops)
        if not known or not is_closed(known[0].seconds, bound):
            known += repeated(problem, shops[split], split, bound, limit)
            known.append(listed(problem, shops[split], bound, limit))
            known.sort(key=lambda found: found.seconds)
    if not budget_seconds or is_closed(known[0].seconds, bound):
        return known[0], bound

    # the solver, on backwards as the best schedule has them
    require_solver()
    from passes.schedules.search import improved

    split = problem.splittable if known[0].schedule.is_split else frozenset[int]()
    shop = shops[split]
    alike = [found for found in known if found.schedule.is_split == bool(split)]
    found, proven = improved(problem, shop, split, alike, budget_seconds, seed)
    if shop == relaxed and shop.seconds_per_tick == relaxed.seconds_per_tick:
        bound = max(bound, proven * shop.seconds_per_tick)
    return min(known[0], found, key=lambda found: found.seconds), bound


def _told(problem: Problem, best: Found, bound: float) -> Synthesis:
    require(best.schedule, problem.work, problem.num_ranks)
    assert fits(problem, best.schedule), "the schedule exceeds the memory limit"
    timeline = problem.simulate(best.schedule)
    bound = best.seconds if is_closed(best.seconds, bound) else bound
    gap = best.seconds / bound - 1 if bound else 0.0
    return Synthesis(best.schedule, best.seconds, bound, gap, timeline.bubble_ratio, best.method)


def _require_room(problem: Problem, shop: JobShop) -> None:
    """Micro-batch after micro-batch needs the least memory: an activation stays until its gradient has come back."""
    if within_limits(shop, shop.on_rank):
        return
    assert problem.memory_limit_bytes is not None
    for rank, limit in enumerate(problem.memory_limit_bytes):
        stages = [s for s in sorted(problem.work.backward) if problem.stage_rank[s] == rank]
        needed = sum(problem.activation_bytes[s] for s in stages)
        if needed > limit:
            raise CompileError(
                f"rank {rank} must hold {needed} bytes of activations for one micro-batch of its stages {stages}, its "
                f"limit is {limit} bytes; use smaller micro-batches, more stages on more ranks, or a higher limit"
            )
