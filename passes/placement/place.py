"""Place blocks on ranks: which blocks form a stage, which ranks hold it.

    blocks 0..9, 2 ranks      linear   rank 0: [0-4]          rank 1: [5-9]
                       ->     wave     rank 0: [0-1] [8-9]    rank 1: [2-4] [5-7]

    4 ranks, two replicas     linear   ranks 0 2: [0-4]       ranks 1 3: [5-9]

How many replicas, stages and micro-batches is `passes.tuner`'s choice where the user leaves it open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fxpipe.cluster import Cluster
from fxpipe.costs.block_costs import BlockCosts, BlockSeconds
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from passes.placement.cascade import borders, first_pass, opposite, two_passes
from passes.placement.lines import linear
from passes.placement.lines.costs import Line, cut_line
from passes.placement.lines.traffic import traffic
from passes.placement.lines.uneven import uneven_line
from passes.placement.memory import StageMemory
from passes.placement.ports import message_seconds
from passes.placement.waves import waves
from passes.schedules.policies import FOLDED, POLICIES

_SLACK, _SLACKS = 0.03, (0.15, 0.5)
"""Of the mean load of a fold: more balance than this is worth less than cheaper cuts; where links are slow, one of
these may be."""
_MOST_PAID = 1000  # times the blocks' seconds, for a skip that crosses
_SLOW_LINKS = 0.3  # of the busiest rank's time: cheaper cuts from 0.05 on brought the race's step no more


@dataclass(frozen=True)
class Shape:
    """How ranks are used: `pipelines` holds the ranks of every pipeline, in the order of its places.

    `schedule` is a name, `stages` their number; a `hard` placement keeps every skip on its rank where it can.
    """

    schedule: str
    stages: int
    pipelines: tuple[tuple[int, ...], ...]
    hard: bool = True
    conditioning: float = 1.0  # the probability of a first pass, where there are two

    @property
    def places(self) -> int:
        """Ranks of one pipeline."""
        return len(self.pipelines[0])

    @property
    def world_size(self) -> int:
        return self.places * len(self.pipelines)

    @property
    def is_uneven(self) -> bool:
        """Whether a line has fewer stages than ranks, so that some stages have more replicas than others."""
        return self.stages < self.places

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every stage's replicas, where all have as many."""
        return tuple(tuple(pipeline[p] for pipeline in self.pipelines) for p in self.place_of_stage)

    @property
    def is_folded(self) -> bool:
        """Whether the network is folded, so that both ends of a skip can be on one rank."""
        return POLICIES[self.schedule].is_folded(self.stages, self.places)

    @property
    def is_opposite(self) -> bool:
        """Whether two groups of backbones go through the ranks in opposite directions."""
        return POLICIES[self.schedule].reverses

    @property
    def waits(self) -> bool:
        """Whether micro-batches in flight are so few that stages wait for messages to be answered."""
        rule = POLICIES[self.schedule].rule
        return not rule.drain_last and not rule.grouped

    @property
    def is_cut_by_memory(self) -> bool:
        """Whether there is a partition within limits of memory: of a line with a stage per place, and of waves."""
        if self.is_folded:
            return True
        return not self.is_uneven and not self.is_opposite and self.stages == self.places

    @property
    def place_of_stage(self) -> tuple[int, ...]:
        """Line and loop: in turn; fold: there and back."""
        n = self.places
        if self.is_folded or self.is_opposite:
            return tuple(s % n if s // n % 2 == 0 else n - 1 - s % n for s in range(self.stages))
        return tuple(s % n for s in range(self.stages))

    def staged(self, boundaries: tuple[int, ...], collocated: bool = False) -> Staged:
        """The shape's stages, cut there, on its ranks."""
        return Staged(boundaries, self.stage_ranks, self.schedule, collocated, self.world_size)


def shape(name: str, world_size: int, stages: int | None, data_parallel: int, strided: bool = False) -> Shape:
    """The shape of a named schedule.

    Args:
        stages: one per rank of a pipeline where left out, two where the name needs them.
        strided: neighbours of a pipeline are `data_parallel` ranks apart, replicas next to each other.

    Raises:
        CompileError: the name is unknown, or the numbers do not fit each other.
    """
    if name not in POLICIES:
        raise CompileError(
            f"unknown schedule {name!r}; choose one of auto, {', '.join(POLICIES)}, or pass a schedule's text"
        )
    if world_size % data_parallel:
        raise CompileError(
            f"data_parallel={data_parallel} does not divide world_size={world_size}; every pipeline has as many ranks"
        )
    policy, places = POLICIES[name], world_size // data_parallel
    count = stages or places * policy.stages_per_rank[0]
    found = Shape(name, count, pipelines(places, data_parallel, strided))
    if count < places and data_parallel == 1 and policy.uneven:
        return found
    if count % places:
        raise CompileError(
            f"stages={count} is no multiple of the {places} ranks of a pipeline (world_size={world_size}, "
            f"data_parallel={data_parallel}); every rank owns as many stages"
        )
    if policy.reverses and count != 2 * places:
        raise CompileError(f"schedule {name!r} has two stages per rank of a pipeline, {2 * places}, not {count}")
    if policy.folds and count % (2 * places):
        raise CompileError(
            f"schedule {name!r} goes there and back: its stages are a multiple of {2 * places}, not {count}"
        )
    return found


def pipelines(places: int, count: int, strided: bool = False) -> tuple[tuple[int, ...], ...]:
    """The ranks of every pipeline."""
    if strided:
        return tuple(tuple(range(p, places * count, count)) for p in range(count))
    return tuple(tuple(range(p * places, (p + 1) * places)) for p in range(count))


def place(
    graph: BlockGraph,
    costs: BlockCosts,
    times: BlockSeconds,
    wanted: Shape,
    cluster: Cluster,
    microbatches: int = 1,
    memory: StageMemory | None = None,
) -> Staged:
    """The stages of a shape, and the ranks of their replicas.

    Args:
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
        return _folded(graph, times, wanted, cluster, memory=memory)
    microbatches = -(-microbatches // len(wanted.pipelines))
    return wanted.staged(_unfolded(graph, costs, times, wanted, cluster, microbatches, memory))


def others(
    graph: BlockGraph, costs: BlockCosts, times: BlockSeconds, wanted: Shape, cluster: Cluster, found: Staged
) -> Sequence[Staged]:
    """Other stages of a shape than those that `place` has found, which weighs time and messages by fewer terms than a
    step has: of a line by time alone, of a fold by cheaper cuts, if links are slow; none where blocks make two passes.
    """
    if wanted.is_uneven or wanted.is_opposite or wanted.places == 1 or first_pass(graph, costs):
        return ()
    if not wanted.is_folded:
        return (wanted.staged(linear(times.total, wanted.stages, traffic(graph).values.tolist())),)
    if wanted.stages > 2 * wanted.places:
        return ()  # of several waves cuts are improved as they are
    load, port = _busiest(graph, times, found, cluster)
    slacks = _SLACKS if port > _SLOW_LINKS * load else ()
    return [_folded(graph, times, wanted, cluster, slack) for slack in slacks]


def _unfolded(
    graph: BlockGraph,
    costs: BlockCosts,
    times: BlockSeconds,
    wanted: Shape,
    cluster: Cluster,
    microbatches: int,
    memory: StageMemory | None,
) -> tuple[int, ...]:
    """Boundaries of a line, of two lines in opposite directions, or of two passes over one."""

    def cut(line: Line, ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        rounds = max(1, wanted.stages // wanted.places) if line.directions == 1 else 1
        return cut_line(line, ranks, cluster, rounds * (microbatches - 1) + 1, memory)

    line = Line(graph, times.total, times.backward_seconds, costs.trained_bytes, times.num_samples, wanted.waits)
    if wanted.is_opposite:
        return opposite(line, borders(graph, costs), wanted.stage_ranks, cut)
    length = first_pass(graph, costs)
    if POLICIES[wanted.schedule].loops and wanted.stages == 2 * wanted.places and length:
        return two_passes(line, costs, length, wanted.conditioning, wanted.stage_ranks[: wanted.places], cut)
    return cut(line, wanted.stage_ranks)


def _busiest(graph: BlockGraph, times: BlockSeconds, staged: Staged, cluster: Cluster) -> tuple[float, float]:
    """Seconds of compute of the busiest rank, and of messages at the busiest port, for a micro-batch per pipeline."""
    sizes = (times.num_samples,) * staged.replicas
    return max(_loads(times, staged)), message_seconds(graph, staged, sizes, cluster)


def _loads(times: BlockSeconds, staged: Staged) -> list[float]:
    """Seconds of every place of one pipeline."""
    loads, seconds = dict[int, float](), times.total
    for stage, ranks in enumerate(staged.stage_ranks):
        loads[ranks[0]] = loads.get(ranks[0], 0.0) + sum(seconds[block] for block in staged.blocks(stage))
    return list(loads.values())


def place_schedule(graph: BlockGraph, times: BlockSeconds, schedule: Schedule, cluster: Cluster) -> Staged:
    """Stages for an order given by the user: its own placement decides between a wave and a line."""
    ranks, world_size = schedule.stage_ranks, len(schedule.ranks)
    mirrored = ranks == ranks[::-1] and len(ranks) > 1 and len(set(ranks)) > 1 and all(ranks)
    if mirrored and len(ranks) == 2 * len(set(ranks)):
        wanted = Shape(FOLDED, len(ranks), pipelines(len(set(ranks)), 1))
        return replace(
            _folded(graph, times, wanted, cluster), stage_ranks=ranks, schedule=schedule.name, world_size=world_size
        )
    used = [stage for stage, replicas in enumerate(ranks) if replicas]
    inner = linear(times.total, max(len(used), 1), traffic(graph).values.tolist())
    boundaries = [0, *(inner[sum(u <= stage for u in used)] for stage in range(schedule.num_stages))]
    return Staged(tuple(boundaries), tuple(r or (0,) for r in ranks), schedule.name, False, world_size)


def _folded(
    graph: BlockGraph,
    times: BlockSeconds,
    wanted: Shape,
    cluster: Cluster,
    slack: float = _SLACK,
    memory: StageMemory | None = None,
) -> Staged:
    pairs, seconds = skip_pairs(graph), times.total
    # The value one way, its gradient the other: each end of a crossing skip sends one and receives one.
    # Which ranks is not known yet: mostly neighbours.
    # What no plan would pay is capped, or sums with it would lose the blocks' seconds.
    most = _MOST_PAID * sum(seconds)
    costs = [2 * _neighbour_seconds(cluster, wanted.pipelines[0], size * times.num_samples) for size in pairs.values()]
    costs = [min(cost, most) for cost in costs]
    num_waves = wanted.stages // (2 * wanted.places)
    cuts = traffic(graph).main.tolist()
    found = waves(seconds, list(pairs), wanted.places, num_waves, wanted.hard, cuts, costs, memory, slack)
    return wanted.staged(found.boundaries, not found.crossing)


def fold_notes(graph: BlockGraph, times: BlockSeconds, staged: Staged) -> tuple[str, ...]:
    """What the skips of a fold cost its balance, or how many cross ranks for it."""
    pairs, owners = skip_pairs(graph), [ranks[:1] for ranks in staged.stage_ranks]
    places, policy = len(set(owners)), POLICIES.get(staged.schedule)
    folded = owners == owners[::-1] and staged.num_stages % (2 * places) == 0 and not (policy and policy.reverses)
    if not pairs or places < 2 or not folded:
        return ()
    loads, stage_of = _loads(times, staged), staged.stage_of_block
    mean = sum(loads) / len(loads)
    busiest = max(loads) / mean if mean else 1.0
    crossing = sum(owners[stage_of[a]] != owners[stage_of[b]] for a, b in pairs)
    if crossing:
        return (f"{crossing} of {len(pairs)} skips cross ranks, busiest rank {busiest:.3f} x mean",)
    free = waves(times.total, [], places, staged.num_stages // (2 * places))
    return (
        f"{len(pairs)} skips collocated: busiest rank {busiest:.3f} x mean, {free.max_over_mean:.3f} if balance alone "
        "counted",
    )


def is_collocated(graph: BlockGraph, staged: Staged) -> bool:
    """Whether both ends of every skip are on the same ranks."""
    ranks, stage_of = staged.stage_ranks, staged.stage_of_block
    return all(ranks[stage_of[a]] == ranks[stage_of[b]] for a, b in skip_pairs(graph))


def _neighbour_seconds(cluster: Cluster, pipeline: Sequence[int], num_bytes: int) -> float:
    """Seconds of one message between ranks next to each other, on average."""
    pairs = list(pairwise(pipeline))
    return sum(cluster.transfer_seconds(*pair, num_bytes) for pair in pairs) / max(len(pairs), 1)


def skip_pairs(graph: BlockGraph) -> dict[tuple[int, int], int]:
    """(producer block, consumer block) of every skip, with its bytes per sample."""
    pairs: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        for consumer, kind in zip(edge.consumers, edge.kinds, strict=True):
            if kind == "skip" and isinstance(edge.producer, int) and isinstance(consumer, int):
                key = edge.producer, consumer
                pairs[key] = pairs.get(key, 0) + edge.bytes_per_sample
    return pairs
