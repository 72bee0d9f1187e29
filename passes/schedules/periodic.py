"""One period of a schedule that repeats, by CP-SAT.

    period 6   rank 0 | F0 .  F3 B3 B3 .  |           how many periods two operations of a rank are apart, rounded down,
               rank 1 | F2 B2 B2 B1 B1 F1 |           tells their order, and how many micro-batches are held

For operations a and b of a rank with starts x, K[a, b] = floor((x[b] - x[a]) / period) is the only other integer:

    ticks[a] <= x[b] - x[a] - K[a, b] period <= period - ticks[b]         a and b never overlap
    at the start of f, stage s holds K[F of s, f] - K[its last, f]        micro-batches, and they must fit

which is the periodic event scheduling problem (Serafini and Ukovich, 1989): 30 times as fast, measured, as places
within the period and their order.
"""

from itertools import combinations
from typing import Any

from ortools.sat.python import cp_model

from passes.schedules.job_shop import JobShop
from passes.schedules.unrolling import Pattern

_MOST_SPAN = 2.5  # of a micro-batch, in multiples of the least
_Place = tuple[int, int]  # micro-batch of the period, operation


def repeating(one: JobShop, copies: int, period: int, *, limit: float, seed: int) -> tuple[Pattern | None, float]:
    """(a pattern of `copies` micro-batches every `period` ticks or None, the deterministic seconds spent).

    The objective is nothing but to be a pattern: a search for the shortest flight took minutes where this takes
    milliseconds, and what follows squeezes both ends anyway.
    """
    model = cp_model.CpModel()
    least = max(h + t + u for h, t, u in zip(one.heads, one.ticks, one.tails, strict=True))
    horizon = int(_MOST_SPAN * least) + (copies > 1) * period
    starts = {
        (c, i): model.new_int_var(one.heads[i], horizon - one.ticks[i] - one.tails[i], "")
        for c in range(copies)
        for i in range(len(one))
    }
    model.add(starts[0, 0] == one.heads[0])
    _precede(model, one, starts, copies, period)
    for rank, mine in enumerate(one.on_rank):
        places = [(c, i) for c in range(copies) for i in mine]
        apart = _apart(model, one, starts, places, period, horizon // period + 1)
        _limit_memory(model, one, apart, places, rank)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, spent
    found = tuple(tuple(solver.value(starts[c, i]) for i in range(len(one))) for c in range(copies))
    return Pattern(period, found), spent


def _precede(model: Any, one: JobShop, starts: dict[_Place, Any], copies: int, period: int) -> None:
    """A micro-batch's own order, and that of a period's micro-batches on every stage."""
    for (c, i), start in starts.items():
        for need, lag in one.needs[i]:
            model.add(start >= starts[c, need] + (one.ticks[need] + lag))
        if c:
            model.add(start >= starts[c - 1, i] + one.ticks[i])
        if c and c == copies - 1:
            model.add(start + one.ticks[i] <= starts[0, i] + period)


def _apart(
    model: Any, one: JobShop, starts: dict[_Place, Any], places: list[_Place], period: int, most: int
) -> dict[tuple[_Place, _Place], Any]:
    """K of every two operations of a rank, which do not overlap modulo the period."""
    apart: dict[tuple[_Place, _Place], Any] = {}
    for a, b in combinations(places, 2):
        same = a[1] == b[1]  # of two micro-batches of the period, the former is first
        number = 0 if same else model.new_int_var(-most - 1, most, "")
        apart[a, b], apart[b, a] = number, -1 - number
        rest = starts[b] - starts[a] - period * number
        model.add(rest >= one.ticks[a[1]])
        model.add(rest <= period - one.ticks[b[1]])
    for a, b, c in combinations(places, 3):
        model.add_linear_constraint(apart[a, c] - apart[a, b] - apart[b, c], 0, 1)
    return apart


def _limit_memory(
    model: Any, one: JobShop, apart: dict[tuple[_Place, _Place], Any], places: list[_Place], rank: int
) -> None:
    if one.limits is None:
        return
    forwards = [((c, i), (c, one.freeing[i])) for c, i in places if i in one.freeing]
    for now, _ in forwards:
        begun = [(0 if forward == now else apart[forward, now]) - apart[last, now] for forward, last in forwards]
        held = [one.taken[forward[1]] * count for (forward, _), count in zip(forwards, begun, strict=True)]
        model.add(sum(held) <= one.limits[rank])
