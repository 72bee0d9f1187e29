"""Several waves per rank, and prices per pair of ranks, against brute force and an independent judge."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from fxpipe.plan.staged import Staged
from passes.placement.memory import StageMemory
from passes.placement.place import others, place
from passes.placement.shape import Shape, pipelines
from passes.placement.waves import wave
from tests.partitions import WaveCase, memories, wave_cases, wave_ranks
from tests.test_compare_by_hand import case as toy_case
from tests.test_compare_by_hand import network

Skips = list[tuple[int, int]]


def judge(
    boundaries: tuple[int, ...], ranks: tuple[int, ...], weights: Sequence[float], skips: Skips
) -> tuple[list[float], list[int]]:
    """Loads of the ranks, and the skips that cross these."""
    runs = zip(ranks, pairwise(boundaries), strict=True)
    owner = [rank for rank, (start, stop) in runs for _ in range(start, stop)]
    loads = [0.0] * (max(ranks) + 1)
    for rank, weight in zip(owner, weights, strict=True):
        loads[rank] += weight
    return loads, [k for k, (a, b) in enumerate(skips) if owner[a] != owner[b]]


@given(wave_cases(max_blocks=12, max_ranks=3), st.integers(1, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_waves_are_what_they_say(case: WaveCase, num_waves: int, hard: bool) -> None:
    found = wave(case.weights, case.skips, case.num_ranks, hard, case.cuts, case.costs, num_waves=num_waves)
    ranks = wave_ranks(case.num_ranks, num_waves)
    assert len(found) == len(ranks) + 1
    assert all(a <= b for a, b in pairwise(found))
    assert (found[0], found[-1]) == (0, len(case.weights))
    assert not (hard and judge(found, ranks, case.weights, case.skips)[1])


def test_two_waves_balance_where_one_cannot() -> None:
    """Skips force the blocks into nested pairs of 8, 6, 4 and 2 seconds: 8 + 2 and 6 + 4 take two waves."""
    weights, skips = [4, 3, 2, 1, 1, 2, 3, 4], [(0, 7), (1, 6), (2, 5), (3, 4)]
    loads = [judge(wave(weights, skips, 2, num_waves=n), wave_ranks(2, n), weights, skips)[0] for n in (1, 2)]
    assert loads == [[8, 12], [10, 10]]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_waves_fit_into_memory_or_are_refused(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=10))
    memory = data.draw(memories(len(weights), 8, 2))
    try:
        found = wave(weights, [], 2, memory=memory, num_waves=2)
    except CompileError:
        return
    used: Counter[int] = Counter()
    for stage, (start, stop) in enumerate(pairwise(found)):
        kept = memory.in_flight[stage] * sum(memory.activation_bytes[start:stop])
        used[wave_ranks(2, 2)[stage]] += int(sum(memory.held_bytes[start:stop]) + kept)
    assert all(used[rank] <= memory.limit_bytes[rank] for rank in used)


def test_memory_decides_between_waves() -> None:
    """The first stages keep four micro-batches, so rank 0 takes less than its share of blocks."""
    memory = StageMemory([0.0] * 12, [1.0] * 12, [4, 1, 1, 1, 1, 1, 1, 1], [8] * 2)
    found = wave([1.0] * 12, [], 2, memory=memory, num_waves=2)
    assert judge(found, wave_ranks(2, 2), [1.0] * 12, [])[0] == [6.0, 6.0]
    assert found[1] * 4 + (6 - found[1]) <= 8
    with pytest.raises(CompileError, match="no wave fits"):
        wave([1.0] * 12, [], 2, memory=StageMemory([1.0] * 12, [0.0] * 12, [1] * 8, [5] * 2), num_waves=2)


def test_absurd_inputs() -> None:
    assert wave([], [], 2, num_waves=3) == (0,) * 13
    assert {*wave([5.0], [], 3, num_waves=2)} == {0, 1}


def test_folds_share_out_sums_of_gradients_where_links_are_slow() -> None:
    """The middle has most of the weights: its rank, with as much to compute as the other, would sum most of them."""
    case = toy_case(8, 4, 8, cluster=network(1e6))
    weights = tuple(replace(w, num_bytes=(1 + 9 * (2 <= b < 6)) << 20) for b, w in enumerate(case.costs.weights))
    costs = replace(case.costs, weights=weights)
    case = replace(case, costs=costs)
    given = costs.at(1), Shape("wave", 4, pipelines(2, 2)), 8

    def largest(staged: Staged) -> int:
        trained, sums = costs.trained_bytes, Counter[tuple[int, ...]]()
        for block, stage in enumerate(staged.stage_of_block):
            sums[staged.stage_ranks[stage]] += trained[block]
        return max(sums.values())

    found = place(case, *given)
    assert min(map(largest, others(case, *given, found))) < largest(found)
    fast = replace(case, cluster=network(1e12))
    assert not others(fast, *given, found)
