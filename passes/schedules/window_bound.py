"""A lower bound from both ends of a schedule: a rank's whole work, and the idle time that it cannot avoid there.

    rank d   |. . # # . #|  . . .  |# . # # . .|      work of d + least idle in the first t + least idle in the last t
              first t                  last t

Each end is a small CP-SAT problem whatever the number of micro-batches: which operations of d can start before t, given
everything on all ranks that must come before them. The last t is the first t of the problem run backwards. Only the
solver's own bounds are used, so that stopping it early loosens the bound and never breaks it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ortools.sat.python import cp_model

from passes.schedules.bounds import jackson
from passes.schedules.job_shop import JobShop

_SPANS = 0.5, 0.6, 0.7, 0.85, 1.0, 1.4  # lengths of an end, in longest paths of one micro-batch
_SUB_LIMIT = 0.1  # deterministic seconds for one end, or half of what is left where that is more


def window_bound_ticks(shop: JobShop, known: int, target: int, *, limit: float, seed: int) -> tuple[int, float]:
    """(a lower bound of at least `known`, deterministic seconds spent). Stops at `target` or after about `limit`.

    Idle time grows with the window, so what is proven for a short one holds for a longer; the two ends must not meet.
    """
    span = max(h + t for h, t, a in zip(shop.heads, shop.ticks, shop.actions, strict=True) if a.microbatch == 0)
    sides = shop, reversed_shop(shop)
    spent = 0.0
    for rank in _promising(shop):
        load = sum(shop.ticks[i] for i in shop.on_rank[rank])
        idle, easy = [0, 0], [True, True]
        for part in _SPANS:
            length = min(int(part * span), known // 2)
            for end, side in enumerate(sides):
                if spent >= limit or known >= target or load + 2 * length <= known or not easy[end]:
                    continue
                most = max(_SUB_LIMIT, (limit - spent) / 2)
                least, cost = least_idle(side, rank, length, limit=most, seed=seed)
                idle[end], easy[end] = max(idle[end], least), cost < most
                spent += cost
                known = max(known, load + sum(idle))
    return known, spent


def _promising(shop: JobShop) -> Iterator[int]:
    """Ranks in descending order of their one-machine bound."""
    bounds = [jackson((shop.heads[i], shop.ticks[i], shop.tails[i]) for i in ops) for ops in shop.on_rank]
    yield from sorted(range(shop.num_ranks), key=lambda rank: (-bounds[rank], rank))


def reversed_shop(shop: JobShop) -> JobShop:
    """The same problem against time: its schedules are the mirror images, its memory is what is due."""
    count = len(shop)
    return replace(
        shop,
        actions=shop.actions[::-1],
        rank=shop.rank[::-1],
        ticks=shop.ticks[::-1],
        needs=tuple(tuple((count - 1 - u, lag) for u, lag in users) for users in reversed(shop.users)),
        taken=shop.freed[::-1],
        freed=shop.taken[::-1],
    )


def least_idle(shop: JobShop, rank: int, ticks: int, *, limit: float, seed: int) -> tuple[int, float]:
    """(ticks of the first `ticks` that `rank` is idle in every schedule, deterministic seconds spent)."""
    model = cp_model.CpModel()
    early = _relevant(shop, rank, ticks)
    begins = {i: model.new_int_var(shop.heads[i], ticks - 1, "") for i in early}
    started = {i: model.new_bool_var("") for i in early}
    for i in early:
        for need, lag in shop.needs[i]:
            model.add_implication(started[i], started[need])
            model.add(begins[i] >= begins[need] + (shop.ticks[need] + lag)).only_enforce_if(started[i])
    for r in range(shop.num_ranks):
        mine = [i for i in early if shop.rank[i] == r]
        boxes = [model.new_optional_fixed_size_interval_var(begins[i], shop.ticks[i], started[i], "") for i in mine]
        model.add_no_overlap(boxes)
        _limit_memory(model, shop, r, mine, begins, started, ticks)
    mine = [i for i in early if shop.rank[i] == rank]
    over = model.new_int_var(0, max((shop.ticks[i] for i in mine), default=0), "")
    for i in mine:
        model.add(over >= begins[i] + (shop.ticks[i] - ticks)).only_enforce_if(started[i])
    model.maximize(sum(shop.ticks[i] * started[i] for i in mine) - over)
    for i in early:
        model.add_hint(started[i], 0)  # nothing starts: a solution from which on the bound counts
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return 0, spent
    return max(0, ticks - round(solver.best_objective_bound)), spent


def _relevant(shop: JobShop, rank: int, ticks: int) -> list[int]:
    """The operations of `rank` that could start in time, and those they wait for; with limits, what frees memory, too.

    Any other only takes time and memory from these.
    """
    early = {i for i in range(len(shop)) if shop.heads[i] < ticks}
    rest = [i for i in early if shop.rank[i] == rank or (shop.limits is not None and shop.freed[i])]
    found = set(rest)
    while rest:
        for need, _ in shop.needs[rest.pop()]:
            if need not in found:
                found.add(need)
                rest.append(need)
    return sorted(found)


def _limit_memory(
    model: Any, shop: JobShop, rank: int, mine: list[int], begins: dict[int, Any], started: dict[int, Any], ticks: int
) -> None:
    """What is taken and not given back in time is held to the end."""
    if shop.limits is None:
        return
    present = set(mine)
    end = ticks + max((shop.ticks[i] for i in mine), default=0)
    boxes, demands = [], []
    for i in (i for i in mine if shop.taken[i]):
        last = shop.freeing[i] if shop.freeing[i] in present else None
        until = model.new_int_var(0, end, "")
        if last is None:
            model.add(until == end)
        else:
            model.add(until == begins[last] + shop.ticks[last]).only_enforce_if(started[last])
            model.add(until == end).only_enforce_if(started[last].negated())
        size = model.new_int_var(0, end, "")
        boxes.append(model.new_optional_interval_var(begins[i], size, until, started[i], ""))
        demands.append(shop.taken[i])
    if sum(demands) > shop.limits[rank]:
        model.add_cumulative(boxes, demands, shop.limits[rank])
