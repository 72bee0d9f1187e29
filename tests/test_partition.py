"""Lines of stages against brute force, in code that shares nothing with the passes."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from passes.placement.lines import linear
from passes.placement.memory import StageMemory
from tests.partitions import memories

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
    memory = data.draw(st.one_of(st.none(), memories(size, num_stages, num_stages)))

    def value(positions: tuple[int, ...]) -> tuple[int, int]:
        return max(sum(weights[a:b]) for a, b in pairwise(positions)), sum(cuts[p] for p in set(positions))

    fitting = [p for p in lines(size, num_stages) if memory is None or fits(p, memory)]
    if fitting:
        found = linear(weights, num_stages, cuts, memory)
        assert found in fitting
        assert value(found) == min(map(value, fitting))
    else:
        with pytest.raises(CompileError, match="no line of stages fits"):
            linear(weights, num_stages, cuts, memory)


def used(positions: Sequence[int], memory: StageMemory) -> list[float]:
    return [
        sum(memory.held_bytes[a:b]) + micro * sum(memory.activation_bytes[a:b])
        for (a, b), micro in zip(pairwise(positions), memory.in_flight, strict=True)
    ]


def fits(positions: Sequence[int], memory: StageMemory) -> bool:
    limit = memory.limit_bytes
    limits = limit if isinstance(limit, Sequence) else [limit] * (len(positions) - 1)
    return all(bytes_ <= room for bytes_, room in zip(used(positions, memory), limits, strict=True))


@given(WEIGHTS, st.integers(1, 4), st.data())
@settings(max_examples=100, deadline=None)
def test_too_little_memory_names_the_smallest_limit(weights: list[int], stages: int, data: st.DataObject) -> None:
    memory = data.draw(memories(len(weights), stages, stages))
    least = max(int(min(max(used(p, memory)) for p in lines(len(weights), stages))), 1)
    tight = StageMemory(memory.held_bytes, memory.activation_bytes, memory.in_flight, least)
    assert fits(linear(weights, stages, memory=tight), tight)
    if least > 1:
        short = StageMemory(memory.held_bytes, memory.activation_bytes, memory.in_flight, least - 1)
        with pytest.raises(CompileError, match=rf"the smallest limit that would do is .* \({least} bytes\); take more"):
            linear(weights, stages, memory=short)


def test_linear_prefers_the_cheap_cut_over_rounding() -> None:
    assert linear([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2, [0, 9, 9, 1, 9, 9, 0]) == (0, 3, 6)


def test_memory_moves_the_cut() -> None:
    """Two micro-batches in flight on stage 0, one on stage 1: 2 blocks and 4 take 4 units each."""
    memory = StageMemory([0.0] * 6, [1.0] * 6, [2, 1], 4)
    assert linear([1.0] * 6, 2) == (0, 3, 6)
    assert linear([1.0] * 6, 2, memory=memory) == (0, 2, 6)


def test_more_stages_than_blocks() -> None:
    assert linear([1.0, 1.0], 4) == (0, 1, 2, 2, 2)
    assert linear([], 2) == (0, 0, 0)


def test_refusals() -> None:
    with pytest.raises(CompileError, match="num_stages=0; it must be at least 1"):
        linear([1.0], 0)
    with pytest.raises(CompileError, match=r"weights\[0\] is inf"):
        linear([float("inf")], 1)
    with pytest.raises(CompileError, match="held_bytes has 0 entries, not 1"):
        linear([1.0], 1, memory=StageMemory([], [1], [1], 1))
