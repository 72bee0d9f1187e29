"""Lines of stages against brute force, in code that shares nothing with the passes."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from passes.placement.lines import linear

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def lines(size: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All positions of stages none of which is empty, but the last when there are fewer blocks."""
    used = min(size, num_stages)
    for inner in combinations(range(1, size), used - 1):
        yield (0, *inner, *[size] * (num_stages + 1 - used))


@given(WEIGHTS, st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_linear_is_best_of_all(weights: list[int], num_stages: int, data: st.DataObject) -> None:
    size = len(weights)
    cuts = [0, *data.draw(st.lists(st.integers(0, 9), min_size=size - 1, max_size=size - 1)), 0]

    def value(positions: tuple[int, ...]) -> tuple[int, int]:
        return max(sum(weights[a:b]) for a, b in pairwise(positions)), sum(cuts[p] for p in set(positions))

    every = list(lines(size, num_stages))
    found = linear(weights, num_stages, cuts)
    assert found in every
    assert value(found) == min(map(value, every))


def test_linear_prefers_the_cheap_cut_over_rounding() -> None:
    assert linear([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2, [0, 9, 9, 1, 9, 9, 0]) == (0, 3, 6)


def test_more_stages_than_blocks() -> None:
    assert linear([1.0, 1.0], 4) == (0, 1, 2, 2, 2)
    assert linear([], 2) == (0, 0, 0)
