"""What is chosen in every common-span bubble, one after the other.

greedy    Algorithm 1: every bubble in time order; Algorithm 2: of all combinations of whole layers, with one more layer
          on a part of its samples, the one that keeps its ranks busy longest (DiffusionPipe: Tian et al., MLSys 2024)
exact     the least tail of all such choices: dynamic programming over bubbles

    after bubble   0        1                 2
                   (0, 0)   (3, 0) (2, 4)     (5, 2) (3, 6)      layers done of two components: whoever has both done
                                   (1, 4) x   (4, 2) x           further has no longer tail, so the others go

Of the combinations, those that leave room for another whole layer of the component that is cut are passed over: the
whole layer keeps the ranks busy at least as long as a part of it.

    bubble of ranks 0 1: vae layers 0:3 on all 16 samples          rank 0: vae[0:3] x 0:8
    tail: the rest, on all ranks                              ->   rank 1: vae[0:3] x 8:16   ...

A run of layers starts on all its ranks at once, when the longest piece of the run before has ended.
"""

from collections.abc import Sequence
from math import inf

from fxpipe.errors import CompileError
from passes.comparison.published.spans import (
    Bubble,
    Choice,
    State,
    after,
    choices,
    common_bubbles,
    initial,
    tail_seconds,
    width,
)
from passes.fill.problem import FillProblem
from passes.fill.result import Fill, Piece, make_fill

Chosen = tuple[tuple[Bubble, Choice], ...]

_MOST_STATES = 20_000


def greedy(problem: FillProblem) -> Fill:
    """The longest choice of every bubble; the tail runs layer after layer on all ranks."""
    return _written(problem, "greedy", greedy_choices(problem))


def greedy_choices(problem: FillProblem) -> Chosen:
    """The longest choice of every bubble."""
    chosen, state = [], initial(problem)
    for bubble in common_bubbles(problem):
        best = max(choices(problem, state, bubble, thin=True), key=lambda choice: choice.seconds, default=None)
        if best is not None:
            chosen.append((bubble, best))
            state = after(problem, state, bubble, best)
    return tuple(chosen)


def exact(problem: FillProblem) -> Fill:
    """The fill with the least tail of all that fill common-span bubbles.

    Raises:
        CompileError: too many combinations or states.
    """
    states: dict[State, Chosen] = {initial(problem): ()}
    for bubble in common_bubbles(problem):
        found = dict(states)
        for state, chosen in states.items():
            for choice in choices(problem, state, bubble, thin=False):
                reached = after(problem, state, bubble, choice)
                if reached not in found:
                    found[reached] = (*chosen, (bubble, choice))
        states = _undominated(found)
        if len(states) > _MOST_STATES:
            raise CompileError(
                f"{len(states)} states after the bubble at {bubble.start_seconds:.6g} s; the exact filler is for few "
                'components: use "greedy" or "per-device"'
            )
    return _written(problem, "exact", states[min(states, key=lambda state: tail_seconds(problem, state))])


def _undominated(states: dict[State, Chosen]) -> dict[State, Chosen]:
    """Only states that no other one has done as much as in every component.

    Sorted by the first component, a state can only be dominated by one before it.
    """
    kept: list[State] = []
    for state in sorted(states, reverse=True):
        if not any(all(a >= b for a, b in zip(other[1:], state[1:], strict=True)) for other in reversed(kept)):
            kept.append(state)
    return {state: states[state] for state in kept}


def _written(problem: FillProblem, method: str, chosen: Sequence[tuple[Bubble, Choice]]) -> Fill:
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
