"""What a placement would take, estimated from block times before any stage is traced.

stages, ranks, order       ->    simulate one pipeline, with transfers as all pipelines make them at once
reductions over replicas   ->    start with the last gradient of a stage, overlap what its rank still computes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster
from fxpipe.cluster.network import Port, route
from fxpipe.costs.block_costs import BlockCosts
from fxpipe.schedule import Schedule, Work
from fxpipe.simulation.collectives import ring_ports
from fxpipe.simulator import ActionTimes, simulate
from fxpipe.staged import Staged
from passes.schedules.named import make_schedule

Pair = tuple[int, int]
_LEFT_IDLE = 0.02
_LONG = 4  # micro-batches per rank beyond which a step is periodic


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of every block, forward and backward, and of every component, for one micro-batch of `num_samples`.

    `input_gradient` is the part of each backward that others wait for where it is split; half where left out.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    components: tuple[float, ...]
    num_samples: int
    input_gradient: tuple[float, ...] = ()

    @staticmethod
    def of(costs: BlockCosts, num_samples: int) -> "BlockTimes":
        """Times for a micro-batch of so many samples."""
        times = costs.at(num_samples)
        whole = times.forward_seconds, times.backward_seconds, times.component_seconds
        return BlockTimes(*whole, num_samples, times.input_gradient_seconds)

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))


@dataclass(frozen=True)
class Estimate:
    """One step of the first of several equal pipelines, and of the reductions over them."""

    schedule: Schedule
    timeline: ActionTimes
    seconds: float


def estimate(
    graph: BlockGraph,
    times: BlockTimes,
    staged: Staged,
    num_microbatches: int,
    cluster: Cluster,
    gradient_bytes: Sequence[int] = (),
    filled: bool = False,
) -> Estimate:
    """Simulate one step.

    Args:
        num_microbatches: of all pipelines together.
        gradient_bytes: per block, to be reduced over replicas; nothing is reduced where left out.
        filled: frozen work goes into idle time, of which fillers leave some 2 % of the pipeline's length.
    """
    forward, backward = stage_seconds(staged, times.forward), recomputed_seconds(staged, times)
    ranks: list[int | tuple[int, ...]] = [*staged.stage_ranks]
    num_ranks, places = staged.world_size, {rank: rank for rank in range(staged.world_size)}
    if len(set(map(len, staged.stage_ranks))) == 1:  # pipelines are equal: one stands for all
        num_microbatches = -(-num_microbatches // staged.replicas)
        places = {rank: place for place, rank in enumerate(sorted({replicas[0] for replicas in staged.stage_ranks}))}
        ranks, num_ranks = [places[replicas[0]] for replicas in staged.stage_ranks], len(places)
    work = estimated_work(graph, staged, num_microbatches)
    frozen: Sequence[float] = times.components
    if filled:
        work, frozen = without_components(work), ()
    schedule = make_schedule(
        staged.schedule, work, ranks, forward, backward,
        frozen_seconds=frozen, frozen_ranks=staged.frozen_places(places), world_size=num_ranks,
    )  # fmt: skip
    lag = Lags(graph, staged, times.num_samples, cluster)
    tables = action_seconds(staged, times) | {"T": times.components}
    timeline = simulate(schedule, work, lambda a: 0.0 if a.kind == "R" else tables[a.kind][a.stage], lag)
    ends = reduction_ends(staged, schedule, timeline, cluster, gradient_bytes)
    seconds = max([timeline.makespan_seconds, *ends])
    if filled:
        frozen_seconds = [num_microbatches * each for each in times.components]
        evenly = _evenly(schedule, timeline, frozen_seconds, staged.frozen_places(places))
        seconds = max(seconds, evenly + _LEFT_IDLE * seconds)
    return Estimate(schedule, timeline, seconds)


def _evenly(
    schedule: Schedule, timeline: ActionTimes, frozen_seconds: Sequence[float], frozen_places: Sequence[tuple[int, ...]]
) -> float:
    """The least time in which frozen work fits beside the actions, shared out over the ranks that may do it."""
    busy = [sum(timeline.end_seconds[a] - timeline.start_seconds[a] for a in actions) for actions in schedule.ranks]
    everywhere = tuple(range(len(busy)))
    of_component = frozen_places or [everywhere] * len(frozen_seconds)
    longest = 0.0
    for ranks in {everywhere, *of_component}:
        here = sum(t for t, able in zip(frozen_seconds, of_component, strict=True) if {*able} <= {*ranks})
        longest = max(longest, (here + sum(busy[rank] for rank in ranks)) / len(ranks))
    return longest


def simulated_step(
    graph: BlockGraph,
    times: BlockTimes,
    staged: Staged,
    num_microbatches: int,
    cluster: Cluster,
    gradient_bytes: Sequence[int],
    filled: bool,
) -> tuple[float, Schedule]:
    """Seconds of one step, and a schedule with as many micro-batches in flight.

    A long step is periodic: its time is that of a shorter one, and as much more for every further micro-batch.
    """
    uneven = len(set(map(len, staged.stage_ranks))) > 1
    count = 1 if uneven else staged.replicas
    places = staged.world_size if uneven else len({replicas[0] for replicas in staged.stage_ranks})
    of_pipeline, short = -(-num_microbatches // count), _LONG * places

    def simulated(microbatches: int) -> Estimate:
        return estimate(graph, times, staged, microbatches * count, cluster, gradient_bytes, filled)

    if of_pipeline <= short + places:
        found = simulated(of_pipeline)
        return found.seconds, found.schedule
    first, second = simulated(short), simulated(short + places)
    each = (second.seconds - first.seconds) / places
    return second.seconds + each * (of_pipeline - short - places), second.schedule


def first_estimate(
    graph: BlockGraph,
    times: BlockTimes,
    staged: Staged,
    num_microbatches: int,
    cluster: Cluster,
    gradient_bytes: Sequence[int],
    filled: bool,
) -> float:
    """Seconds of one step without simulation: (M - 1) busiest rank + one micro-batch's way + transfers + frozen work.

    Several stages per rank, or a split backward, fill about half of the ramps.
    """
    loads: dict[int, float] = {}
    forward, backward = stage_seconds(staged, times.forward), recomputed_seconds(staged, times)
    most = staged.replicas
    for stage, ranks in enumerate(staged.stage_ranks):
        loads[ranks[0]] = loads.get(ranks[0], 0.0) + (forward[stage] + backward[stage]) * most / len(ranks)
    of_pipeline = -(-num_microbatches // most)
    busiest = max(loads.values())
    ramp = sum(loads.values()) - busiest
    if staged.num_stages > len(loads) or staged.schedule == "zero-bubble":
        ramp *= 0.5
    lag = Lags(graph, staged, times.num_samples, cluster)
    hops = sum(lag(s, s + 1, "F") + lag(s + 1, s, "B") for s in range(staged.num_stages - 1))
    frozen = of_pipeline * sum(times.components) / len(loads)
    # The first stage ends last: nothing is left to compute while its gradients are summed.
    first = sum(gradient_bytes[b] for b in staged.blocks(0))
    reduced = cluster.all_reduce_seconds(staged.stage_ranks[0], first) if staged.replicas > 1 else 0.0
    pipeline = of_pipeline * busiest + ramp + hops + reduced
    if filled:
        return max(pipeline, frozen + of_pipeline * sum(loads.values()) / len(loads))
    return frozen + pipeline


def reduction_ends(
    staged: Staged, schedule: Schedule, timeline: ActionTimes, cluster: Cluster, gradient_bytes: Sequence[int]
) -> Iterator[float]:
    """When the gradients of every replicated stage are summed, those that share a rank or a port one by one."""
    last: dict[int, float] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind in "BW":
                last[action.stage] = timeline.end_seconds[action]
    free: dict[int | Port, float] = {}
    for stage in sorted(last, key=last.__getitem__):
        ranks = staged.stage_ranks[stage]
        size = sum(gradient_bytes[b] for b in staged.blocks(stage)) if gradient_bytes else 0
        if len(ranks) > 1 and size:
            uses: tuple[int | Port, ...] = (*ranks, *ring_ports(cluster, tuple(sorted(ranks))))
            start = max(last[stage], *(free.get(use, 0.0) for use in uses))
            end = start + cluster.all_reduce_seconds(ranks, size)
            free.update(dict.fromkeys(uses, end))
            yield end


class Lags:
    """Seconds from stage to stage. All pipelines make the same transfer at the same time, and may share links."""

    def __init__(self, graph: BlockGraph, staged: Staged, num_samples: int, cluster: Cluster) -> None:
        self._ranks, self._cluster, self._num_samples = staged.stage_ranks, cluster, num_samples
        self._bytes = stage_bytes(graph, staged)
        self._known: dict[Pair, float] = {}

    def __call__(self, source: int, target: int, kind: str) -> float:
        """As `fxpipe.simulator.simulate` asks for it; frozen work is ahead of the pipeline, so its values are there."""
        if kind == "T" or self._ranks[source] == self._ranks[target]:
            return 0.0
        if (source, target) not in self._known:
            self._known[source, target] = self._seconds(source, target, kind)
        return self._known[source, target]

    def _seconds(self, source: int, target: int, kind: str) -> float:
        pair = (source, target) if kind == "F" else (target, source)
        size = self._bytes.get(pair, 0) * self._num_samples
        paces = _paces(self._cluster, self._ranks[source], self._ranks[target]) if size else ()
        return max((latency + size * per_byte for latency, per_byte in paces), default=0.0)


@lru_cache(maxsize=1 << 14)
def _paces(cluster: Cluster, sources: tuple[int, ...], targets: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
    """(seconds, seconds per byte) of messages of one size, all started together."""
    pairs = [(a, b) for a, b in zip(sources, targets, strict=False) if a != b]
    latencies = [route(cluster, a, b)[0].latency_seconds for a, b in pairs]
    ends = cluster.concurrent_seconds([(a, b, 1.0) for a, b in pairs])
    return tuple((latency, end - latency) for latency, end in zip(latencies, ends, strict=True))


def stage_seconds(staged: Staged, block_seconds: Sequence[float]) -> tuple[float, ...]:
    """Block seconds summed per stage."""
    return tuple(sum(block_seconds[b] for b in staged.blocks(stage)) for stage in range(staged.num_stages))


def recomputed_seconds(staged: Staged, times: BlockTimes) -> tuple[float, ...]:
    """Seconds of every stage's backward, with the forward again where that is recomputed."""
    forward, backward = stage_seconds(staged, times.forward), stage_seconds(staged, times.backward)
    return tuple(
        b + (f if s in staged.recompute else 0.0) for s, (f, b) in enumerate(zip(forward, backward, strict=True))
    )


