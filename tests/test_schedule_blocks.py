"""One micro-batch's block, repeated: every operation in its first free place."""

from hypothesis import given, settings
from hypothesis import strategies as st

from passes.schedules.blocks import shortest_block
from passes.schedules.job_shop import job_shop
from passes.schedules.problem import Problem
from tests.test_schedule import chain


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=100)
def test_a_block_never_overlaps_its_repetitions(stages: list[tuple[int, int, int]]) -> None:
    ranks, forward, half = zip(*stages, strict=True)
    seconds = {"F": forward, "B": [2 * t for t in half], "I": half, "W": half}
    shop = job_shop(Problem(chain(len(stages), 3), ranks, seconds, 3), frozenset(range(len(stages))))
    period, starts = shortest_block(shop, 1)
    assert len(starts) == len(shop) // 3
    for i, start in starts.items():
        assert all(start >= starts[n] + shop.ticks[n] for n, _ in shop.needs[i])
        for j in range(i):
            if shop.rank[i] == shop.rank[j]:
                ahead = (start - starts[j]) % period
                assert shop.ticks[j] <= ahead <= period - shop.ticks[i]
