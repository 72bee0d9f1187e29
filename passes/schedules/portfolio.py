"""Schedules that are there within a moment: those with a name, list schedules, and blocks that repeat.

named          gpipe 1f1b interleaved hanayo zb-h1 zb-v      whether they fit into memory or not
list           54 rules of what goes first
repeating      one micro-batch's block, at several periods and paces
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpipe.schedule import Schedule
from passes.schedules.job_shop import JobShop, Orders, run
from passes.schedules.list_rules import list_orders, rules
from passes.schedules.named import POLICIES, make_schedule
from passes.schedules.problem import Problem, fits
from passes.schedules.steady import greedy_patterns
from passes.schedules.unrolling import Pattern, estimated_ticks, one_microbatch, sample, unrolled_orders

_SECONDS_PER_OPERATION = 15e-6  # of one such schedule, measured
_CLOSED = 1e-5  # a gap that is rounding


@dataclass(frozen=True)
class Found:
    """A schedule, how long it takes, and what found it."""

    schedule: Schedule
    seconds: float
    method: str
    pattern: Pattern | None = None  # that repeats in it


def is_closed(seconds: float, bound: float) -> bool:
    """Whether nothing is shorter but by rounding."""
    return seconds <= bound * (1 + _CLOSED)


def references(problem: Problem) -> Iterator[Schedule]:
    """The named schedules of the problem, whether they fit into memory or not; names of the same schedule once."""
    seconds, work = problem.seconds, problem.work
    policies = list(POLICIES.values())
    for i, (name, policy) in enumerate(POLICIES.items()):
        whole = not policy.split or problem.splittable == work.input_grad & work.weight_grad
        if whole and policy not in policies[:i]:
            yield make_schedule(
                name,
                work,
                problem.stage_rank,
                seconds["F"],
                seconds["B"],
                frozen_seconds=seconds["T"] if work.num_components else (),
                frozen_ranks=problem.frozen_ranks,
                world_size=problem.num_ranks,
            )


def named(problem: Problem) -> Iterator[Found]:
    """Those of the references that fit into memory."""
    for schedule in references(problem):
        if fits(problem, schedule):
            yield Found(schedule, problem.simulate(schedule).makespan_seconds, schedule.name)


def listed(problem: Problem, shop: JobShop, bound: float, limit: float) -> Found:
    """The best list schedule of about `limit` seconds; where memory stops them all, one micro-batch after the other."""
    found, method, spent = shop.on_rank, "one micro-batch after the other", 0.0
    ticks = run(shop, found).ticks
    for rule in rules(shop):
        orders = list_orders(shop, rule)
        if orders is not None and (length := run(shop, orders).ticks) < ticks:
            found, ticks, method = orders, length, f"list schedule ({rule.name})"
        spent += len(shop) * _SECONDS_PER_OPERATION
        if spent > limit or is_closed(ticks * shop.seconds_per_tick, bound):
            break
    return evaluated(problem, shop, found, method)


def repeated(problem: Problem, shop: JobShop, split: frozenset[int], bound: float, limit: float) -> list[Found]:
    """The best block that repeats, of about `limit` seconds; none where none fits into memory."""
    one, few = one_microbatch(problem, split), sample(problem, shop, split)
    best: tuple[float, Pattern] | None = None
    spent = 0.0
    for pattern in greedy_patterns(one):
        ticks = estimated_ticks(few, one, pattern, shop.num_microbatches)
        best = (ticks, pattern) if best is None or ticks < best[0] else best
        spent += len(few) * _SECONDS_PER_OPERATION
        if spent > limit or is_closed(best[0] * shop.seconds_per_tick, bound):
            break
    if best is None:
        return []
    found = evaluated(problem, shop, unrolled_orders(shop, one, best[1]), "repeated blocks")
    return [replace(found, pattern=best[1])]


def evaluated(problem: Problem, shop: JobShop, orders: Orders, method: str) -> Found:
    schedule = shop.schedule("synthesised", problem.work.num_stages, orders)
    return Found(schedule, problem.simulate(schedule).makespan_seconds, method)
