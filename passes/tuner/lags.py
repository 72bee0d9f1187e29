"""Seconds that values travel between stages, where all pipelines send the same at the same time and may share links."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from fxpipe.cluster import Cluster
from fxpipe.cluster.network import route
from fxpipe.plan.staged import Staged, stage_bytes
from fxpipe.remembered import remembered
from passes.case import Case


@dataclass(frozen=True, eq=False)
class Lags:
    """For micro-batches of so many samples; `alone`: in the first pipeline, as if nobody else sent anything."""

    case: Case
    staged: Staged
    num_samples: int
    alone: bool = False

    def __call__(self, source: int, target: int, kind: str) -> float:
        """As `fxpipe.plan.execution.simulate` asks; frozen work is ahead of the pipeline, so its values are there."""
        return 0.0 if kind == "T" else self._seconds(source, target, kind)

    @remembered
    def _seconds(self, source: int, target: int, kind: str) -> float:
        size = self._bytes.get((source, target), 0) if kind == "F" else self._gradients.get((target, source), 0)
        sources, targets = self.staged.stage_ranks[source], self.staged.stage_ranks[target]
        if not size:
            return 0.0
        if self.alone:
            a, b = sources[0], targets[0]
            return self.case.cluster.transfer_seconds(a, b, size) if a != b else 0.0
        return max((first + size * each for first, each in _paces(self.case.cluster, sources, targets)), default=0.0)

    @cached_property
    def _bytes(self) -> dict[tuple[int, int], int]:
        return stage_bytes(self.case.graph, self.staged, self.num_samples)

    @cached_property
    def _gradients(self) -> dict[tuple[int, int], int]:
        return stage_bytes(self.case.graph, self.staged, self.num_samples, gradients=True)


@lru_cache(maxsize=1 << 14)
def _paces(cluster: Cluster, sources: tuple[int, ...], targets: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
    """(seconds, seconds per byte) of messages of one size, all started together."""
    pairs = [(a, b) for a, b in zip(sources, targets, strict=False) if a != b]
    latencies = [route(cluster, a, b)[0].latency_seconds for a, b in pairs]
    ends = cluster.concurrent_seconds([(a, b, 1.0) for a, b in pairs])
    return tuple((latency, end - latency) for latency, end in zip(latencies, ends, strict=True))
