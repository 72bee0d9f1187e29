"""Greedy: in every bubble, what keeps its ranks busy longest.

    Algorithm 1   for every bubble in time order: fill it, drop what is done, add the components that became ready
    Algorithm 2   of every combination of whole layers, with one more layer on a part of its samples: the longest

DiffusionPipe (Tian et al., MLSys 2024). Of the combinations, those that leave room for another whole layer
of the component that is cut are passed over: the whole layer keeps the ranks busy at least as long as a part of it.
"""

from passes.comparison.published.bubbles import Bubble, common_bubbles
from passes.comparison.published.spans import Choice, after, choices, initial
from passes.comparison.published.write import write
from passes.fill.problem import FillProblem
from passes.fill.result import Fill


def greedy_choices(problem: FillProblem) -> list[tuple[Bubble, Choice]]:
    """The longest choice of every bubble."""
    chosen, state = [], initial(problem)
    for bubble in common_bubbles(problem):
        best = max(choices(problem, state, bubble, thin=True), key=lambda choice: choice.seconds, default=None)
        if best is not None:
            chosen.append((bubble, best))
            state = after(problem, state, bubble, best)
    return chosen


def greedy(problem: FillProblem) -> Fill:
    """Algorithms 1 and 2; the tail runs layer after layer on all ranks."""
    return write(problem, "greedy", greedy_choices(problem))
