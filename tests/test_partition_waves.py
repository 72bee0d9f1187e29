"""Several waves per rank, and prices per pair of ranks, against brute force and an independent judge."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from fxpipe.plan.staged import Staged
from passes.placement.memory import StageMemory
from passes.placement.place import others, place
from passes.placement.shape import Shape, pipelines
from passes.placement.waves import many_waves, wave, waves
from tests.partitions import WaveCase, memories, wave_cases, wave_ranks
from tests.test_compare_by_hand import case as toy_case
from tests.test_compare_by_hand import network

Skips = list[tuple[int, int]]


def judge(
    boundaries: tuple[int, ...], ranks: tuple[int, ...], weights: list[int], skips: Skips, costs: list[int]
) -> tuple[list[int], list[int]]:
    runs = zip(ranks, pairwise(boundaries), strict=True)
    owner = [rank for rank, (start, stop) in runs for _ in range(start, stop)]
    loads = [0] * (max(ranks) + 1)
    for rank, weight in zip(owner, weights, strict=True):
        loads[rank] += weight
    crossing = [k for k, (a, b) in enumerate(skips) if owner[a] != owner[b]]
    for k in crossing:
        for end in skips[k]:
            loads[owner[end]] += costs[k]
    return loads, crossing


@given(wave_cases(max_blocks=12, max_ranks=3), st.integers(1, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_waves_are_what_they_say(case: WaveCase, num_waves: int, hard: bool) -> None:
    found = waves(case.weights, case.skips, case.num_ranks, num_waves, hard, case.cuts, case.costs)
    ranks = wave_ranks(case.num_ranks, num_waves)
    assert len(found.boundaries) == len(ranks) + 1
    assert all(a <= b for a, b in pairwise(found.boundaries))
    assert (found.boundaries[0], found.boundaries[-1]) == (0, len(case.weights))
    loads, crossing = judge(found.boundaries, ranks, case.weights, case.skips, case.costs)
    assert found.rank_loads == pytest.approx(loads)
    assert list(found.crossing) == crossing
    assert not (hard and crossing)


def test_one_wave_is_the_exact_one() -> None:
    weights, skips = [3, 1, 4, 1, 5, 9, 2, 6], [(0, 7), (2, 5)]
    one = wave(weights, skips, 3)
    assert waves(weights, skips, 3, 1).boundaries == one.boundaries


def test_two_waves_balance_where_one_cannot() -> None:
    """Skips force the blocks into nested pairs of 8, 6, 4 and 2 seconds: 8 + 2 and 6 + 4 take two waves."""
    weights, skips = [4, 3, 2, 1, 1, 2, 3, 4], [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert wave(weights, skips, 2).rank_loads == (8.0, 12.0)
    assert waves(weights, skips, 2, 2).rank_loads == (10.0, 10.0)


def test_search_finds_the_best_of_nearly_all_small_cases() -> None:
    """Two waves over two ranks, 8 blocks: every partition is judged."""
    best_found = 0
    for seed in range(8):
        draw = random.Random(seed)
        weights = [draw.randint(1, 9) for _ in range(8)]
        skips = [(k, 7 - k) for k in draw.sample(range(4), 2)]
        ranks, costs = wave_ranks(2, 2), [0, 0]
        every = ((0, *inner, 8) for inner in combinations_with_replacement(range(9), 7))
        results = (judge(b, ranks, weights, skips, costs) for b in every)
        best = min(max(loads) for loads, crossing in results if not crossing)
        found = max(waves(weights, skips, 2, 2).rank_loads)
        assert found >= best
        best_found += found == best
    assert best_found >= 7


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_waves_fit_into_memory_or_are_refused(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=10))
    memory = data.draw(memories(len(weights), 8, 2))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(many_waves, "TRIALS", 100)
            found = waves(weights, [], 2, 2, memory=memory)
    except CompileError:
        return
    used: Counter[int] = Counter()
    for stage, (start, stop) in enumerate(pairwise(found.boundaries)):
        kept = memory.in_flight[stage] * sum(memory.activation_bytes[start:stop])
        used[wave_ranks(2, 2)[stage]] += int(sum(memory.held_bytes[start:stop]) + kept)
    assert all(used[rank] <= memory.limit_bytes[rank] for rank in used)


def test_memory_decides_between_waves() -> None:
    """The first stages keep four micro-batches, so rank 0 takes less than its share of blocks."""
    memory = StageMemory([0.0] * 12, [1.0] * 12, [4, 1, 1, 1, 1, 1, 1, 1], [8] * 2)
    found = waves([1.0] * 12, [], 2, 2, memory=memory)
    assert max(found.rank_loads) == 6.0
    assert found.boundaries[1] == 0 or found.boundaries[1] * 4 + (6 - found.boundaries[1]) <= 8
    with pytest.raises(CompileError, match="no 2 waves were found"):
        waves([1.0] * 12, [], 2, 2, memory=StageMemory([1.0] * 12, [0.0] * 12, [1] * 8, [5] * 2))


def test_absurd_inputs() -> None:
    assert waves([], [], 2, 3).boundaries == (0,) * 13
    assert waves([5.0], [], 3, 2).max_over_mean == 3.0


def test_folds_share_out_sums_of_gradients_where_links_are_slow() -> None:
    """The middle has most of the weights: its rank, with as much to compute as the other, would sum most of them."""
    case = toy_case(8, 4, 8, cluster=network(1e6))
    weights = tuple(replace(w, num_bytes=(1 + 9 * (2 <= b < 6)) << 20) for b, w in enumerate(case.costs.weights))
    costs = replace(case.costs, weights=weights)
    given = case.graph, costs, costs.at(1), Shape("wave", 4, pipelines(2, 2)), case.cluster, 8

    def largest(staged: Staged) -> int:
        trained, sums = costs.trained_bytes, Counter[tuple[int, ...]]()
        for block, stage in enumerate(staged.stage_of_block):
            sums[staged.stage_ranks[stage]] += trained[block]
        return max(sums.values())

    found = place(*given)
    assert min(map(largest, others(*given, found))) < largest(found)
    fast = replace(case, cluster=network(1e12)).cluster
    assert not others(*given[:4], fast, 8, found)
