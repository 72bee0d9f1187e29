"""Windows of a schedule: each reordered as well as any permutation, searches that repeat, bounds from both ends."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.placement.waves import wave_ranks
from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.exact import reorder
from passes.schedules.job_shop import JobShop, Orders, job_shop, run, within_limits
from passes.schedules.list_rules import list_orders, rules
from passes.schedules.window_bound import least_idle, reversed_shop, window_bound_ticks
from passes.schedules.windows import improve
from tests.test_synthesis import small_chains, uniform


def shortest(shop: JobShop, orders: Orders, window: frozenset[int]) -> int:
    """The least makespan over all orders of the window on every rank, what is around it as it is."""
    choices = []
    for order in orders:
        free = [i for i in order if i in window]
        first = next((k for k, i in enumerate(order) if i in window), 0)
        ends = order[:first], order[first + len(free) :]
        choices.append([(*ends[0], *middle, *ends[1]) for middle in permutations(free)])
    lengths = []
    for tried in product(*choices):
        if within_limits(shop, tried):
            try:
                lengths.append(run(shop, tried).ticks)
            except AssertionError:  # they wait for each other
                continue
    return min(lengths)


@given(small_chains(), st.integers(0, 40), st.integers(2, 7), st.integers(0, 20))
@settings(deadline=None, max_examples=60)
def test_a_window_is_reordered_as_well_as_any_permutation(problem: object, number: int, size: int, first: int) -> None:
    shop = job_shop(problem, frozenset())  # type: ignore[arg-type]
    some = [orders for rule in rules(shop) if (orders := list_orders(shop, rule)) is not None]
    orders = [shop.on_rank, *some][number % (len(some) + 1)]
    known = run(shop, orders)
    times = sorted(known.start)
    begin = first % len(times)
    low, high = times[begin], times[min(begin + size, len(times) - 1)]
    window = frozenset(i for i, start in enumerate(known.start) if low <= start < high)
    if not 0 < len(window) <= 7:
        return
    found = reorder(shop, orders, window, limit=1.0)
    assert within_limits(shop, found.orders)
    assert run(shop, found.orders).ticks == found.ticks
    assert found.ticks == shortest(shop, orders, window)
    for before, after in zip(orders, found.orders, strict=True):
        assert sorted(before) == sorted(after)
        assert [i for i in before if i not in window] == [i for i in after if i not in window]


def test_a_search_depends_on_its_seed_alone_and_stays_in_its_regions() -> None:
    problem = uniform(wave_ranks(3), 8, 10, split=False, limit=5)
    shop = job_shop(problem, frozenset())
    start = next(orders for rule in rules(shop) if (orders := list_orders(shop, rule)) is not None)
    known = run(shop, start)
    early = frozenset(i for i, time in enumerate(known.start) if time < 0.3 * known.ticks)
    late = frozenset(i for i, time in enumerate(known.start) if time >= 0.7 * known.ticks)
    one, two = (improve(shop, start, limit=0.3, seed=3, bound_ticks=0, regions=(early, late)) for _ in range(2))
    assert one == two
    assert one.ticks < known.ticks
    for before, after in zip(start, one.orders, strict=True):
        for region in (early, late):
            assert [i in region for i in before] == [i in region for i in after]
        middle = [i for i in before if i not in early | late]
        assert middle == [i for i in after if i not in early | late]


@pytest.mark.parametrize("split", [False, True])
def test_idle_time_at_an_end_is_what_every_schedule_has(split: bool) -> None:
    problem = uniform(wave_ranks(3), 6, 10, split=split, limit=5)
    split_stages = problem.splittable
    shop = job_shop(problem, split_stages)
    for rank, ticks in product(range(3), (60, 120)):
        idle, _ = least_idle(shop, rank, ticks, limit=0.3, seed=0)
        for rule in rules(shop):
            orders = list_orders(shop, rule)
            assert orders is not None
            known = run(shop, orders)
            busy = sum(max(0, min(ticks, known.start[i] + shop.ticks[i]) - known.start[i]) for i in orders[rank])
            assert ticks - busy >= idle


def test_the_bound_from_both_ends_is_met_by_a_schedule() -> None:
    problem = uniform(wave_ranks(4), 8, 10, split=False, limit=8)
    shop = job_shop(problem, frozenset())
    bound, _ = window_bound_ticks(shop, lower_bound_ticks(shop), 10**6, limit=0.1, seed=0)
    assert lower_bound_ticks(shop) < bound == 612
    twice = reversed_shop(reversed_shop(shop))
    assert [sorted(needs) for needs in twice.needs] == [sorted(needs) for needs in shop.needs]
    assert (twice.taken, twice.rank, twice.ticks) == (shop.taken, shop.rank, shop.ticks)
