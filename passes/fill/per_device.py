"""Per device: every rank carries its own samples through all frozen layers, in its own idle time.

    rank 0  |####|-----------|####|      rank 0 takes 11 samples of the vae, rank 1 takes 5, for it is busy longer: no
    rank 1  |##|----|########|----|      bubble is cut because another rank becomes busy, no sample changes ranks
                                         between layers

Components that share no data need not be shared alike. Where not everything can be hidden, the family with the most
work goes first and fills rank after rank; what it leaves, down to a fraction of one of its samples' time, the others
fill, on as few ranks as will do: little work on many samples is faster in one place.
"""

from math import inf

from passes.fill.problem import FillProblem
from passes.fill.result import Fill, make_fill
from passes.fill.shares import RankRoom, balanced


def per_device(problem: FillProblem) -> Fill:
    """All components shared alike by idle time if that leaves no tail, else the better of alike and each by itself."""
    rooms = [_room(problem, rank) for rank in range(problem.num_ranks)]
    best = balanced(problem, rooms, apart=False)
    if best.tail_seconds:
        best = min(best, balanced(problem, rooms, apart=True), key=lambda plan: plan.tail_seconds)
    return make_fill(problem, "per-device", True, best.ranks)


def no_fill(problem: FillProblem) -> Fill:
    """Everything after the pipeline, all components shared alike over the ranks."""
    rooms: list[RankRoom] = [((problem.pipeline_seconds, inf),)] * problem.num_ranks
    return make_fill(problem, "none", True, balanced(problem, rooms, apart=False).ranks)


def _room(problem: FillProblem, rank: int) -> RankRoom:
    """The idle intervals worth using; the tail goes on from the last one where that lasts to the pipeline's end."""
    end = problem.pipeline_seconds
    room = [i for i in problem.idle[rank] if i[1] < end and i[1] - i[0] >= problem.min_bubble_seconds]
    last = [start for start, stop in problem.idle[rank] if stop == end]
    return (*room, (min(last, default=end), inf))
