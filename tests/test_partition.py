"""Partitions against brute force, in code that shares nothing with the passes."""

from itertools import combinations, combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.partition import WavePartition, interleaved, linear, wave

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(WEIGHTS, st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_linear_is_best_of_all(weights: list[int], num_stages: int, data: st.DataObject) -> None:
    size = len(weights)
    cuts = [0, *data.draw(st.lists(st.integers(0, 9), min_size=size - 1, max_size=size - 1)), 0]
    used = min(size, num_stages)

    def value(positions: tuple[int, ...]) -> tuple[int, int]:
        loads = [sum(weights[a:b]) for a, b in pairwise(positions)]
        return max(loads), sum(cuts[p] for p in positions)

    found = linear(weights, num_stages, cuts)
    assert len(found) == num_stages + 1
    assert found[used:] == (size,) * (num_stages + 1 - used)
    assert all(a < b for a, b in pairwise(found[: used + 1]))
    best = min(value((0, *inner, size)) for inner in combinations(range(1, size), used - 1))
    assert value(found[: used + 1]) == best


def test_linear_prefers_the_cheap_cut_over_rounding() -> None:
    assert linear([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2, [0, 9, 9, 1, 9, 9, 0]) == (0, 3, 6)


def test_interleaved_has_chunks_on_every_rank() -> None:
    assert interleaved([1.0] * 8, num_ranks=2, chunks=2) == (0, 2, 4, 6, 8)


def test_more_stages_than_blocks() -> None:
    assert linear([1.0, 1.0], 4) == (0, 1, 2, 2, 2)
    assert linear([], 2) == (0, 0, 0)


def owners(boundaries: tuple[int, ...]) -> dict[int, int]:
    num_ranks = (len(boundaries) - 1) // 2
    return {
        block: min(stage, 2 * num_ranks - 1 - stage)
        for stage in range(2 * num_ranks)
        for block in range(boundaries[stage], boundaries[stage + 1])
    }


def judge(
    boundaries: tuple[int, ...], weights: list[int], skips: list[tuple[int, int]], costs: list[int], cuts: list[int]
) -> tuple[list[int], tuple[int, int, int, int]]:
    """Rank loads, and the objectives in order: largest load, crossing skips, empty stages, cuts."""
    owner = owners(boundaries)
    crossing = [(a, b, c) for (a, b), c in zip(skips, costs, strict=True) if owner[a] != owner[b]]
    loads = [
        sum(w for block, w in enumerate(weights) if owner[block] == rank)
        + sum(c for a, b, c in crossing if rank in (owner[a], owner[b]))
        for rank in range((len(boundaries) - 1) // 2)
    ]
    empty = sum(a == b for a, b in pairwise(boundaries))
    return loads, (max(loads), len(crossing), empty, sum(cuts[p] for p in set(boundaries)))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.integers(1, 3), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_wave_is_best_of_all(weights: list[int], num_ranks: int, hard: bool, data: st.DataObject) -> None:
    size = len(weights)
    block = st.integers(0, size - 1)
    skips = data.draw(st.lists(st.tuples(block, block).filter(lambda pair: pair[0] != pair[1]), max_size=4))
    costs = data.draw(st.lists(st.integers(0, 5), min_size=len(skips), max_size=len(skips)))
    cuts = [0, *data.draw(st.lists(st.integers(0, 9), min_size=size - 1, max_size=size - 1)), 0]
    costs = [0] * len(skips) if hard else costs

    found = wave(weights, skips, num_ranks, hard, cuts, costs)
    every = (
        judge((0, *inner, size), weights, skips, costs, cuts)[1]
        for inner in combinations_with_replacement(range(size + 1), 2 * num_ranks - 1)
    )
    loads, value = judge(found.boundaries, weights, skips, costs, cuts)
    assert value == min(candidate for candidate in every if not hard or candidate[1] == 0)
    assert found.rank_loads == pytest.approx(loads)
    assert found.max_over_mean == pytest.approx(max(loads) * num_ranks / sum(weights) if sum(weights) else 1.0)
    owner = owners(found.boundaries)
    assert found.crossing == tuple(k for k, (a, b) in enumerate(skips) if owner[a] != owner[b])


def test_wave_keeps_a_u_net_together() -> None:
    skips = [(0, 7), (1, 6), (2, 5)]
    assert wave([1.0] * 8, skips, 2) == WavePartition((0, 2, 3, 6, 8), (4.0, 4.0), 1.0, ())


def test_skips_in_crossed_order_force_one_rank_unless_they_may_cross() -> None:
    skips = [(0, 4), (2, 6), (4, 7), (1, 2), (3, 6), (5, 7), (1, 4)]
    hard = wave([1.0] * 8, skips, 2)
    assert sorted(hard.rank_loads) == [0.0, 8.0]
    soft = wave([1.0] * 8, skips, 2, hard=False, skip_cost=[0.1] * 7)
    assert soft.max_over_mean < 1.5
    assert soft.crossing


def test_large_instances_are_balanced() -> None:
    """200 blocks on 64 ranks: the mean is 3.125 blocks, so 4 is the least for unit blocks."""
    assert max(wave([1.0] * 200, [], 64).rank_loads) == 4.0
    nested = [(k, 199 - k) for k in range(100)]
    assert max(wave([1.0] * 200, nested, 8).rank_loads) == 26.0
