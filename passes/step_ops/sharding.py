"""Which replica of a stage trains each of its parameters: as much as the others, or nearly.

    stages 0 and 3 on ranks 0, 2       a 9 KiB, b 4 KiB, c 3 KiB, d 1 KiB     ->    rank 0: a      rank 2: b c d

The largest first, each to the rank that has least so far (Graham, SIAM J. Appl. Math. 17, 1969).
"""

from collections.abc import Mapping, Sequence


def owners(sizes: Mapping[int, Mapping[str, int]], stage_ranks: Sequence[Sequence[int]]) -> dict[str, int]:
    """The rank that trains each parameter.

    Args:
        sizes: bytes of the parameters that a stage alone has, by stage and name.
        stage_ranks: the replicas of every stage.
    """
    candidates = [(size, name, stage) for stage, of_stage in sizes.items() for name, size in of_stage.items()]
    loads = dict.fromkeys((rank for stage in sizes for rank in stage_ranks[stage]), 0)
    found: dict[str, int] = {}
    for size, name, stage in sorted(candidates, key=lambda item: (-item[0], item[1])):
        owner = min(sorted(stage_ranks[stage]), key=loads.__getitem__)
        found[name], loads[owner] = owner, loads[owner] + size
    return found
