"""Improve a schedule with OR-tools, and prove how far that can go.

    lower bound from both ends             stop where it is met
    patterns of the tightest period        where micro-batches are many: start over from the best of them
    windows, one after the other           improve
    the whole at once                      where it is small: improve, and raise the bound

All limits are in steps of the solver, so that a seed and a budget give one result.
"""

from dataclasses import dataclass

from passes.bounds import lower_bound_ticks
from passes.exact import reorder
from passes.job_shop import JobShop, Orders, run
from passes.portfolio import Found, evaluated
from passes.problem import Problem
from passes.ramps import short_count, squeezed
from passes.steady import tight_patterns
from passes.unrolling import Pattern, estimated_ticks, one_microbatch, sample, unrolled_orders
from passes.window_bound import window_bound_ticks
from passes.windows import SECONDS_PER_SOLVER_SECOND, improve

_EXACT_OPERATIONS = 256  # the full model's size: above, windows do more with the same time
_STEADY_MICROBATCHES = 8  # fewer have no steady state to speak of


@dataclass(frozen=True)
class _State:
    orders: Orders
    ticks: int
    method: str
    left: float  # seconds


def improved(
    problem: Problem,
    shop: JobShop,
    split: frozenset[int],
    best: Found,
    pattern: Pattern | None,
    budget_seconds: float,
    seed: int,
) -> tuple[Found, int]:
    """A schedule at least as good, and a lower bound in ticks on all whose backwards are split as in it.

    Args:
        shop: of `problem`, with the backwards of the stages `split` cut in two.
        best: the schedule to start from.
        pattern: one that repeats, where there is one.
    """
    orders = tuple(tuple(shop.index[a] for a in actions) for actions in best.schedule.ranks)
    state = _State(orders, run(shop, orders).ticks, best.method, budget_seconds)
    bound, spent = window_bound_ticks(
        shop, lower_bound_ticks(shop), state.ticks, limit=_solver_seconds(budget_seconds / 4), seed=seed
    )
    state = _less(state, spent * SECONDS_PER_SOLVER_SECOND)
    if state.ticks > bound and len(shop) > _EXACT_OPERATIONS and shop.num_microbatches >= _STEADY_MICROBATCHES:
        state = _steady(problem, shop, split, state, pattern, seed)
    state = _windows(shop, state, bound, seed)
    if len(shop) <= _EXACT_OPERATIONS and state.ticks > bound and state.left > 0:
        whole = frozenset(range(len(shop)))
        limit = _solver_seconds(state.left)
        proof = reorder(shop, state.orders, whole, limit=limit, seed=seed, bound_ticks=bound, prove=True)
        state, bound = _better(state, proof.orders, proof.ticks, "CP-SAT"), proof.bound_ticks
    return evaluated(problem, shop, state.orders, state.method), bound


def _steady(
    problem: Problem, shop: JobShop, split: frozenset[int], state: _State, known: Pattern | None, seed: int
) -> _State:
    """Start from the best pattern, with its ends squeezed apart from its middle where the middle is long."""
    one = one_microbatch(problem, split)
    patterns, spent = tight_patterns(one, limit=_solver_seconds(state.left / 4), seed=seed)
    state = _less(state, spent * SECONDS_PER_SOLVER_SECOND)
    patterns += () if known is None else (known,)
    if not patterns:
        return state
    few = sample(problem, shop, split)
    pattern = min(patterns, key=lambda p: estimated_ticks(few, one, p, shop.num_microbatches))
    orders = unrolled_orders(shop, one, pattern)
    state = _better(state, orders, run(shop, orders).ticks, f"a pattern of {pattern.copies} that repeats")
    if shop.ordered and short_count(pattern, shop.num_microbatches) < shop.num_microbatches:
        orders, spent = squeezed(problem, shop, one, pattern, split, limit=state.left / 2, seed=seed)
        state = _better(_less(state, spent), orders, run(shop, orders).ticks, "a pattern that repeats, ends squeezed")
    return state


def _windows(shop: JobShop, state: _State, bound: int, seed: int) -> _State:
    limit = state.left * (0.7 if len(shop) <= _EXACT_OPERATIONS else 1.0)
    found = improve(shop, state.orders, limit=limit, seed=seed, bound_ticks=bound)
    return _less(_better(state, found.orders, found.ticks, "window search"), found.spent)


def _better(state: _State, orders: Orders, ticks: int, method: str) -> _State:
    return _State(orders, ticks, method, state.left) if ticks < state.ticks else state


def _less(state: _State, seconds: float) -> _State:
    return _State(state.orders, state.ticks, state.method, state.left - seconds)


def _solver_seconds(seconds: float) -> float:
    return max(seconds, 0.0) / SECONDS_PER_SOLVER_SECOND
