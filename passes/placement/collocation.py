"""Skips, and whether both ends of each are on one rank: what a fold is for, and what it costs."""

from dataclasses import replace

from fxpipe.costs.block_costs import BlockSeconds
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Staged
from passes.placement.waves import wave
from passes.schedules.policies import POLICIES


def skip_pairs(graph: BlockGraph) -> dict[tuple[int, int], int]:
    """(producer block, consumer block) of every skip, with its bytes per sample."""
    pairs: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        for consumer, kind in zip(edge.consumers, edge.kinds, strict=True):
            if kind == "skip" and isinstance(edge.producer, int) and isinstance(consumer, int):
                key = edge.producer, consumer
                pairs[key] = pairs.get(key, 0) + edge.bytes_per_sample
    return pairs


def is_collocated(graph: BlockGraph, staged: Staged) -> bool:
    """Whether both ends of every skip are on the same ranks."""
    ranks, stage_of = staged.stage_ranks, staged.stage_of_block
    return all(ranks[stage_of[a]] == ranks[stage_of[b]] for a, b in skip_pairs(graph))


def fold_notes(graph: BlockGraph, times: BlockSeconds, staged: Staged) -> tuple[str, ...]:
    """What the skips of a fold cost its balance, or how many cross ranks for it."""
    pairs, owners = skip_pairs(graph), [ranks[:1] for ranks in staged.stage_ranks]
    places, policy = len(set(owners)), POLICIES.get(staged.schedule)
    folded = owners == owners[::-1] and staged.num_stages % (2 * places) == 0 and not (policy and policy.reverses)
    if not pairs or places < 2 or not folded:
        return ()
    seconds, stage_of = loads(times, staged), staged.stage_of_block
    mean = sum(seconds) / len(seconds)
    busiest = max(seconds) / mean if mean else 1.0
    crossing = sum(owners[stage_of[a]] != owners[stage_of[b]] for a, b in pairs)
    if crossing:
        return (f"{crossing} of {len(pairs)} skips cross ranks, busiest rank {busiest:.3f} x mean",)
    free = wave(times.total, [], places, num_waves=staged.num_stages // (2 * places))
    least = max(loads(times, replace(staged, boundaries=free))) / mean if mean else 1.0
    return (f"{len(pairs)} skips collocated: busiest rank {busiest:.3f} x mean, {least:.3f} if balance alone counted",)


def loads(times: BlockSeconds, staged: Staged) -> list[float]:
    """Seconds of every place of one pipeline."""
    found, seconds = dict[int, float](), times.total
    for stage, ranks in enumerate(staged.stage_ranks):
        found[ranks[0]] = found.get(ranks[0], 0.0) + sum(seconds[block] for block in staged.blocks(stage))
    return list(found.values())
