"""What the stages of a line cost on a cluster: the terms of `passes.placement.lines.shortest`.

places      0 -- 1 == 2 -- 3        -- within a node, == between nodes, shared by the pipelines of a node
a stage     its own port: all it sends or receives, over the faster of its two links
a cut       the node's port: all that crosses, where the link there is slower than others of the line
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import BlockGraph
from passes.placement.lines.shortest import Stages, runs, shortest_line
from passes.placement.lines.traffic import traffic
from passes.placement.memory import ROUNDING, Floats, StageMemory, prefix

_SMALL, _LARGE = 1 << 20, 1 << 30  # bytes: collectives change their algorithm with size; these two give a line
_SLOWER = 1.01  # of the fastest link's seconds per byte: another kind of link


@dataclass(frozen=True, eq=False)
class LineCosts:
    """Blocks `first`, `first` + 1, ... of a graph, with seconds of a micro-batch of `num_samples` samples each.

    `backward` is the part of `seconds` that hides reductions, `gradient_bytes` what these sum; `directions` is the
    number of lines that go through the same ports. Where a stage `waits`, one micro-batch more than the next stage may
    hold is in flight on it, as in 1F1B: then a message and its answer are part of the time between two micro-batches.
    """

    graph: BlockGraph
    seconds: Sequence[float]
    backward: Sequence[float]
    gradient_bytes: Sequence[float]
    num_samples: int
    waits: bool = False
    first: int = 0
    directions: int = 1


def part(line: LineCosts, first: int, end: int, directions: int = 1) -> LineCosts:
    """Some blocks of a line, by their places in it."""
    here = slice(first, end)
    return LineCosts(
        line.graph, line.seconds[here], line.backward[here], line.gradient_bytes[here], line.num_samples,
        line.waits, line.first + first, directions,
    )  # fmt: skip


def cut_line(
    line: LineCosts,
    ranks: Sequence[tuple[int, ...]],
    cluster: Cluster,
    microbatches: int,
    memory: StageMemory | None = None,
) -> tuple[int, ...]:
    """Positions between the stages, one more than `ranks`, counted from the line's first block, for the shortest step.

    With fewer blocks than stages the last stages are empty, the others are not.

    Args:
        ranks: of every stage, one per replica.
        microbatches: that a replica of the busiest stage runs, or as many times as often as a rank has stages.
        memory: of these stages, each on a place of its own.

    Raises:
        CompileError: nothing fits into memory.
    """
    used = min(len(line.seconds), len(ranks))
    found = shortest_line(line_stages(line, ranks[:used], cluster, memory), max(microbatches - 1, 1))
    if found is None:
        raise CompileError("no line of stages fits into the memory of its ranks")
    return found + (len(line.seconds),) * (len(ranks) - used)


def line_stages(
    line: LineCosts, ranks: Sequence[tuple[int, ...]], cluster: Cluster, memory: StageMemory | None
) -> Stages:
    """The stages of a line on the ranks of its places; `memory` is of these stages, each on a place of its own."""
    flows, size = traffic(line.graph), len(line.seconds) + 1
    here = slice(line.first, line.first + size)
    links = [_pace(cluster, *pair) for pair in pairwise(ranks)]
    compute = runs(prefix(line.seconds))
    fastest = min((pace for _, pace in links), default=0.0)
    ports: dict[tuple[float, float], Floats] = {}
    periods, messages = [], []
    for place in range(len(ranks)):
        own = min((pace for _, pace in links[max(place - 1, 0) : place + 1]), default=0.0)
        latency, next_ = links[place] if place < len(links) else (0.0, 0.0)
        shared = next_ if next_ > _SLOWER * fastest else 0.0
        if (own, shared) not in ports:
            busiest = np.maximum(flows.busiest[here, here] * own, flows.values[None, here] * shared)
            ports[own, shared] = busiest * line.num_samples * line.directions
        messages.append(2 * (latency + flows.main[here] * line.num_samples * next_))
        answer = messages[-1] if line.waits and place < len(links) else np.zeros(size)
        periods.append(np.maximum(compute + answer, ports[own, shared]))
    if memory is not None:
        periods = _fitting(periods, memory)
    return Stages(periods, messages, _late(line, ranks[0], cluster))


def _fitting(periods: Sequence[Floats], memory: StageMemory) -> list[Floats]:
    """Infinite where a stage does not fit its rank."""
    return [
        np.where(row[None, :] - row[:, None] <= limit * (1 + ROUNDING), period, np.inf)
        for period, row, limit in zip(periods, memory.before(), memory.limit_bytes, strict=False)
    ]


def _late(line: LineCosts, ranks: Sequence[int], cluster: Cluster) -> Floats | None:
    """Seconds that a stage's reduction lasts beyond the backward of the stages before it; None without replicas."""
    if len(ranks) < 2:
        return None
    latency, per_byte = reduction_pace(cluster, ranks)
    gradients, backward = prefix(line.gradient_bytes), prefix(line.backward)
    reduced = (gradients[None, :] - gradients[:, None]) * per_byte + latency
    return np.maximum(reduced - backward[:, None], 0.0)


def reduction_pace(cluster: Cluster, ranks: Sequence[int]) -> tuple[float, float]:
    """Seconds of latency, and per byte, of a sum over ranks."""
    small, large = (cluster.all_reduce_seconds(ranks, size) for size in (_SMALL, _LARGE))
    per_byte = (large - small) / (_LARGE - _SMALL)
    return max(0.0, small - _SMALL * per_byte), per_byte


@lru_cache(maxsize=1 << 14)
def _pace(cluster: Cluster, sources: tuple[int, ...], targets: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of latency, and per byte, of the slowest message from place to place when all replicas send at once."""
    pairs = [(a, b) for a, b in zip(sources, targets, strict=True) if a != b]
    latency = max((cluster.transfer_seconds(a, b, 1) for a, b in pairs), default=0.0)
    slowest = max(cluster.concurrent_seconds([(a, b, float(_LARGE)) for a, b in pairs]), default=0.0)
    return latency, max(0.0, slowest - latency) / _LARGE
