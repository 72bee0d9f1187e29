"""Find a schedule and say how far from the shortest it can be.

    Problem  ->  named schedules, list schedules   the best of them
                 lower bounds                      stop where they meet
                 CP-SAT over windows, over all     improve, and raise the bound
             ->  Synthesis: schedule, makespan, lower bound, gap

Nothing depends on a clock: time is counted in steps, so that a seed and a budget give one result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.errors import CompileError
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import require
from passes.bounds import lower_bound_ticks
from passes.job_shop import JobShop, Orders, job_shop, run, within_limits
from passes.list_rules import list_orders, rules
from passes.problem import Problem, fits
from passes.schedule import POLICIES, make_schedule

_CLOSED = 1e-5  # a gap that is rounding
_EXACT_OPERATIONS = 256  # the full model's size: above, windows do more with the same time
_RULE_SECONDS_PER_OPERATION = 15e-6  # of one list schedule, measured


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


@dataclass(frozen=True)
class _Found:
    schedule: Schedule
    seconds: float
    method: str


def synthesise(problem: Problem, budget_seconds: float = 2.0, seed: int = 0) -> Synthesis:
    """The best schedule found within about `budget_seconds`, never worse than a named one that fits into memory.

    Raises:
        CompileError: the budget is negative, or a rank cannot hold even one micro-batch.
    """
    if not budget_seconds >= 0:
        raise CompileError(f"budget_seconds={budget_seconds}; give zero or more seconds")
    relaxed = job_shop(problem, problem.splittable, relaxed=True)
    _require_room(problem, relaxed)
    bound = lower_bound_ticks(relaxed) * relaxed.seconds_per_tick

    # every name, then every rule
    best = min(_named(problem), key=lambda named: named.seconds, default=None)
    shops = {split: job_shop(problem, split) for split in {problem.splittable, frozenset[int]()}}
    for split in sorted(shops, key=len, reverse=True):
        if best is None or not _closed(best.seconds, bound):
            found = _listed(problem, shops[split], bound, budget_seconds / 4 / len(shops), best)
            best = found if best is None or found.seconds < best.seconds else best
    assert best is not None

    # the solver, on backwards as the best schedule has them
    if budget_seconds and not _closed(best.seconds, bound):
        shop = shops[problem.splittable if best.schedule.is_split else frozenset[int]()]
        found, proven = _solved(problem, shop, best, budget_seconds, seed)
        best = found if found.seconds < best.seconds else best
        if shop == relaxed and shop.seconds_per_tick == relaxed.seconds_per_tick:
            bound = max(bound, proven * shop.seconds_per_tick)

    require(best.schedule, problem.work, problem.num_ranks)
    assert fits(problem, best.schedule), "the schedule exceeds the memory limit"
    timeline = problem.simulate(best.schedule)
    bound = best.seconds if _closed(best.seconds, bound) else bound
    gap = best.seconds / bound - 1 if bound else 0.0
    return Synthesis(best.schedule, best.seconds, bound, gap, timeline.bubble_ratio, best.method)


def references(problem: Problem) -> Iterator[Schedule]:
    """The named schedules of the problem, whether they fit into memory or not."""
    seconds, work = problem.seconds, problem.work
    for name, policy in POLICIES.items():
        if not policy.split or problem.splittable == work.input_grad & work.weight_grad:
            frozen = seconds["T"] if work.num_components else ()
            yield make_schedule(
                name,
                work,
                problem.stage_rank,
                seconds["F"],
                seconds["B"],
                frozen_seconds=frozen,
                world_size=problem.num_ranks,
            )


def _named(problem: Problem) -> Iterator[_Found]:
    for schedule in references(problem):
        if fits(problem, schedule):
            yield _Found(schedule, problem.simulate(schedule).makespan_seconds, schedule.name)


def _listed(problem: Problem, shop: JobShop, bound: float, limit: float, best: _Found | None) -> _Found:
    """The best list schedule; where memory stops them all, one micro-batch after the other."""
    found, method, spent = shop.on_rank, "one micro-batch after the other", 0.0
    ticks = run(shop, found).ticks
    for rule in rules(shop):
        orders = list_orders(shop, rule)
        if orders is not None and (length := run(shop, orders).ticks) < ticks:
            found, ticks, method = orders, length, f"list schedule ({rule.name})"
        spent += len(shop) * _RULE_SECONDS_PER_OPERATION
        if spent > limit or _closed(ticks * shop.seconds_per_tick, bound):
            break
    return _evaluated(problem, shop, found, method)


def _solved(problem: Problem, shop: JobShop, best: _Found, budget_seconds: float, seed: int) -> tuple[_Found, int]:
    """A schedule at least as good, and a lower bound in ticks on all whose backwards are split as in it."""
    from passes.exact import reorder  # OR-tools take a second to load
    from passes.window_bound import window_bound_ticks
    from passes.windows import SECONDS_PER_PROVING_SECOND, improve

    orders = tuple(tuple(shop.index[a] for a in actions) for actions in best.schedule.ranks)
    known = run(shop, orders).ticks
    bound, spent = window_bound_ticks(
        shop, lower_bound_ticks(shop), known, limit=budget_seconds / 4 / SECONDS_PER_PROVING_SECOND, seed=seed
    )
    left = budget_seconds - spent * SECONDS_PER_PROVING_SECOND
    exact = len(shop) <= _EXACT_OPERATIONS
    found = improve(shop, orders, limit=left * (0.7 if exact else 1.0), seed=seed, bound_ticks=bound)
    method = "window search" if found.ticks < known else best.method
    limit = (left - found.spent) / SECONDS_PER_PROVING_SECOND
    if exact and found.ticks > bound and limit > 0:
        proof = reorder(
            shop, found.orders, frozenset(range(len(shop))), limit=limit, seed=seed, bound_ticks=bound, prove=True
        )
        method = "CP-SAT" if proof.ticks < found.ticks else method
        found, bound = proof, proof.bound_ticks
    return _evaluated(problem, shop, found.orders, method), bound


def _evaluated(problem: Problem, shop: JobShop, orders: Orders, method: str) -> _Found:
    schedule = shop.schedule("synthesised", problem.work.num_stages, orders)
    return _Found(schedule, problem.simulate(schedule).makespan_seconds, method)


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


def _closed(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + _CLOSED)
