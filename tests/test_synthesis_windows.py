"""Windows of a schedule: each reordered as well as any permutation, and searches that repeat."""

from dataclasses import replace
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.exact import reorder
from passes.schedules.job_shop import JobShop, RankOrders, job_shop, run, within_limits
from passes.schedules.policies import LIST_RULES
from passes.schedules.problem import Problem
from passes.schedules.rules import rule_orders
from passes.schedules.windows import improve
from tests.partitions import wave_ranks
from tests.test_synthesis import problems, small_chains, uniform
from tests.test_synthesis import shortest as shortest_schedule


def shortest(shop: JobShop, orders: RankOrders, window: frozenset[int]) -> int:
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
            except ScheduleError:  # they wait for each other
                continue
    return min(lengths)


def some_orders(problem: Problem, shop: JobShop) -> list[RankOrders]:
    """Every list schedule; memory stops none of a chain of stages."""
    replicas = [(rank,) for rank in problem.stage_rank]
    found = [rule_orders(shop, rule, problem.work, replicas) for rule in LIST_RULES]
    return [orders for orders in found if orders is not None]


@given(small_chains(), st.integers(0, len(LIST_RULES)), st.integers(2, 7), st.integers(0, 20))
@settings(deadline=None, max_examples=60)
def test_a_window_is_reordered_as_well_as_any_permutation(problem: Problem, number: int, size: int, first: int) -> None:
    shop = job_shop(problem, frozenset())
    orders = [shop.on_rank, *some_orders(problem, shop)][number]
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


@given(problems(), st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_ticks_are_those_of_the_simulator(problem: Problem, lag: int) -> None:
    """Of times that have a common unit, for every list schedule of whole and split backwards."""
    seconds = {kind: [round(2 * t) for t in times] for kind, times in problem.seconds.items()}
    problem = replace(problem, seconds=seconds, lag=lambda a, b, kind: float(lag * (a != b)))
    for split in (problem.splittable, frozenset[int]()):
        shop = job_shop(problem, split)
        for orders in [shop.on_rank, *some_orders(problem, shop)]:
            known = run(shop, orders)
            times = problem.simulate(shop.schedule("any", problem.work.num_stages, orders))
            assert known.ticks * shop.seconds_per_tick == times.makespan_seconds
            for action, start in zip(shop.actions, known.start, strict=True):
                assert start * shop.seconds_per_tick == times.start_seconds[action]


def test_a_search_gives_the_same_every_time() -> None:
    problem = uniform(wave_ranks(3), 8, 10, split=False, limit=5)
    shop = job_shop(problem, frozenset())
    start = some_orders(problem, shop)[0]
    one, two = (improve(shop, [start], limit=0.3, bound_ticks=0) for _ in range(2))
    assert one == two
    assert one.ticks < run(shop, start).ticks


def test_a_window_of_everything_proves_the_shortest() -> None:
    problem = uniform((0, 1, 1, 0), 2, 4, split=False, limit=3)
    shop = job_shop(problem, frozenset())
    bound = lower_bound_ticks(shop)
    found = improve(shop, [shop.on_rank], limit=1.0, bound_ticks=bound)
    assert found.spent < 1.0
    assert bound < found.bound_ticks == found.ticks == shortest_schedule(problem)
