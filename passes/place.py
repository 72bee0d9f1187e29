"""Place blocks on ranks: which blocks form a stage, which rank owns it, and why.

    blocks 0..9, 2 ranks      linear   rank 0: [0-4]          rank 1: [5-9]
                       ->     wave     rank 0: [0-1] [8-9]    rank 1: [2-4] [5-7]

"auto" predicts the step time of every candidate by simulating its schedule, and says how much each loses to the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.schedule import Schedule, Work
from fxpipe.simulator import simulate
from fxpipe.staged import Staged
from passes.partition import linear, wave
from passes.schedule import POLICIES, make_schedule


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of every block, forward and backward, and of every component, for one micro-batch of `num_samples`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    components: tuple[float, ...]
    num_samples: int

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))


@dataclass(frozen=True)
class Request:
    """What the user asked for: a schedule's name ("auto" included) or a finished schedule, and a number of stages."""

    schedule: str | Schedule
    stages: int | None
    world_size: int
    num_microbatches: int


def place(graph: BlockGraph, times: BlockTimes, request: Request, cluster: Cluster) -> Staged:
    """The stages and their ranks.

    Raises:
        CompileError: the number of stages does not fit the ranks or the schedule.
    """
    if isinstance(request.schedule, Schedule):
        return _for_schedule(graph, times, request.schedule, cluster)
    if request.schedule != "auto":
        return _named(graph, times, request, cluster, request.schedule)
    if request.world_size == 1:
        return _named(graph, times, request, cluster, "1f1b")
    names = [n for n in ("1f1b", "wave") if request.stages in (None, request.world_size * (1 + (n == "wave")))]
    if not names:
        names = ["interleaved"]
    candidates = [_named(graph, times, request, cluster, name) for name in names]
    if "wave" in names:
        candidates.append(_wave(graph, times, request.world_size, cluster, hard=False))
    seconds = [predicted_seconds(graph, times, staged, request.num_microbatches, cluster) for staged in candidates]
    best = min(range(len(candidates)), key=seconds.__getitem__)
    notes = [
        f"{_label(other)} was predicted {seconds[i] / seconds[best] - 1:.1%} slower"
        for i, other in enumerate(candidates)
        if i != best and other.boundaries != candidates[best].boundaries
    ]
    chosen = candidates[best]
    return replace(chosen, notes=(*chosen.notes, *notes))


def _label(staged: Staged) -> str:
    return f"{staged.schedule} over {staged.num_stages} stages" + (
        " with collocated skips" if staged.collocated else ""
    )


def _named(graph: BlockGraph, times: BlockTimes, request: Request, cluster: Cluster, name: str) -> Staged:
    if name not in POLICIES:
        raise CompileError(
            f"unknown schedule {name!r}; choose one of auto, {', '.join(POLICIES)}, or pass a schedule's text"
        )
    world_size = request.world_size
    stages = request.stages or world_size * (2 if name in ("interleaved", "wave") else 1)
    if stages % world_size:
        raise CompileError(f"stages={stages} is no multiple of world_size={world_size}; every rank owns as many stages")
    if name == "wave" or (name == "zero-bubble" and stages == 2 * world_size):
        if stages != 2 * world_size:
            raise CompileError(f"schedule 'wave' has 2 stages per rank, {2 * world_size} in all, not {stages}")
        return replace(_wave(graph, times, world_size, cluster, hard=True), schedule=name)
    boundaries = linear(times.total, stages, _cut_bytes(graph))
    return Staged(boundaries, tuple(s % world_size for s in range(stages)), name, False, world_size)


def _for_schedule(graph: BlockGraph, times: BlockTimes, schedule: Schedule, cluster: Cluster) -> Staged:
    """Stages for an order given by the user: its own placement decides between a wave and a line."""
    ranks, world_size = schedule.stage_ranks, len(schedule.ranks)
    mirrored = tuple(min(s, 2 * world_size - 1 - s) for s in range(2 * world_size))
    if ranks == mirrored and world_size > 1:
        return replace(_wave(graph, times, world_size, cluster, hard=True), schedule=schedule.name)
    used = [stage for stage, rank in enumerate(ranks) if rank is not None]
    inner = linear(times.total, max(len(used), 1), _cut_bytes(graph))
    boundaries = [0]
    for stage in range(schedule.num_stages):
        done = sum(u <= stage for u in used)
        boundaries.append(inner[done])
    return Staged(tuple(boundaries), tuple(r or 0 for r in ranks), schedule.name, False, world_size)


