"""Common-span filling against brute force that shares no code with it; bubbles against instants between changes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from passes.comparison.published.choose import greedy_choices
from passes.comparison.published.spans import Bubble, after, common_bubbles, initial
from passes.costs.layer import FrozenComponent
from passes.fill.problem import FillProblem
from tests.fill_problems import affine, fill, problems

Progress = tuple[tuple[int, int], ...]
TINY = problems(most_ranks=3, most_components=2, most_layers=3, most_samples=6)


def ways(problem: FillProblem, component: int, ranks: tuple[int, ...]) -> int:
    given_ranks = problem.components[component].ranks
    number = sum(given_ranks is None or rank in given_ranks for rank in ranks)
    return min(1, number) if problem.components[component].whole else number


def moves(problem: FillProblem, bubble: Bubble, progress: Progress) -> Iterator[tuple[Progress, float]]:
    """Every set of layers that a bubble admits, in part at most one, as what is done then and the seconds it takes."""
    ready = [
        c
        for c, component in enumerate(problem.components)
        if ways(problem, c, bubble.ranks)
        and all(progress[d][0] == len(problem.components[d].layers) for d in component.depends)
    ]

    def whole(position: int, now: Progress, used: float) -> Iterator[tuple[Progress, float]]:
        if position == len(ready):
            yield now, used
            return
        yield from whole(position + 1, now, used)
        c = ready[position]
        number, layers = ways(problem, c, bubble.ranks), problem.seconds[c]
        for layer in range(progress[c][0], len(layers)):
            left = problem.batch_size - now[c][1]
            used += layers[layer][(left + number - 1) // number]
            if used > bubble.seconds:
                return
            now = (*now[:c], (layer + 1, 0), *now[c + 1 :])
            yield from whole(position + 1, now, used)

    for now, used in whole(0, progress, 0.0):
        yield now, used
        for c in ready if problem.partial else ():
            layer, done = now[c]
            for size in problem.local_batches:
                reached = done + size * ways(problem, c, bubble.ranks)
                if layer == len(problem.seconds[c]) or problem.components[c].whole or reached >= problem.batch_size:
                    continue
                seconds = problem.seconds[c][layer][size]
                if used + seconds <= bubble.seconds:
                    yield (*now[:c], (layer, reached), *now[c + 1 :]), used + seconds


def tail(problem: FillProblem, progress: Progress) -> float:
    total = 0.0
    for c, (component, (layer, done)) in enumerate(zip(problem.components, progress, strict=True)):
        number = ways(problem, c, tuple(range(problem.num_ranks)))
        for position in range(layer, len(component.layers)):
            left = problem.batch_size - (done if position == layer else 0)
            total += problem.seconds[c][position][(left + number - 1) // number]
    return total


@settings(max_examples=120)
@given(TINY, st.sampled_from(((1, 2, 3), (2,), ())))
def test_exact_is_the_least_of_all(problem: FillProblem, sizes: tuple[int, ...]) -> None:
    problem = replace(problem, local_batches=sizes)
    states: set[Progress] = {((0, 0),) * len(problem.components)}
    for bubble in common_bubbles(problem)[:4]:
        states = {reached for state in states for reached, _ in moves(problem, bubble, state)}
    least = min(tail(problem, state) for state in states)
    bubbles = common_bubbles(problem)
    if len(bubbles) <= 4:
        assert fill(problem, "exact").tail_seconds == pytest.approx(least, rel=1e-9, abs=1e-12)
    else:
        assert fill(problem, "exact").tail_seconds <= least + 1e-12


@settings(max_examples=120)
@given(TINY, st.sampled_from(((1, 2, 3), (2,), ())))
def test_greedy_takes_the_longest(problem: FillProblem, sizes: tuple[int, ...]) -> None:
    problem = replace(problem, local_batches=sizes)
    chosen = dict(greedy_choices(problem))
    state = initial(problem)
    for bubble in common_bubbles(problem):
        longest = max(used for _, used in moves(problem, bubble, state))
        taken = chosen[bubble].seconds if bubble in chosen else 0.0
        assert taken == pytest.approx(longest, abs=1e-12)
        state = after(problem, state, bubble, chosen[bubble]) if bubble in chosen else state
    assert fill(problem, "greedy").tail_seconds == pytest.approx(tail(problem, state), abs=1e-12)


def test_thinned_combinations_lose_next_to_nothing() -> None:
    """Five components of nine layers: 100,000 combinations, which the exact filler refuses."""
    parts = tuple(
        FrozenComponent(f"c{i}", tuple(affine(0.0, (1 + i / 7 + j / 11) / 1e4) for j in range(9))) for i in range(6)
    )
    problem = FillProblem(0.1, (((0.0, 0.05),),), parts, 16, partial=False)
    ((bubble, choice),) = greedy_choices(problem)
    assert bubble.seconds * (1 - 1e-3) < choice.seconds <= bubble.seconds
    with pytest.raises(CompileError, match="combinations of layers fit into a bubble"):
        fill(problem, "exact")


@given(problems())
def test_bubbles_are_the_spans_between_changes(problem: FillProblem) -> None:
    times = sorted({0.0, problem.pipeline_seconds, *(t for idle in problem.idle for i in idle for t in i)})
    middles = [(a + b) / 2 for a, b in pairwise(times)]
    bubbles = common_bubbles(replace(problem, min_bubble_seconds=0.0))
    for middle in middles:
        idle = tuple(r for r, spans in enumerate(problem.idle) if any(a < middle < b for a, b in spans))
        found = [b.ranks for b in bubbles if b.start_seconds < middle < b.end_seconds]
        assert found == ([idle] if idle else [])
    for first, second in pairwise(bubbles):
        assert first.end_seconds < second.start_seconds or first.ranks != second.ranks
    long = tuple(b for b in bubbles if b.seconds >= problem.min_bubble_seconds)
    assert common_bubbles(problem) == long
