"""The baselines: how one would train without fxpipe, each by the best of its settings.

DDP, ZeRO-3                    every rank the whole step on its samples
GPipe, 2 stages                two ranks a pipeline, four micro-batches, frozen part first on all ranks' own samples:
                               DiffusionPipe's baseline (Tian et al., MLSys 2024)
GPipe, recomputed              the same as published: every stage keeps its inputs alone (Huang et al., NeurIPS 2019)
GPipe, 1F1B, relayed           a stage per rank, all that is sent goes from stage to stage
1F1B, direct                   the same, skips sent to where they are read

Stages are balanced exactly, by time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fxpipe.comparison import Contestant
from fxpipe.errors import CompileError
from fxpipe.options import microbatch_sizes
from fxpipe.schedule import Schedule
from fxpipe.staged import Staged
from passes.comparison.contest import Attempt, Built, best
from passes.comparison.data_parallel import ddp, zero, zero_seconds
from passes.comparison.memory import ddp_peak_bytes, zero_peak_bytes
from passes.estimate import BlockTimes, estimated_work, recomputed_seconds, stage_seconds, without_components
from passes.partition import linear
from passes.placement.place import cut_bytes, pipelines
from passes.placement.ports import busiest_port_seconds, relayed_port_seconds
from passes.rehearsal.case import Case
from passes.rehearsal.memory import frozen_bytes, held_bytes, pipeline_peak_bytes
from passes.rehearsal.op_writer import OpWriter
from passes.rehearsal.pieces import Piece, shared_out
from passes.rehearsal.pipeline_ops import pipeline_ops
from passes.schedules.named import make_schedule

Ops = Callable[[Case, int, bool], OpWriter]
Peak = Callable[[Case, int, bool], int]
_MOST_PER_STAGE = 16  # micro-batches per stage: what more would save is below a sixteenth


def baselines(case: Case) -> list[Contestant]:
    """All that are possible with so many ranks and samples.

    Raises:
        CompileError: fewer samples than ranks.
    """
    if case.batch_size < case.world_size:
        raise CompileError(
            f"a batch of {case.batch_size} samples does not give each of {case.world_size} ranks one; "
            "data parallel baselines need that: use a larger batch or fewer ranks"
        )
    ranks = case.world_size
    found = [
        best(case, "DDP", _local(case, ddp, ddp_peak_bytes, 0.0)),
        best(case, "ZeRO-3", _local(case, zero, zero_peak_bytes, zero_seconds(case))),
    ]
    if ranks > 1:
        if ranks % 2 == 0:
            found.append(best(case, "GPipe, 2 stages", _gpipe(case, (False, True))))
            found.append(best(case, "GPipe, recomputed", _gpipe(case, (True,))))
        for name, relayed in (("gpipe", True), ("1f1b", True), ("1f1b", False)):
            title = f"{'GPipe' if name == 'gpipe' else '1F1B'}, {'relayed' if relayed else 'direct'}"
            lines = [_Line(case, name, ranks, 1, relayed, again) for again in (False, True)]
            found.append(best(case, title, (line.attempts(_counts(case, ranks)) for line in lines)))
    return [contestant for contestant in found if contestant is not None]


def _local(case: Case, ops: Ops, peak: Peak, collective_seconds: float) -> list[list[Attempt]]:
    """Without and with recomputation, with one micro-batch per rank, two, four ...

    `collective_seconds` are of one micro-batch, none at the same time as another.
    """
    most = min(stop - start for start, stop in case.shares)
    counts = [2**k for k in range(most.bit_length()) if 2**k <= most]

    def attempt(count: int, again: bool) -> Attempt:
        bound = max(_local_bound(case, count, again), count * collective_seconds)
        build = partial(Built, peak(case, count, again), partial(ops, case, count, again))
        return Attempt(_local_setting(case, count, again), bound, build)

    return [[attempt(count, again) for count in counts] for again in (False, True)]


def _local_setting(case: Case, count: int, recompute: bool) -> str:
    size = -(-case.batch_size // case.world_size // count)
    text = f"{count} x {size} samples a rank" if count > 1 else f"{size} samples a rank"
    return text + ", recomputed" * recompute


def _local_bound(case: Case, count: int, recompute: bool) -> float:
    """The compute of the largest share."""
    sizes = microbatch_sizes(case.shares[0][1] - case.shares[0][0], count)
    times = [case.costs.at(size) for size in sizes]
    forward = sum(sum(t.forward_seconds) for t in times)
    rest = sum(sum(t.backward_seconds) + sum(t.component_seconds) for t in times)
    return (2 if recompute else 1) * forward + rest


def _gpipe(case: Case, recompute: Sequence[bool]) -> Iterator[list[Attempt]]:
    """Two stages and four micro-batches per pipeline, replicas in a node or across; more micro-batches if need be."""
    copies = case.world_size // 2
    for count in (4, 8, 16, 32):
        for again in recompute:
            ways = (_Line(case, "gpipe", 2, copies, False, again, strided) for strided in {False, 2 < case.world_size})
            yield [attempt for way in ways for attempt in way.attempts([count])]


def _counts(case: Case, stages: int) -> list[int]:
    """Half as many micro-batches as stages, as many, twice as many ..."""
    most = min(case.batch_size, _MOST_PER_STAGE * stages)
    return sorted({min(max(stages * 2**k // 2, 1), most) for k in range(_MOST_PER_STAGE.bit_length() + 1)})


@dataclass(frozen=True)
class _Line:
    """Stages in a line, one per rank of a pipeline, `copies` times."""

    case: Case
    schedule: str
    stages: int
    copies: int
    relayed: bool
    recompute: bool
    strided: bool = False

    def attempts(self, counts: Sequence[int]) -> list[Attempt]:
        """With so many micro-batches per pipeline."""
        return [self._attempt(count) for count in counts if count * self.copies <= self.case.batch_size]

    def _attempt(self, count: int) -> Attempt:
        sizes = microbatch_sizes(self.case.batch_size, count * self.copies)
        staged = self._staged(sizes[0])
        return Attempt(
            self._setting(count, sizes[0]), self._bound(staged, count, sizes[-1]), partial(self._build, staged, sizes)
        )

    def _build(self, staged: Staged, sizes: tuple[int, ...]) -> Built:
        case = self.case
        schedule = self._schedule(staged, len(sizes), sizes[0])
        peak, pieces = _fitting_shares(case, staged, schedule, sizes)
        return Built(peak, partial(pipeline_ops, case, staged, schedule, sizes, relayed=self.relayed, pieces=pieces))

    def _staged(self, size: int) -> Staged:
        times = BlockTimes.of(self.case.costs, size)
        boundaries = linear(times.total, self.stages, cut_bytes(self.case.graph))
        ways = pipelines(self.stages, self.copies, self.strided)
        ranks = tuple(tuple(way[stage] for way in ways) for stage in range(self.stages))
        again = frozenset(range(self.stages)) if self.recompute else frozenset[int]()
        return Staged(boundaries, ranks, self.schedule, False, self.case.world_size, again)

    def _schedule(self, staged: Staged, num_microbatches: int, size: int) -> Schedule:
        times = BlockTimes.of(self.case.costs, size)
        work = without_components(estimated_work(self.case.graph, staged, num_microbatches))
        seconds = stage_seconds(staged, times.forward), recomputed_seconds(staged, times)
        return make_schedule(self.schedule, work, staged.stage_ranks, *seconds, world_size=self.case.world_size)

    def _bound(self, staged: Staged, count: int, size: int) -> float:
        """The busiest stage's compute, or the busiest port's bytes."""
        case, times = self.case, BlockTimes.of(self.case.costs, size)
        seconds = zip(stage_seconds(staged, times.forward), recomputed_seconds(staged, times), strict=True)
        ports = relayed_port_seconds if self.relayed else busiest_port_seconds
        sent = ports(case.graph, staged, case.batch_size, case.cluster, case.costs.trained_bytes)
        return max(count * max(f + b for f, b in seconds), sent)

    def _setting(self, count: int, size: int) -> str:
        copies = f" x {self.copies} replicas" if self.copies > 1 else ""
        text = f"{self.stages} stages{copies}, {count} micro-batch{'es' if count > 1 else ''} of {size}"
        return text + ", recomputed" * self.recompute


def _fitting_shares(
    case: Case, staged: Staged, schedule: Schedule, sizes: Sequence[int]
) -> tuple[int, list[list[Piece]]]:
    """The bytes a rank needs, and its share of the frozen work: in one go, or in as few as memory admits."""
    most = max(stop - start for start, stop in case.shares)
    held = max(held_bytes(case, staged, schedule, sizes))
    training = pipeline_peak_bytes(case, staged, schedule, sizes)
    while most > 1 and case.fits(training) and not case.fits(held + frozen_bytes(case, most)):
        most = -(-most // 2)
    return max(training, held + frozen_bytes(case, most)), shared_out(case, most)
