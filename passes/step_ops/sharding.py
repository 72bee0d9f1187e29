"""Which replica of a stage trains each of its parameters: as much as the others, or nearly.

    stages 0 and 3 on ranks 0, 2       a 9 KiB, b 4 KiB, c 3 KiB, d 1 KiB     ->    rank 0: a      rank 2: b c d

The largest first, each to the rank that has least so far (Graham, SIAM J. Appl. Math. 17, 1969).
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import heapreplace

from fxpipe.plan.schedule import Schedule


def owners(sizes: Mapping[int, Mapping[str, int]], stage_ranks: Sequence[Sequence[int]]) -> dict[str, int]:
    """The rank that trains each parameter.

    Args:
        sizes: bytes of the parameters that a stage alone has, by stage and name.
        stage_ranks: the replicas of every stage.
    """
    candidates = [(size, name, stage) for stage, of_stage in sizes.items() for name, size in of_stage.items()]
    loads = dict.fromkeys((rank for stage in sizes for rank in stage_ranks[stage]), 0)
    groups = {stage: tuple(sorted(stage_ranks[stage])) for stage in sizes}
    least = {ranks: [(0, rank) for rank in ranks] for ranks in groups.values()}  # heaps: loads never fall
    heaps = {stage: least[ranks] for stage, ranks in groups.items()}
    found: dict[str, int] = {}
    for size, name, stage in sorted(candidates, key=lambda item: (-item[0], item[1])):
        heap = heaps[stage]
        while heap[0][0] != loads[heap[0][1]]:  # it has grown by a stage of other ranks
            heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        owner = heap[0][1]
        found[name], loads[owner] = owner, loads[owner] + size
        heapreplace(heap, (loads[owner], owner))
    return found


def summing_stage(
    holding: Collection[int], giving: Collection[int], stage_ranks: Sequence[Sequence[int]], gathered: bool
) -> int | None:
    """The stage whose replicas sum the gradients of a trained weight: the only one that has it, or that gives one where
    others read it on the same ranks. None where its ranks exchange them by messages.

    Args:
        holding: the stages that have it.
        giving: the stages in which a gradient of it arises.
        gathered: whether a stage gathers its weights, so that it has its own alone.
    """
    if len(holding) == 1:
        return next(iter(holding))
    if gathered or len(giving) != 1:
        return None
    (stage,) = giving
    alike = len({frozenset(stage_ranks[other]) for other in holding}) == 1
    return stage if alike and len(stage_ranks[stage]) > 1 else None


def sums_in_turn(schedule: Schedule) -> bool:
    """Whether a rank may wait for the sums of one stage before it starts those of the next, so that what is moved for
    them goes: its replicas are the same ranks for all of its stages, and come to them in the same order."""
    stages = [[action.stage for action in actions if action.kind == "R"] for actions in schedule.ranks]
    return all(
        len({frozenset(schedule.stage_ranks[stage]) for stage in mine}) <= 1
        and all(stages[other] == mine for stage in mine[:1] for other in schedule.stage_ranks[stage])
        for mine in stages
    )