def _wave(graph: BlockGraph, times: BlockTimes, world_size: int, cluster: Cluster, hard: bool) -> Staged:
    pairs = skip_pairs(graph)
    # The value one way, its gradient the other: each end of a crossing skip sends one and receives one.
    # Which ranks is not known yet: mostly neighbours.
    costs = [2 * _neighbour_seconds(cluster, world_size, size * times.num_samples) for size in pairs.values()]
    found = wave(times.total, list(pairs), world_size, hard, _cut_bytes(graph), costs)
    ranks = tuple(min(s, 2 * world_size - 1 - s) for s in range(2 * world_size))
    notes = []
    if pairs and hard:
        free = wave(times.total, [], world_size, False, _cut_bytes(graph))
        notes.append(
            f"{len(pairs)} skips collocated: busiest rank {found.max_over_mean:.3f} x mean, "
            f"{free.max_over_mean:.3f} if skips could cross ranks"
        )
    elif pairs:
        notes.append(
            f"{len(found.crossing)} of {len(pairs)} skips cross ranks, for balance ({found.max_over_mean:.3f} x mean)"
        )
    return Staged(found.boundaries, ranks, "wave", not found.crossing, world_size, tuple(notes))


def _neighbour_seconds(cluster: Cluster, world_size: int, num_bytes: int) -> float:
    """Seconds of one message between ranks next to each other, on average."""
    pairs = [(rank, rank + 1) for rank in range(world_size - 1)]
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


def _cut_bytes(graph: BlockGraph) -> list[float]:
    """Bytes per sample that a cut before each block sends, one more than blocks."""
    cost = [0.0] * (len(graph.blocks) + 1)
    for edge in graph.edges:
        readers = [c for c in edge.consumers if isinstance(c, int)]
        if isinstance(edge.producer, int) and readers:
            for position in range(edge.producer + 1, max(readers) + 1):
                cost[position] += edge.bytes_per_sample
    return cost


def predicted_seconds(
    graph: BlockGraph, times: BlockTimes, staged: Staged, num_microbatches: int, cluster: Cluster
) -> float:
    """Simulated seconds of one step: compute by `times`, transfers by `cluster`."""
    work = estimated_work(graph, staged, num_microbatches)
    forward, backward = stage_seconds(staged, times.forward), stage_seconds(staged, times.backward)
    schedule = make_schedule(
        staged.schedule, work, staged.stage_ranks, forward, backward,
        frozen_seconds=times.components, world_size=staged.world_size,
    )  # fmt: skip
    moved = _stage_bytes(graph, staged)

    def lag(source: int, target: int, kind: str) -> float:
        if kind == "T" or staged.stage_ranks[source] == staged.stage_ranks[target]:
            return 0.0
        pair = (source, target) if kind == "F" else (target, source)
        ranks = staged.stage_ranks[source], staged.stage_ranks[target]
        return cluster.transfer_seconds(*ranks, moved.get(pair, 0) * times.num_samples)

    tables = {"F": forward, "B": backward, "T": times.components, "I": _half(backward), "W": _half(backward)}
    return simulate(schedule, work, lambda a: tables[a.kind][a.stage], lag).makespan_seconds


def _half(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(s / 2 for s in seconds)


def stage_seconds(staged: Staged, block_seconds: Sequence[float]) -> tuple[float, ...]:
    """Block seconds summed per stage."""
    pairs = zip(staged.boundaries, staged.boundaries[1:], strict=False)
    return tuple(sum(block_seconds[start:stop]) for start, stop in pairs)


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


def _component_edges(graph: BlockGraph, stage_of: Sequence[int]) -> set[tuple[int, int]]:
    index = {component.name: i for i, component in enumerate(graph.components)}
    return {
        (index[edge.producer], stage_of[consumer])
        for edge in graph.edges
        for consumer in edge.consumers
        if isinstance(edge.producer, str) and isinstance(consumer, int)
    }


def _stage_bytes(graph: BlockGraph, staged: Staged) -> dict[tuple[int, int], int]:
    moved: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        if isinstance(edge.producer, int):
            source = staged.stage_of_block[edge.producer]
            for target in {staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)}:
                moved[source, target] = moved.get((source, target), 0) + edge.bytes_per_sample
    return moved
