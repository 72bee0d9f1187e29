"""Reorder a window of a schedule with CP-SAT, optimally where time allows.

    rank 0:  fixed order | free | fixed order       before the window: when a rank and a value are there
    rank 1:  fixed order | free | fixed order       after it: how long what follows takes

What is before and after a window keeps its order, so that the window alone decides: the least over all its orders of
the largest (end + what follows) is the makespan.
"""

from dataclasses import dataclass, replace
from typing import Any

from passes.schedules.job_shop import JobShop, JobStarts, RankOrders, run, within_limits


@dataclass(frozen=True)
class Solved:
    """Orders no worse than those given, what they take, and what no order of the window goes below."""

    orders: RankOrders
    ticks: int
    bound_ticks: int
    spent: float = 0.0  # deterministic seconds


def reorder(
    shop: JobShop,
    orders: RankOrders,
    window: frozenset[int],
    *,
    limit: float,
    seed: int = 0,
    bound_ticks: int = 0,
    known: JobStarts | None = None,
) -> Solved:
    """Search the orders of `window` for `limit` deterministic seconds; the result depends on the arguments alone.

    `window` holds the operations that start in an interval of time. `bound_ticks` is a known lower bound;
    `known` is the run of `orders` where the caller has it. Equally good orders may differ
    from those given.
    """
    known = known or run(shop, orders)
    heads, tails, fixed = _surroundings(shop, window, known)
    floor = max(fixed, bound_ticks)
    if known.ticks <= floor:
        return Solved(orders, known.ticks, floor)
    from ortools.sat.python import cp_model  # 0.2 s, most of it pandas: where an order is searched for

    model = cp_model.CpModel()
    latest = {i: known.ticks - tails[i] - shop.ticks[i] for i in sorted(window)}
    begins = {i: model.new_int_var(heads[i], latest[i], "") for i in latest}
    makespan = model.new_int_var(floor, known.ticks, "")
    for i, begin in begins.items():
        for need, lag in shop.needs[i]:
            if need in begins:
                model.add(begin >= begins[need] + (shop.ticks[need] + lag))
        inner = max((lag + shop.ticks[u] + tails[u] for u, lag in shop.users[i] if u in begins), default=-1)
        if tails[i] > inner:
            model.add(makespan >= begin + (shop.ticks[i] + tails[i]))
        model.add_hint(begin, known.start[i])
    for rank, order in enumerate(orders):
        free = [i for i in order if i in begins]
        model.add_no_overlap([model.new_fixed_size_interval_var(begins[i], shop.ticks[i], "") for i in free])
        _limit_memory(model, shop, rank, order, begins, known.ticks)
    model.add_hint(makespan, known.ticks)
    model.minimize(makespan)
    return _solve(shop, model, begins, Solved(orders, known.ticks, floor), limit, seed)


def _solve(shop: JobShop, model: Any, begins: dict[int, Any], known: Solved, limit: float, seed: int) -> Solved:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.linearization_level = 0  # a relaxation would raise bounds, and halve the speed
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return replace(known, spent=spent)
    bound = max(known.bound_ticks, round(solver.best_objective_bound))
    value = {i: solver.value(begin) for i, begin in begins.items()}
    found = tuple(_merged(shop, order, value) for order in known.orders)
    ticks = run(shop, found).ticks
    if ticks > known.ticks or not within_limits(shop, found):
        found, ticks = known.orders, known.ticks
    return Solved(found, ticks, min(bound, ticks), spent)


def _merged(shop: JobShop, order: tuple[int, ...], value: dict[int, int]) -> tuple[int, ...]:
    """The order with its window sorted by start; among equals an operation of no length goes first."""
    middle = sorted((i for i in order if i in value), key=lambda i: (value[i], shop.ticks[i] > 0, i))
    first = next((k for k, i in enumerate(order) if i in value), 0)
    return (*order[:first], *middle, *order[first + len(middle) :])


def _limit_memory(
    model: Any, shop: JobShop, rank: int, order: tuple[int, ...], begins: dict[int, Any], horizon: int
) -> None:
    """A forward's bytes are held until the end of the last backward of its stage and micro-batch."""
    if shop.limits is None:
        return
    room, boxes, demands = shop.limits[rank], [], []
    first = next((k for k, i in enumerate(order) if i in begins), len(order))
    done = set(order[:first])
    for i in order[: first + sum(i in begins for i in order)]:
        last = shop.freeing.get(i)
        if last is None or last in done:
            continue
        if i in done and last not in begins:
            room -= shop.taken[i]
            continue
        start = begins[i] if i in begins else 0
        end = begins[last] + shop.ticks[last] if last in begins else horizon
        boxes.append(model.new_interval_var(start, model.new_int_var(0, horizon, ""), end, ""))
        demands.append(shop.taken[i])
    if sum(demands) > room:
        model.add_cumulative(boxes, demands, room)


def _surroundings(
    shop: JobShop, window: frozenset[int], known: JobStarts
) -> tuple[dict[int, int], dict[int, int], int]:
    """Heads and tails of the window with everything else in its order, and the longest path that this leaves."""
    begin = min((known.start[i] for i in window), default=0)
    before = {i for i in known.visited if known.start[i] < begin}
    end = [start + ticks for start, ticks in zip(known.start, shop.ticks, strict=True)]
    free, rest = [0] * shop.num_ranks, [0] * shop.num_ranks  # of every rank: when it is there, what it has to do later
    tails: dict[int, int] = {}
    fixed = 0
    for i in reversed(known.visited):
        if i in before:
            continue
        rank = shop.rank[i]
        tails[i] = max([rest[rank], *(lag + shop.ticks[user] + tails[user] for user, lag in shop.users[i])])
        if i not in window:
            rest[rank] = shop.ticks[i] + tails[i]
            fixed = max([fixed, *(end[need] + lag + rest[rank] for need, lag in shop.needs[i] if need in before)])
    for i in before:
        free[shop.rank[i]] = max(free[shop.rank[i]], end[i])
    heads: dict[int, int] = {}
    for i in (i for i in known.visited if i in window):
        arrived = (heads.get(n, known.start[n]) + shop.ticks[n] + lag for n, lag in shop.needs[i])
        heads[i] = max([free[shop.rank[i]], *arrived])
    paths = [heads[i] + shop.ticks[i] + tails[i] for i in heads]
    return heads, tails, max([fixed, *map(sum, zip(free, rest, strict=True)), *paths])
