"""Improve a schedule with OR-tools, and prove how far that can go.

    the whole at once, where it is small   without a relaxation: most small problems end here
    lower bound from both ends             stop where it is met
    patterns of the tightest period        where micro-batches are many: start over from the best of them
    windows, one after the other           improve
    the whole once more                    with a relaxation, which raises the bound

All limits are in steps of the solver, so that a seed and a budget give one result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.exact import reorder
from passes.schedules.job_shop import JobShop, Orders, run
from passes.schedules.portfolio import Found, evaluated
from passes.schedules.problem import Problem
from passes.schedules.ramps import short_count, squeezed
from passes.schedules.steady import tight_patterns
from passes.schedules.unrolling import Pattern, estimated_ticks, one_microbatch, sample, unrolled_orders
from passes.schedules.window_bound import window_bound_ticks
from passes.schedules.windows import SECONDS_PER_SOLVER_SECOND, improve

_EXACT_OPERATIONS = 256  # the full model's size: above, windows do more with the same time
_AT_ONCE_OPERATIONS = 96  # that are solved as they are, mostly
_STEADY_MICROBATCHES = 8  # fewer have no steady state to speak of
_RESTARTED_OPERATIONS = 512  # above, a search needs all its time from one start
_FIRST_SHARE, _OTHER_SHARE, _WINDOWS_SHARE = 0.25, 0.15, 0.7  # of the time that is left


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
    known: Sequence[Found],
    budget_seconds: float,
    seed: int,
) -> tuple[Found, int]:
    """A schedule at least as good as those known, and a lower bound in ticks on all that are split as they are.

    Args:
        shop: of `problem`, with the backwards of the stages `split` cut in two.
        known: schedules to start from, the best first.
    """
    first, *others = (shop.orders(found.schedule) for found in known)
    state = _State(first, run(shop, first).ticks, known[0].method, budget_seconds)
    bound, small = lower_bound_ticks(shop), len(shop) <= _EXACT_OPERATIONS
    if len(shop) <= _AT_ONCE_OPERATIONS:
        state, bound = _whole(shop, state, bound, seed, share=_FIRST_SHARE, prove=False)
    if state.ticks > bound:
        state, bound = _proven(shop, state, bound, seed)
    if state.ticks > bound and not small and shop.num_microbatches >= _STEADY_MICROBATCHES:
        state = _steady(problem, shop, split, state, [f.pattern for f in known if f.pattern is not None], seed)
    if len(shop) <= _RESTARTED_OPERATIONS:
        for orders in others:
            state = _windows(shop, state, bound, seed, share=_OTHER_SHARE, start=orders)
    state = _windows(shop, state, bound, seed, share=_WINDOWS_SHARE if small else 1.0)
    if state.ticks > bound and small:
        state, bound = _whole(shop, state, bound, seed, share=1.0, prove=True)
    return evaluated(problem, shop, state.orders, state.method), bound


def _whole(shop: JobShop, state: _State, bound: int, seed: int, *, share: float, prove: bool) -> tuple[_State, int]:
    """All at once, in a share of the time that is left."""
    limit = _solver_seconds(state.left * share)
    everything = frozenset(range(len(shop)))
    found = reorder(shop, state.orders, everything, limit=limit, seed=seed, bound_ticks=bound, prove=prove)
    state = _less(_better(state, found.orders, found.ticks, "CP-SAT"), found.spent * SECONDS_PER_SOLVER_SECOND)
    return state, found.bound_ticks


def _proven(shop: JobShop, state: _State, bound: int, seed: int) -> tuple[_State, int]:
    """The window bound, in a share of the time that is left."""
    limit = _solver_seconds(state.left * _FIRST_SHARE)
    bound, spent = window_bound_ticks(shop, bound, state.ticks, limit=limit, seed=seed)
    return _less(state, spent * SECONDS_PER_SOLVER_SECOND), bound


def _steady(
    problem: Problem, shop: JobShop, split: frozenset[int], state: _State, known: list[Pattern], seed: int
) -> _State:
    """Start from the best pattern, with its ends squeezed apart from its middle where the middle is long."""
    one = one_microbatch(problem, split)
    patterns, spent = tight_patterns(one, limit=_solver_seconds(state.left / 4), seed=seed)
    state = _less(state, spent * SECONDS_PER_SOLVER_SECOND)
    patterns += known
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


def _windows(
    shop: JobShop, state: _State, bound: int, seed: int, *, share: float, start: Orders | None = None
) -> _State:
    """Windows in a share of the time, from `start` or from the best so far."""
    if state.ticks <= bound:
        return state
    found = improve(shop, start or state.orders, limit=state.left * share, seed=seed, bound_ticks=bound)
    return _less(_better(state, found.orders, found.ticks, "window search"), found.spent)


def _better(state: _State, orders: Orders, ticks: int, method: str) -> _State:
    return _State(orders, ticks, method, state.left) if ticks < state.ticks else state


def _less(state: _State, seconds: float) -> _State:
    return _State(state.orders, state.ticks, state.method, state.left - seconds)


def _solver_seconds(seconds: float) -> float:
    return max(seconds, 0.0) / SECONDS_PER_SOLVER_SECOND
