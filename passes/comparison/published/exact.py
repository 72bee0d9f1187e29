"""Exact: the least tail that common-span bubbles admit.

    after bubble   0        1                 2
                   (0, 0)   (3, 0) (2, 4)     (5, 2) (3, 6)      layers done of two components: whoever has both done
                                   (1, 4) x   (4, 2) x           further has no longer tail, so the others go

Dynamic programming over bubbles. A state also goes if all idle time left, used as well as any layer could use it, can't
bring its tail below the best one known. The same bubbles and the same choices in each as the greedy filler has, which
looks at one bubble alone and at how long it is busy.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.errors import CompileError
from passes.comparison.published.bubbles import Bubble, common_bubbles
from passes.comparison.published.greedy import greedy_choices
from passes.comparison.published.savings import LeastTail, possible_savings
from passes.comparison.published.spans import Choice, State, after, choices, initial, tail_seconds
from passes.comparison.published.write import write
from passes.fill.problem import FillProblem
from passes.fill.result import Fill

_MOST_STATES = 20_000


@dataclass(frozen=True, slots=True)
class _Step:
    """How a state came about: what was chosen in the bubble before, and the step before that."""

    before: "_Step | None"
    bubble: Bubble
    choice: Choice


def exact(problem: FillProblem) -> Fill:
    """The fill with the least tail of all that fill common-span bubbles.

    Raises:
        CompileError: too many combinations or states.
    """
    greedy = greedy_choices(problem)
    best, best_step = _tail_after(problem, greedy), None
    bubbles = common_bubbles(problem)
    least, savings = LeastTail(problem), possible_savings(problem, bubbles)
    states: dict[State, _Step | None] = {initial(problem): None}
    for position, bubble in enumerate(bubbles if best else ()):
        states = _undominated(_fill_bubble(problem, states, bubble))
        hopeful = {}
        for state, step in states.items():
            tail = tail_seconds(problem, state)
            if tail < best:
                best, best_step = tail, step
            if least(state) - savings[position + 1] < best:
                hopeful[state] = step
        states = hopeful
        if len(states) > _MOST_STATES:
            raise CompileError(
                f"{len(states)} states after {position + 1} of {len(bubbles)} bubbles; the exact filler is for few "
                'components: use "greedy" or "per-device"'
            )
    return write(problem, "exact", greedy if best_step is None else _path(best_step))


def _tail_after(problem: FillProblem, chosen: Iterable[tuple[Bubble, Choice]]) -> float:
    state = initial(problem)
    for bubble, choice in chosen:
        state = after(problem, state, bubble, choice)
    return tail_seconds(problem, state)


def _fill_bubble(problem: FillProblem, states: dict[State, _Step | None], bubble: Bubble) -> dict[State, _Step | None]:
    found = dict(states)
    for state, step in states.items():
        for choice in choices(problem, state, bubble, thin=False):
            reached = after(problem, state, bubble, choice)
            if reached not in found:
                found[reached] = _Step(step, bubble, choice)
    return found


def _undominated(states: dict[State, _Step | None]) -> dict[State, _Step | None]:
    """Only states that no other one has done as much as in every component.

    Sorted by the first component, a state can only be dominated by one before it.
    """
    kept: list[State] = []
    for state in sorted(states, reverse=True):
        if not any(all(a >= b for a, b in zip(other[1:], state[1:], strict=True)) for other in reversed(kept)):
            kept.append(state)
    return {state: states[state] for state in kept}


def _path(step: _Step | None) -> list[tuple[Bubble, Choice]]:
    found = []
    while step is not None:
        found.append((step.bubble, step.choice))
        step = step.before
    return found[::-1]
