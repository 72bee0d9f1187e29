"""Place blocks on ranks: which blocks form a stage, which ranks hold it.

    blocks 0..9, 2 ranks      linear   rank 0: [0-4]          rank 1: [5-9]
                       ->     wave     rank 0: [0-1] [8-9]    rank 1: [2-4] [5-7]

    4 ranks, two replicas     linear   ranks 0 2: [0-4]       ranks 1 3: [5-9]

How many replicas, stages and micro-batches is `passes.tuner`'s choice where the user leaves it open.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from passes.case import Case
from passes.placement.cascade import borders, first_pass, opposite, two_passes
from passes.placement.collocation import is_collocated, loads, skip_pairs
from passes.placement.lines import linear
from passes.placement.lines.costs import LineCosts, cut_line, reduction_pace
from passes.placement.lines.traffic import traffic
from passes.placement.lines.uneven import uneven_line
from passes.placement.memory import Floats, StageMemory
from passes.placement.ports import message_seconds
from passes.placement.shape import Shape, pipelines
from passes.placement.waves import wave
from passes.schedules.policies import FOLDED, POLICIES

_SLACK, _SLACKS = 0.03, (0.15, 0.5)
"""Of the mean load of a fold: more balance than this is worth less than cheaper cuts; where links are slow, one of
these may be."""
_MOST_PAID = 1000  # times the blocks' seconds, for a skip that crosses
_SLOW_LINKS = 0.3  # of the busiest rank's time: cheaper cuts from 0.05 on brought the race's step no more


def place(
    case: Case, times: BlockSeconds, wanted: Shape, microbatches: int = 1, memory: StageMemory | None = None
) -> Staged:
    """The stages of a shape, and the ranks of their replicas.

    Args:
        times: of a micro-batch.
        microbatches: of all pipelines together.
        memory: of the places of a shape that `is_cut_by_memory`.

    Raises:
        CompileError: the model has not the backbones that the shape needs, or nothing fits into memory.
    """
    assert memory is None or wanted.is_cut_by_memory
    if wanted.is_uneven:
        boundaries, replicas = uneven_line(times.total, wanted.stages, wanted.places)
        starts = [0, *accumulate(replicas)]
        ranks = tuple(wanted.pipelines[0][start:stop] for start, stop in pairwise(starts))
        return Staged(boundaries, ranks, wanted.schedule, False, wanted.places)
    if wanted.is_folded:
        return _folded(case, times, wanted, memory=memory)
    microbatches = -(-microbatches // len(wanted.pipelines))
    return wanted.staged(_unfolded(case, times, wanted, microbatches, memory))


def others(case: Case, times: BlockSeconds, wanted: Shape, microbatches: int, found: Staged) -> Sequence[Staged]:
    """Other stages of a shape than those that `place` has found, which weighs time and messages by fewer terms than a
    step has: of a line by time alone; of a fold, if links are slow, by cheaper cuts and by sums of gradients; none
    where blocks make two passes.
    """
    if wanted.is_uneven or wanted.is_opposite or wanted.places == 1 or first_pass(case.graph, case.costs):
        return ()
    if not wanted.is_folded:
        return (wanted.staged(linear(times.total, wanted.stages, traffic(case.graph).values.tolist())),)
    # of compute, and at the busiest port of messages, for a micro-batch per pipeline
    load = max(loads(times, found))
    port = message_seconds(case.graph, found, (times.num_samples,) * found.replicas, case.cluster)
    slacks = _SLACKS if port > _SLOW_LINKS * load else ()
    cheaper = [_folded(case, times, wanted, slack) for slack in slacks]
    sums = _sums(case.costs, wanted, case.cluster, microbatches)
    slow = sums.sum() > _SLOW_LINKS * sum(times.total)
    return [*cheaper, *([_folded(case, times, wanted, also=sums)] if slow else [])]


def _sums(costs: BlockCosts, wanted: Shape, cluster: Cluster, microbatches: int) -> Floats:
    """Seconds of every block's sum of gradients over replicas, a micro-batch's share of them."""
    replicas = wanted.stage_ranks[0]
    per_byte = reduction_pace(cluster, replicas)[1] if len(replicas) > 1 else 0.0
    return np.array(costs.trained_bytes) * per_byte * len(replicas) / microbatches


def _unfolded(
    case: Case, times: BlockSeconds, wanted: Shape, microbatches: int, memory: StageMemory | None
) -> tuple[int, ...]:
    """Boundaries of a line, of two lines in opposite directions, or of two passes over one."""
    graph, costs = case.graph, case.costs

    def cut(line: LineCosts, ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        rounds = max(1, wanted.stages // wanted.places) if line.directions == 1 else 1
        return cut_line(line, ranks, case.cluster, rounds * (microbatches - 1) + 1, memory)

    line = LineCosts(graph, times.total, times.backward_seconds, costs.trained_bytes, times.num_samples, wanted.waits)
    if wanted.is_opposite:
        return opposite(line, borders(graph, costs), wanted.stage_ranks, cut)
    length = first_pass(graph, costs)
    if POLICIES[wanted.schedule].loops and wanted.stages % (2 * wanted.places) == 0 and length:
        return two_passes(line, costs, length, wanted.conditioning, wanted.stage_ranks[: wanted.stages // 2], cut)
    return cut(line, wanted.stage_ranks)


def place_schedule(case: Case, times: BlockSeconds, schedule: Schedule) -> Staged:
    """Stages for an order given by the user: its own placement decides between a wave and a line."""
    ranks, world_size = schedule.stage_ranks, len(schedule.ranks)
    mirrored = ranks == ranks[::-1] and len(ranks) > 1 and len(set(ranks)) > 1 and all(ranks)
    if mirrored and len(ranks) == 2 * len(set(ranks)):
        wanted = Shape(FOLDED, len(ranks), pipelines(len(set(ranks)), 1))
        found = _folded(case, times, wanted)
        return replace(found, stage_ranks=ranks, schedule=schedule.name, world_size=world_size)
    used = [stage for stage, replicas in enumerate(ranks) if replicas]
    inner = linear(times.total, max(len(used), 1), traffic(case.graph).values.tolist())
    boundaries = [0, *(inner[sum(u <= stage for u in used)] for stage in range(schedule.num_stages))]
    return Staged(tuple(boundaries), tuple(r or (0,) for r in ranks), schedule.name, False, world_size)


def _folded(
    case: Case, times: BlockSeconds, wanted: Shape, slack: float | None = None, memory: StageMemory | None = None,
    also: Floats | float = 0.0,
) -> Staged:  # fmt: skip
    """By the seconds of blocks, and what they take `also`."""
    pairs, seconds = skip_pairs(case.graph), (np.array(times.total) + also).tolist()
    # The value one way, its gradient the other: each end of a crossing skip sends one and receives one.
    # Which ranks is not known yet: mostly neighbours.
    # What no plan would pay is capped, or sums with it would lose the blocks' seconds.
    most = _MOST_PAID * sum(seconds)
    sizes, ranks = (size * times.num_samples for size in pairs.values()), wanted.pipelines[0]
    costs = [min(2 * _neighbour_seconds(case.cluster, ranks, size), most) for size in sizes]
    num_waves = wanted.stages // (2 * wanted.places)
    cuts = traffic(case.graph).main.tolist()
    if slack is None:
        slack = _SLACK if num_waves == 1 else 0.0  # of several, even levels make shorter steps
    found = wanted.staged(wave(seconds, list(pairs), wanted.places, wanted.hard, cuts, costs, memory, slack, num_waves))
    return replace(found, collocated=is_collocated(case.graph, found))


def _neighbour_seconds(cluster: Cluster, pipeline: Sequence[int], num_bytes: int) -> float:
    """Seconds of one message between ranks next to each other, on average."""
    pairs = list(pairwise(pipeline))
    return sum(cluster.transfer_seconds(*pair, num_bytes) for pair in pairs) / max(len(pairs), 1)
