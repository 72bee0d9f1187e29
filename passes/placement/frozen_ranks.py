"""Which ranks hold a frozen component's weights, where they do not all have room for all of them.

room     rank 0  1 GiB    rank 1  4 GiB    rank 2  11 GiB          beside what they train
vae      0.2 GiB          ranks 0 1 2
t5       9.4 GiB          rank 2
"""

from collections.abc import Sequence

from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged

_MOST_TRIED = 10_000  # ways to place every component once


def frozen_ranks(
    room_bytes: Sequence[int], component_bytes: Sequence[int], component_seconds: Sequence[float]
) -> tuple[tuple[int, ...], ...] | None:
    """The ranks of every component; None where they cannot all be placed.

    Each is placed once, the largest first; then those that keep a rank busy longest get more ranks, as long as there is
    room.

    Args:
        room_bytes: per rank, for weights of frozen components.
        component_bytes, component_seconds: per component, of its weights and of a micro-batch.
    """
    largest_first = sorted(range(len(component_bytes)), key=lambda c: -component_bytes[c])
    found = _once_each([component_bytes[c] for c in largest_first], list(room_bytes))
    if found is None:
        return None
    left = list(room_bytes)
    ranks: list[list[int]] = [[] for _ in component_bytes]
    for component, rank in zip(largest_first, found, strict=True):
        ranks[component].append(rank)
        left[rank] -= component_bytes[component]
    growing = set(largest_first)
    while growing:
        component = max(growing, key=lambda c: (component_seconds[c] / len(ranks[c]), -c))
        others = [rank for rank in range(len(left)) if rank not in ranks[component]]
        fitting = [rank for rank in others if left[rank] >= component_bytes[component]]
        if fitting:
            rank = max(fitting, key=lambda r: (left[r], -r))
            ranks[component].append(rank)
            left[rank] -= component_bytes[component]
        else:
            growing.remove(component)
    return tuple(tuple(sorted(of_component)) for of_component in ranks)


def home_ranks(graph: BlockGraph, staged: Staged) -> tuple[int, ...]:
    """The ranks of the stage that reads most of what frozen components make."""
    read = [0] * staged.num_stages
    for edge in (edge for edge in graph.edges if isinstance(edge.producer, str)):
        for stage in {staged.stage_of_block[block] for block in edge.consumers if isinstance(block, int)}:
            read[stage] += edge.bytes_per_sample
    return tuple(sorted(staged.stage_ranks[read.index(max(read))]))


def _once_each(sizes: Sequence[int], left: list[int]) -> list[int] | None:
    """A rank for every size, by trying the roomiest ranks first and going back where that fails."""
    tried = 0

    def place(number: int) -> list[int] | None:
        nonlocal tried
        if number == len(sizes):
            return []
        tried += 1
        by_room = {room: rank for rank, room in reversed([*enumerate(left)]) if room >= sizes[number]}
        for _, rank in sorted(by_room.items(), reverse=True):
            if tried > _MOST_TRIED:
                return None
            left[rank] -= sizes[number]
            rest = place(number + 1)
            left[rank] += sizes[number]
            if rest is not None:
                return [rank, *rest]
        return None

    return place(0) if min(left, default=-1) >= 0 else None