def action_seconds(staged: Staged, times: BlockTimes) -> dict[str, tuple[float, ...]]:
    """Seconds of F, B, I and W of every stage; what is recomputed is part of B, and of I."""
    forward, backward = stage_seconds(staged, times.forward), recomputed_seconds(staged, times)
    inputs = tuple(seconds / 2 for seconds in backward)
    if times.input_gradient:
        parts = zip(stage_seconds(staged, times.input_gradient), forward, strict=True)
        inputs = tuple(i + (f if s in staged.recompute else 0.0) for s, (i, f) in enumerate(parts))
    weights = tuple(max(0.0, b - i) for b, i in zip(backward, inputs, strict=True))
    return {"F": forward, "B": backward, "I": inputs, "W": weights}


def estimated_work(graph: BlockGraph, staged: Staged, num_microbatches: int) -> Work:
    """The work before stages are traced: every stage trains, every edge that requires grad returns a gradient."""
    stage_of = staged.stage_of_block
    edges, gradients = set(), set()
    for edge in graph.edges:
        for consumer in edge.consumers:
            if isinstance(edge.producer, int) and isinstance(consumer, int):
                pair = stage_of[edge.producer], stage_of[consumer]
                if pair[0] != pair[1]:
                    edges.add(pair)
                    if edge.requires_grad:
                        gradients.add(pair[::-1])
    filled = frozenset(stage_of)
    return Work(
        num_stages=staged.num_stages,
        num_microbatches=num_microbatches,
        num_components=len(graph.components),
        empty=frozenset(range(staged.num_stages)) - filled,
        backward=filled,
        input_grad=frozenset(consumer for consumer, _ in gradients),
        weight_grad=filled,
        edges=frozenset(edges),
        grad_edges=frozenset(gradients),
        frozen_edges=frozenset(_component_edges(graph, stage_of)),
    )


def without_components(work: Work) -> Work:
    """The training alone: what frozen work makes is there before it starts."""
    return replace(work, num_components=0, frozen_edges=frozenset(), component_edges=frozenset())


def _component_edges(graph: BlockGraph, stage_of: Sequence[int]) -> set[Pair]:
    index = {component.name: i for i, component in enumerate(graph.components)}
    return {
        (index[edge.producer], stage_of[consumer])
        for edge in graph.edges
        for consumer in edge.consumers
        if isinstance(edge.producer, str) and isinstance(consumer, int)
    }


def stage_bytes(graph: BlockGraph, staged: Staged) -> dict[Pair, int]:
    """Bytes per sample from stage to stage, each value once per reader."""
    moved: dict[Pair, int] = {}
    for edge in graph.edges:
        if isinstance(edge.producer, int):
            source = staged.stage_of_block[edge.producer]
            for target in {staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)}:
                moved[source, target] = moved.get((source, target), 0) + edge.bytes_per_sample
    return moved
