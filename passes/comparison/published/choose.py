"""What is chosen in every common-span bubble, one after the other.

greedy    Algorithm 1: every bubble in time order; Algorithm 2: of all combinations of whole layers, with one more layer
          on a part of its samples, the one that keeps its ranks busy longest (DiffusionPipe: Tian et al., MLSys 2024)
exact     the least tail of all such choices: dynamic programming over bubbles

    after bubble   0        1                 2
                   (0, 0)   (3, 0) (2, 4)     (5, 2) (3, 6)      layers done of two components: whoever has both done
                                   (1, 4) x   (4, 2) x           further has no longer tail, so the others go

Of the combinations, those that leave room for another whole layer of the component that is cut are passed over: the
whole layer keeps the ranks busy at least as long as a part of it.
"""

from fxpipe.errors import CompileError
from passes.comparison.published.bubbles import Bubble, common_bubbles
from passes.comparison.published.spans import Choice, State, after, choices, initial, tail_seconds
from passes.comparison.published.write import write
from passes.fill.problem import FillProblem
from passes.fill.result import Fill

Chosen = tuple[tuple[Bubble, Choice], ...]

_MOST_STATES = 20_000


def greedy(problem: FillProblem) -> Fill:
    """The longest choice of every bubble; the tail runs layer after layer on all ranks."""
    return write(problem, "greedy", greedy_choices(problem))


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
    return write(problem, "exact", states[min(states, key=lambda state: tail_seconds(problem, state))])


def _undominated(states: dict[State, Chosen]) -> dict[State, Chosen]:
    """Only states that no other one has done as much as in every component.

    Sorted by the first component, a state can only be dominated by one before it.
    """
    kept: list[State] = []
    for state in sorted(states, reverse=True):
        if not any(all(a >= b for a, b in zip(other[1:], state[1:], strict=True)) for other in reversed(kept)):
            kept.append(state)
    return {state: states[state] for state in kept}
