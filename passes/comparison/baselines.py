"""The baselines: how one would train without fxpipe, each by the best of its settings.

DDP, ZeRO-3                    every rank the whole step on its samples, in buckets of blocks; of ZeRO-3 (Rajbhandari et
                               al., SC 2020) ranks hold a share of weights, gradients and states, and each bucket's
                               weights are gathered while the one before computes, its gradients scattered as they
                               come (Zhao et al., "PyTorch FSDP", VLDB 2023), as of plans with shard="all"
GPipe, 2 stages                two ranks a pipeline, four micro-batches: DiffusionPipe's baseline (Tian et al.,
                               MLSys 2024)
GPipe, recomputed              the same as published: every stage keeps its inputs alone (Huang et al., NeurIPS 2019)
GPipe, 1F1B                    a stage per rank, skips sent to where they are read

Stages are balanced exactly, by time. The frozen part comes first, its micro-batches on the ranks of their pipeline in
turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.errors import CompileError
from fxpipe.plan.plan import microbatch_sizes
from fxpipe.plan.staged import Staged, whole_stages
from fxpipe.show.comparison import Contestant
from fxpipe.simulate.op_lists import StepOps
from passes.case import Case
from passes.comparison.contest import Attempt, best
from passes.comparison.data_parallel import accumulated, replicated
from passes.placement.lines import linear
from passes.placement.lines.traffic import traffic
from passes.placement.shape import pipelines
from passes.step_ops import step_ops
from passes.step_ops.seconds import ActionSeconds
from passes.tuner.bounds import busiest_seconds, placed_seconds, reduction_seconds
from passes.tuner.finals import EARLY
from passes.tuner.orders import Orders

_MOST_PER_STAGE = 16  # micro-batches per stage: what more would save is below a sixteenth


def require_samples(batch_size: int, num_ranks: int) -> None:
    """Raises CompileError where there are fewer samples than ranks."""
    if batch_size < num_ranks:
        raise CompileError(
            f"a batch of {batch_size} samples does not give each of {num_ranks} ranks one; data parallel baselines "
            "need that: use a larger batch (--batch-size) or fewer ranks"
        )


def baselines(case: Case) -> list[Contestant]:
    """All that are possible with so many ranks and samples.

    Raises:
        CompileError: fewer samples than ranks.
    """
    require_samples(case.batch_size, ranks := case.world_size)
    found = [_best_local(case, "DDP", "none"), _best_local(case, "ZeRO-3", "all")]
    if ranks > 1:
        if ranks % 2 == 0:
            found.append(best(case, "GPipe, 2 stages", _gpipe(case, (False, True))))
            found.append(best(case, "GPipe, recomputed", _gpipe(case, (True,))))
        for title in ("GPipe", "1F1B"):
            lines = [LineBaseline(case, title.lower(), ranks, 1, again) for again in (False, True)]
            found.append(best(case, title, (line.attempts(_counts(case, ranks)) for line in lines)))
    return [contestant for contestant in found if contestant is not None]


# -- data parallel


def _best_local(case: Case, name: str, shard: str) -> Contestant | None:
    """The fastest that fits, with recomputation or without: small micro-batches may take longer than to recompute."""
    found: Contestant | None = None
    for rung in _local(case, shard):
        wins = [attempt for attempt in rung if not (found and found.fits) or attempt.bound_seconds < found.seconds]
        row = best(case, name, [wins])
        if found is None or (row is not None and _order(row) < _order(found)):
            found = row
    return found


def _order(row: Contestant) -> tuple[bool, float]:
    """The fastest of those that fit first, then the least hungry."""
    return not row.fits, row.seconds if row.fits else row.peak_bytes


def _local(case: Case, shard: str) -> Iterator[list[Attempt]]:
    """Without and with recomputation, with one micro-batch per rank, two, four ..."""
    most = case.batch_size // case.world_size
    for recompute in (False, True):
        staged = replicated(case, recompute).sharing(shard)
        yield [_local_attempt(case, staged, 2**k) for k in range(most.bit_length())]


def _local_attempt(case: Case, staged: Staged, count: int) -> Attempt:
    sizes = microbatch_sizes(case.batch_size, count * case.world_size)
    setting = f"{count} x {sizes[0]} samples a rank" if count > 1 else f"{sizes[0]} samples a rank"
    frozen = sum(sum(case.costs.at(size).component_seconds) for size in sizes[:: case.world_size])
    compute = frozen + busiest_seconds(ActionSeconds(case, staged), sizes)
    bound = max(compute, reduction_seconds(case, staged, len(sizes)))

    def write() -> StepOps:
        return step_ops(case, staged, accumulated(case, staged, len(sizes)), sizes)

    return Attempt(setting + ", recomputed" * bool(staged.recompute), bound, sizes[0], write)


# -- pipelines


def _gpipe(case: Case, recompute: Sequence[bool]) -> Iterator[list[Attempt]]:
    """Two stages and four micro-batches per pipeline, replicas in a node or across; more micro-batches if need be."""
    copies = case.world_size // 2
    for count in (4, 8, 16, 32):
        for again in recompute:
            ways = (LineBaseline(case, "gpipe", 2, copies, again, strided) for strided in {False, 2 < case.world_size})
            yield [attempt for way in ways for attempt in way.attempts([count])]


def _counts(case: Case, stages: int) -> list[int]:
    """Half as many micro-batches as stages, as many, twice as many ..."""
    most = min(case.batch_size, _MOST_PER_STAGE * stages)
    return sorted({min(max(stages * 2**k // 2, 1), most) for k in range(_MOST_PER_STAGE.bit_length() + 1)})


@dataclass(frozen=True)
class LineBaseline:
    """Stages in a line, one per rank of a pipeline, `copies` times."""

    case: Case
    schedule: str
    stages: int
    copies: int
    recompute: bool
    strided: bool = False

    def attempts(self, counts: Sequence[int]) -> list[Attempt]:
        """With so many micro-batches per pipeline."""
        return [self._attempt(count) for count in counts if count * self.copies <= self.case.batch_size]

    def _attempt(self, count: int) -> Attempt:
        sizes = microbatch_sizes(self.case.batch_size, count * self.copies)
        staged = self._staged(sizes[0])
        bound = max(placed_seconds(self.case, staged, sizes), reduction_seconds(self.case, staged, len(sizes)))
        write, early = (partial(self._write, each, sizes) for each in (staged, replace(staged, prefetch=EARLY)))
        return Attempt(self._setting(count, sizes[0]), bound, sizes[0], write, early)

    def _staged(self, size: int) -> Staged:
        boundaries = linear(self.case.costs.at(size).total, self.stages, traffic(self.case.graph).values.tolist())
        ways = pipelines(self.stages, self.copies, self.strided)
        ranks = tuple(tuple(way[stage] for way in ways) for stage in range(self.stages))
        again = whole_stages(boundaries) if self.recompute else ()
        return Staged(boundaries, ranks, self.schedule, False, self.case.world_size, again)

    def _write(self, staged: Staged, sizes: tuple[int, ...]) -> StepOps:
        return step_ops(self.case, staged, Orders(self.case, staged, len(sizes), ahead=False).named(), sizes)

    def _setting(self, count: int, size: int) -> str:
        copies = f" x {self.copies} replicas" if self.copies > 1 else ""
        text = f"{self.stages} stages{copies}, {count} micro-batch{'es' if count > 1 else ''} of {size}"
        return text + ", recomputed" * self.recompute
