"""Published fillers, to compare with: the next batch's frozen work in bubbles that several ranks share.

    rank 0  |####|-----------|####|            bubbles {1} from 2 to 4, {0, 1} from 4 to 6, {0} from 6 to 9 ...:
    rank 1  |##|----|########|----|            each takes layers that fit on all of its ranks' samples

choose     greedy: the longest combination of layers in each bubble; exact: the least tail of all such combinations
spans      idle time of several ranks, and what can be chosen for it
"""

from dataclasses import replace

from passes.comparison.published.choose import exact, greedy
from passes.fill.problem import FillProblem

__all__ = ["exact", "greedy", "published"]

PAPER_LOCAL_BATCHES = (4, 8, 12, 16, 24, 32, 48, 64, 96)
PAPER_MIN_BUBBLE_SECONDS = 0.010


def published(problem: FillProblem) -> FillProblem:
    """The same work under the limits of DiffusionPipe (Tian et al., MLSys 2024): bubbles from 10 ms, a few
    local batches."""
    return replace(problem, min_bubble_seconds=PAPER_MIN_BUBBLE_SECONDS, local_batches=PAPER_LOCAL_BATCHES)
