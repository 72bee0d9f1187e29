"""Models of several backbones, and of one that runs twice: what their stages have to look like.

    two backbones, two losses    blocks 0-5 | 6-9        rank 0: [0-2] [8-9]    rank 1: [3-5] [6-7]
    in opposite directions                                the first goes down the ranks, the second up

    self-conditioned             pass 1: 0-4, pass 2: 5-9 with the same weights
                                                          rank 0: [0-1] [5-6]    rank 1: [2-4] [7-9]
                                                          each weight on one rank

Methods: DiffusionPipe (Tian et al., MLSys 2024), sections 4.2 and 4.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from fxpipe.costs.block_costs import BlockCosts
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import BlockGraph
from passes.placement.lines import LineCosts, part
from passes.placement.lines.traffic import traffic

Cut = Callable[[LineCosts, Sequence[tuple[int, ...]]], tuple[int, ...]]
"""Cuts of a line, for these ranks of every stage."""

_LOSS_BYTES = 64  # per sample, of what losses that are added up send at most


def borders(graph: BlockGraph, costs: BlockCosts) -> tuple[int, ...]:
    """The blocks at which a further backbone begins: no gradient comes back over it but that of a term of the loss."""
    back, trained = traffic(graph).gradients, [size > 0 for size in costs.trained_bytes]
    found, last = [], 0
    for position in range(1, len(graph.blocks)):
        if back[position] <= _LOSS_BYTES and any(trained[last:position]) and any(trained[position:]):
            found.append(position)
            last = position
    return tuple(found)


def opposite(line: LineCosts, found: Sequence[int], ranks: Sequence[tuple[int, ...]], cut: Cut) -> tuple[int, ...]:
    """Boundaries of the stages on `ranks`: one half for one group of backbones, then for the other.

    Of more than two backbones, neighbours form a group, so that both have about as much to do.

    Args:
        found: the `borders` of the line.

    Raises:
        CompileError: there is one backbone.
    """
    if not found:
        raise CompileError(
            "schedule 'bidirectional' needs two backbones that share nothing but the sum of their losses; here is one"
        )
    seconds, places = line.seconds, len(ranks) // 2
    half = min(found, key=lambda k: abs(sum(seconds[:k]) - sum(seconds[k:])))
    first = cut(part(line, 0, half, directions=2), ranks[:places])
    second = cut(part(line, half, len(seconds), directions=2), ranks[places:])
    return (*first, *(half + position for position in second[1:]))


def first_pass(graph: BlockGraph, costs: BlockCosts) -> int:
    """The number of blocks of a backbone's first pass, where it runs twice with the same weights; zero elsewhere."""
    length = graph.first_pass
    inside = [w for w in costs.weights if w.trained and w.blocks and min(w.blocks) < length]
    return length if inside and all(max(w.blocks) >= length for w in inside) else 0


def require_first_pass(graph: BlockGraph, costs: BlockCosts) -> int:
    """Its number of blocks, of a step some of whose steps leave it out.

    Raises:
        CompileError: the backbone runs once.
    """
    if not (length := first_pass(graph, costs)):
        raise CompileError(
            "SelfConditioning wraps a step that calls its backbone once; its forward must call it twice, "
            "the first time under torch.no_grad()"
        )
    return length


def first_stages(graph: BlockGraph, costs: BlockCosts, boundaries: Sequence[int]) -> frozenset[int]:
    """The stages of the first pass."""
    length = first_pass(graph, costs)
    return frozenset(s for s, (start, stop) in enumerate(pairwise(boundaries)) if start < stop <= length)


def two_passes(
    line: LineCosts, costs: BlockCosts, length: int, probability: float, ranks: Sequence[tuple[int, ...]], cut: Cut
) -> tuple[int, ...]:
    """Boundaries of a stage of either pass on each of `ranks`: the second, cut with the first's expected time at its
    weights.

    `length` blocks are the first pass's, which runs with `probability`.
    """
    home = _homes(costs, length)
    loads = list(line.seconds[length:])
    for block in range(length):
        loads[home[block] - length] += probability * line.seconds[block]
    second = cut(replace(part(line, length, len(line.seconds)), seconds=loads), ranks)
    first = [next((b for b in range(length) if home[b] - length >= position), length) for position in second]
    assert all(a <= b for a, b in pairwise(first))
    return (0, *first[1:-1], length, *(length + position for position in second[1:]))


def _homes(costs: BlockCosts, length: int) -> list[int]:
    """For every block of the first pass the block of the second that has most of its weights; never going back."""
    homes: list[int] = []
    for block in range(length):
        shared: dict[int, int] = {}
        for weight in costs.weights:
            if block in weight.blocks:
                for other in (b for b in weight.blocks if b >= length):
                    shared[other] = shared.get(other, 0) + weight.num_bytes
        least = homes[-1] if homes else length
        homes.append(max(least, max(shared, key=lambda b: shared[b], default=least)))
    return homes
