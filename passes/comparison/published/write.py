"""Write what was chosen in common-span bubbles as pieces of every rank.

    bubble of ranks 0 1: vae layers 0:3 on all 16 samples          rank 0: vae[0:3] x 0:8
    tail: the rest, on all ranks                              ->   rank 1: vae[0:3] x 8:16   ...

A run starts on all its ranks at once, when the longest piece of the run before has ended.
"""

from collections.abc import Sequence
from math import inf

from passes.comparison.published.bubbles import Bubble
from passes.comparison.published.spans import Choice, State, after, initial, width
from passes.fill.problem import FillProblem
from passes.fill.result import Fill, Piece, make_fill


def write(problem: FillProblem, method: str, chosen: Sequence[tuple[Bubble, Choice]]) -> Fill:
    """The fill that makes these choices, and leaves the rest to the tail."""
    ranks: list[list[Piece]] = [[] for _ in range(problem.num_ranks)]
    state = initial(problem)
    for bubble, choice in chosen:
        _write_choice(problem, ranks, state, bubble, choice)
        state = after(problem, state, bubble, choice)
    rest = tuple(len(c.layers) - layer for c, (layer, _) in zip(problem.components, state, strict=True))
    tail = Bubble(problem.pipeline_seconds, inf, tuple(range(problem.num_ranks)))
    _write_choice(problem, ranks, state, tail, Choice(rest, None, 0.0))
    return make_fill(problem, method, False, ranks)


def _write_choice(
    problem: FillProblem, ranks: Sequence[list[Piece]], state: State, bubble: Bubble, choice: Choice
) -> None:
    now, batch = bubble.start_seconds, problem.batch_size
    for component, ((layer, done), count) in enumerate(zip(state, choice.counts, strict=True)):
        if count and done:
            now = _write_run(problem, ranks, bubble, now, component, (layer, layer + 1), (done, batch))
            layer, count = layer + 1, count - 1
        if count:
            now = _write_run(problem, ranks, bubble, now, component, (layer, layer + count), (0, batch))
    if choice.partial is not None:
        component, size = choice.partial
        layer, done = after(problem, state, bubble, Choice(choice.counts, None, 0.0))[component]
        samples = done, done + size * width(problem, component, bubble.ranks)
        _write_run(problem, ranks, bubble, now, component, (layer, layer + 1), samples)


def _write_run(
    problem: FillProblem,
    ranks: Sequence[list[Piece]],
    bubble: Bubble,
    start: float,
    component: int,
    layers: tuple[int, int],
    samples: tuple[int, int],
) -> float:
    """One piece per rank that shares the run; returns when the longest ends."""
    ways = width(problem, component, bubble.ranks)
    usable = [rank for rank in bubble.ranks if rank in problem.ranks_of(component)][:ways]
    size, larger = divmod(samples[1] - samples[0], ways)
    end, first = start, samples[0]
    for place, rank in enumerate(usable):
        last = first + size + (place < larger)
        if last > first:
            seconds = sum(table[last - first] for table in problem.seconds[component][slice(*layers)])
            ranks[rank].append(Piece(component, *layers, first, last, start, start + seconds))
            end = max(end, start + seconds)
        first = last
    return end
