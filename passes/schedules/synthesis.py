"""Find a schedule and say how far from the shortest it can be.

    Problem  ->  named schedules, list schedules     the best of them, within milliseconds
                 a lower bound                       stop where they meet
                 windows, one after another          CP-SAT, for the rest of the budget
             ->  Synthesis: schedule, makespan, lower bound, gap, method

Nothing depends on a clock: time is counted in steps, so that a budget gives one result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpipe.errors import CompileError
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.schedule_check import require
from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.job_shop import JobShop, RankOrders, job_shop, run, within_limits
from passes.schedules.named import named_schedule
from passes.schedules.policies import LIST_RULES, POLICIES, OrderRule
from passes.schedules.problem import Problem, fits
from passes.schedules.rules import rule_orders

_CLOSED = 1e-5  # a gap that is rounding


@dataclass(frozen=True)
class Synthesis:
    """A schedule, and what is known about it.

    No schedule of the same work on the same ranks within the same memory is shorter than `lower_bound_seconds`;
    `method` says what found the schedule.
    """

    schedule: Schedule
    makespan_seconds: float
    bubble_ratio: float
    method: str
    lower_bound_seconds: float = 0.0

    @staticmethod
    def of(problem: Problem, schedule: Schedule, method: str) -> "Synthesis":
        times = problem.simulate(schedule)
        return Synthesis(schedule, times.makespan_seconds, times.bubble_ratio, method)

    @property
    def gap(self) -> float:
        """Makespan / lower bound - 1."""
        return self.makespan_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0

    def __str__(self) -> str:
        bound = "proven shortest" if self.gap == 0 else f"at most {self.gap:.1%} above the shortest"
        return (
            f"{self.schedule.name}: {self.makespan_seconds:.6g} s, lower bound {self.lower_bound_seconds:.6g} s "
            f"({bound}), {self.bubble_ratio:.1%} idle, by {self.method}"
        )


def synthesise(problem: Problem, budget_seconds: float = 2.0) -> Synthesis:
    """The best schedule found within about `budget_seconds`, never worse than a named one that fits into memory.

    With a budget of nothing, the best of the named and the list schedules: a few milliseconds for 100 operations.

    Raises:
        CompileError: no order fits into memory.
    """
    relaxed = job_shop(problem, problem.splittable, relaxed=True)
    bound = lower_bound_ticks(relaxed) * relaxed.seconds_per_tick
    best = min([*_named(problem), *_listed(problem)], key=lambda found: found.makespan_seconds, default=None)
    if best is None:
        raise _too_little(problem)
    if budget_seconds and best.makespan_seconds > bound * (1 + _CLOSED):
        found, proven = _improved(problem, relaxed, best, budget_seconds)
        best, bound = min(best, found, key=lambda found: found.makespan_seconds), max(bound, proven)
    require(best.schedule, problem.work, problem.num_ranks)
    assert fits(problem, best.schedule), "the schedule exceeds the memory limit"
    closed = best.makespan_seconds <= bound * (1 + _CLOSED)
    return replace(best, lower_bound_seconds=best.makespan_seconds if closed else bound)


def _too_little(problem: Problem) -> CompileError:
    """What is said where no order fits."""
    least = [0] * problem.num_ranks
    for stage in problem.work.backward:
        least[problem.stage_rank[stage]] += problem.activation_bytes[stage]
    limits = problem.memory_limit_bytes or ()
    pairs = enumerate(zip(least, limits, strict=False))
    short = [f"rank {rank} needs {size} bytes, has {most}" for rank, (size, most) in pairs if size > most]
    return CompileError(
        f"no order fits into {limits} bytes of activations per rank"
        + (f": for one micro-batch {'; '.join(short)}" if short else "")
        + "; use smaller micro-batches, more stages on more ranks, or a higher limit"
    )


def references(problem: Problem) -> Iterator[Schedule]:
    """The named schedules of the problem, whether they fit into memory or not; names of the same order once."""
    work = problem.work
    names: dict[OrderRule, str] = {}
    for policy in POLICIES.values():
        names.setdefault(policy.rule, policy.name)
    for rule, name in names.items():
        if not rule.split or problem.splittable == work.input_grad & work.weight_grad:
            yield named_schedule(name, problem)


def _named(problem: Problem) -> Iterator[Synthesis]:
    """The references that fit into memory."""
    for schedule in references(problem):
        if fits(problem, schedule):
            yield Synthesis.of(problem, schedule, schedule.name)


def _listed(problem: Problem) -> Iterator[Synthesis]:
    """The best list schedule with whole backwards, and with split ones; where memory stops them all, one micro-batch
    after the other."""
    for split in dict.fromkeys((problem.splittable, frozenset[int]())):
        shop = job_shop(problem, split)
        orders = _list_orders(problem, shop)
        if orders:
            yield _evaluated(problem, shop, orders[0], "list schedule")
        elif within_limits(shop, shop.on_rank):
            yield _evaluated(problem, shop, shop.on_rank, "one micro-batch after the other")


def _list_orders(problem: Problem, shop: JobShop) -> list[RankOrders]:
    """All that memory does not stop, the shortest first."""
    replicas = [(rank,) for rank in problem.stage_rank]
    found = (rule_orders(shop, rule, problem.work, replicas) for rule in LIST_RULES)
    return sorted({orders: None for orders in found if orders is not None}, key=lambda orders: run(shop, orders).ticks)


def _improved(problem: Problem, relaxed: JobShop, known: Synthesis, budget_seconds: float) -> tuple[Synthesis, float]:
    """(what windows make of a known schedule, a lower bound in seconds that they prove on the way)."""
    from passes.schedules.windows import improve  # loading OR-tools takes a third of a second

    shop = job_shop(problem, problem.splittable if known.schedule.is_split else frozenset())
    bound = lower_bound_ticks(shop)
    starts = [shop.orders(known.schedule), *_list_orders(problem, shop)]
    found = improve(shop, list(dict.fromkeys(starts)), limit=budget_seconds, bound_ticks=bound)
    improved = _evaluated(problem, shop, found.orders, "window search")
    holds = shop == relaxed and shop.seconds_per_tick == relaxed.seconds_per_tick  # for every mixture of B, I and W
    return improved, found.bound_ticks * shop.seconds_per_tick if holds else 0.0


def _evaluated(problem: Problem, shop: JobShop, orders: RankOrders, method: str) -> Synthesis:
    return Synthesis.of(problem, shop.schedule("synthesised", problem.work.num_stages, orders), method)
