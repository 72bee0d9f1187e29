"""Minimise a sum of criteria exactly, when one of them can be minimised under limits on all others.

    criterion 1 |  . a          the least main value within the limits is at a; what beats a has less of criterion 1
                |    :          or less of criterion 2 than a: two smaller boxes, pruned by what they can be at best
                |....:..b
                '------------- criterion 2

Many problems at once: the rounds are few, so what counts is the time of a round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TIE = 1e-12  # relative; values this close are equal, or rounding would overrule what matters
_STEP = 4 * TIE  # so a smaller value is smaller by this much: more than `evaluate` may round
_FEW = 8  # boxes of one round: fewer do not save time
_MOST_AT_ONCE = 256  # boxes of one round: bounds the memory


@dataclass(frozen=True)
class Boxes:
    """N parts of the solutions of some problems: those with criteria within `limit`.

    What lies in a box has criteria of at least `lower` and a main value of at least `main`, or it is found elsewhere.
    """

    problem: Ints  # [N]
    limit: Floats  # [N, criteria]
    lower: Floats  # [N, criteria]
    main: Floats  # [N]

    def take(self, index: Ints | NDArray[np.bool_]) -> "Boxes":
        return Boxes(self.problem[index], self.limit[index], self.lower[index], self.main[index])

    @property
    def bound(self) -> Floats:
        return np.asarray(self.main + self.lower.sum(axis=1))

    def within(self, best: Floats) -> "Boxes":
        """Only what can beat `best`: boxes with tighter limits, and without those that have become empty."""
        best = best[self.problem]
        gain = best - np.where(np.isfinite(best), TIE * np.abs(best), 0.0) - self.bound
        limit = np.minimum(self.limit, self.lower + gain[:, None])
        keep = (gain > 0) & (self.lower <= self.limit).all(axis=1)
        return Boxes(self.problem, limit, self.lower, self.main).take(keep)


Evaluate = Callable[[Boxes, Floats], tuple[Floats, Floats]]
"""(boxes, main values worth finding [N]) -> the least main value of every box [N], infinite where there is none, and
criteria [N, criteria] of a solution with that value, all within a relative `TIE`."""


def search(evaluate: Evaluate, main: Floats, lower: Floats, cutoff: float | Floats = np.inf) -> tuple[Floats, Floats]:
    """The least main value plus sum of criteria of every problem, and the criteria of a solution that has it.

    Args:
        main: lower bounds of the main value [problems], infinite where a problem has no solution.
        lower: lower bounds of the criteria [problems, criteria].
        cutoff: a value that is known from elsewhere, or one of every problem; what does not beat it stays infinite.
    """
    best, found = np.broadcast_to(cutoff, len(main)).copy(), np.full_like(lower, np.inf)
    boxes = Boxes(np.arange(len(main)), np.full_like(lower, np.inf), lower, main).take(np.isfinite(main))
    # One end of the first criterion's range to begin with: its best solution is seldom far off.
    seeds = Boxes(boxes.problem, boxes.limit.copy(), boxes.lower, boxes.main)
    seeds.limit[:, 0] = seeds.lower[:, 0]
    _try(evaluate, seeds.within(best), best, found)
    while len((boxes := boxes.within(best)).problem):
        order = np.argsort(boxes.bound, kind="stable")
        chosen = boxes.take(order[:_MOST_AT_ONCE])
        children = _branch(chosen, *_try(evaluate, chosen, best, found)).within(best)
        boxes = _sliced(_joined(boxes.take(order[_MOST_AT_ONCE:]), children))
    return np.where(np.isfinite(found).all(axis=1), best, np.inf), found


def _try(evaluate: Evaluate, boxes: Boxes, best: Floats, found: Floats) -> tuple[Floats, Floats]:
    """Evaluate boxes and note, in `best` and `found`, what is better than before."""
    others = boxes.lower.sum(axis=1)
    main, criteria = evaluate(boxes, best[boxes.problem] - others)
    total = main + criteria.sum(axis=1)
    for index in np.argsort(total, kind="stable")[::-1]:
        problem = boxes.problem[index]
        if total[index] < best[problem]:
            best[problem], found[problem] = total[index], criteria[index]
    return main, criteria


def _branch(boxes: Boxes, main: Floats, criteria: Floats) -> Boxes:
    """For every criterion, what has less of it than the solution found, and no less of those before it."""
    full = np.isfinite(main)
    boxes, main, criteria = boxes.take(full), main[full], criteria[full]
    limit, lower = [], []
    for k in range(criteria.shape[1]):
        limit.append(boxes.limit.copy())
        limit[k][:, k] = np.nextafter(criteria[:, k] - _STEP * np.abs(criteria[:, k]), -np.inf)
        lower.append(boxes.lower.copy())
        lower[k][:, :k] = np.maximum(boxes.lower[:, :k], criteria[:, :k])
    count = criteria.shape[1]
    return Boxes(np.tile(boxes.problem, count), np.concatenate(limit), np.concatenate(lower), np.tile(main, count))


def _sliced(boxes: Boxes) -> Boxes:
    """Few boxes, each in slices along its widest criterion: their solutions are then not found one after another."""
    count, slices = len(boxes.problem), _FEW // max(len(boxes.problem), 1)
    if slices < 2:
        return boxes
    width = boxes.limit - boxes.lower
    rows, widest = np.arange(count), width.argmax(axis=1)
    floor, step = boxes.lower[rows, widest], width[rows, widest] / slices
    parts = []
    for k in range(slices):
        limit, lower = boxes.limit.copy(), boxes.lower.copy()
        lower[rows, widest] = floor + k * step
        if k + 1 < slices:
            limit[rows, widest] = floor + (k + 1) * step
        parts.append(Boxes(boxes.problem, limit, lower, boxes.main))
    return reduce(_joined, parts)


def _joined(one: Boxes, other: Boxes) -> Boxes:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return Boxes(*(np.concatenate(pair) for pair in pairs))
