"""Waves against brute force and a recursion, in code that shares nothing with the passes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from passes.placement.memory import StageMemory
from passes.placement.waves import moves, wave
from tests.partitions import WaveCase, wave_cases


def found_by(case: WaveCase, hard: bool) -> tuple[int, ...]:
    return wave(case.weights, case.skips, case.num_ranks, hard, case.cuts, case.costs, case.memory)


def largest(weights: list[float], skips: list[tuple[int, int]], num_ranks: int, cost: float | None = None) -> float:
    """Load of the busiest rank; skips may cross where that has a cost."""
    case = WaveCase(weights, skips, num_ranks, [cost or 0.0] * len(skips), [0] * (len(weights) + 1))
    return max(case.loads(found_by(case, cost is None)))


def check(case: WaveCase, hard: bool) -> None:
    """The pass finds the best of all waves, or says truly that none fits."""
    case = replace(case, costs=[0] * len(case.costs)) if hard else case
    every = [b for b in case.every() if not (hard and case.crossing(b))]
    if not every:
        with pytest.raises(CompileError, match="no wave fits"):
            found_by(case, hard)
        return
    found = found_by(case, hard)
    assert case.fits(found)
    values = {b: (max(case.loads(b)), len(case.crossing(b))) for b in every}
    value = max(case.loads(found)), len(case.crossing(found))
    assert value == min(values.values())
    alike = [case.ties(b) for b in every if values[b] == value and case.crossing(b) == case.crossing(found)]
    assert case.ties(found) == min(alike)


@given(wave_cases(max_blocks=7, max_ranks=3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_wave_is_best_of_all(case: WaveCase, hard: bool) -> None:
    check(case, hard)


@given(wave_cases(max_blocks=6, max_ranks=3, with_memory=True), st.booleans())
@settings(max_examples=200, deadline=None)
def test_wave_is_best_of_those_that_fit(case: WaveCase, hard: bool) -> None:
    check(case, hard)


def of_seed(seed: int, size: int, num_ranks: int) -> WaveCase:
    """More blocks than brute force can take; every third with a block that outweighs several ranks."""
    draw = random.Random(seed)
    weights = [draw.randint(0, 9) for _ in range(size)]
    if seed % 3 == 0:
        weights[draw.randrange(size)] = draw.randint(size, 3 * size)
    nested = [(k, size - 1 - k) for k in range(0, size // 2, 2)]
    crossed = [(draw.randrange(size // 2), draw.randrange(size // 2, size)) for _ in range(size // 2)]
    skips = (nested, crossed, nested + crossed, crossed[:2])[seed % 4]
    return WaveCase(weights, skips, num_ranks, [draw.randint(0, 3) for _ in skips], [0] * (size + 1))


@pytest.mark.parametrize("seed", range(24))
def test_soft_wave_agrees_with_a_recursion(seed: int) -> None:
    case = of_seed(seed, 10 + seed % 4, 2 + seed % 3)
    found = found_by(case, hard=False)
    assert (max(case.loads(found)), len(case.crossing(found))) == case.least()


def test_wave_keeps_a_u_net_together() -> None:
    skips = [(0, 7), (1, 6), (2, 5)]
    assert wave([1.0] * 8, skips, 2) == (0, 2, 3, 6, 8)


def test_skips_in_crossed_order_force_one_rank_unless_they_may_cross() -> None:
    skips = [(0, 4), (2, 6), (4, 7), (1, 2), (3, 6), (5, 7), (1, 4)]
    assert largest([1.0] * 8, skips, 2) == 8.0
    assert largest([1.0] * 8, skips, 2, 0.1) < 6


def test_large_instances_are_balanced() -> None:
    """200 blocks on 64 ranks: the mean is 3.125 blocks, so 4 is the least for unit blocks."""
    assert largest([1.0] * 200, [], 64) == 4.0
    nested = [(k, 199 - k) for k in range(100)]
    assert largest([1.0] * 200, nested, 8) == 26.0
    heavy = [1.0] * 66 + [70.0] + [1.0] * 133
    assert largest(heavy, [], 64) == 70.0
    assert largest(heavy, nested, 64, 0.25) == 70.25


def test_absurd_inputs_give_a_wave() -> None:
    assert wave([], [], 2) == (0, 0, 0, 0, 0)
    assert largest([3.0], [], 4) == 3.0
    assert largest([0.0] * 5, [(0, 4)], 3) == 0.0
    assert largest([1.0] * 3, [(0, 2)], 9, 1e9) <= 3.0


def test_memory_decides() -> None:
    """Two skips hold blocks 0, 1, 4, 5 and 2, 3 together: 4 blocks with 3 and 1 micro-batches in flight, 2 with 2."""
    memory = StageMemory([2**30] * 6, [2**29] * 6, [3, 2, 2, 1], [8 * 2**30] * 2)
    skips = [(0, 4), (1, 5)]
    assert wave([1.0] * 6, skips, 2, memory=memory) == (0, 2, 3, 4, 6)
    with pytest.raises(CompileError, match="no wave fits"):
        wave([1.0] * 6, skips, 2, memory=replace(memory, limit_bytes=[8 * 2**30 - 1] * 2))


def test_too_many_moves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_MOST", 10)
    with pytest.raises(CompileError, match=r"a wave over 6 blocks .* more than 10; cut the backbone into fewer blocks"):
        wave([1.0] * 6, [(0, 3), (1, 4), (2, 5)], 3, hard=False, skip_cost=[0.5] * 3)
