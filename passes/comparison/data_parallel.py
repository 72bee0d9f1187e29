"""Data parallel training: every rank has the whole step, for its share of the samples.

DDP     frozen F F F .. | B B B ...                   gradients in buckets, each reduced as soon as it is full, while
                             reduce, reduce, ...      earlier blocks' backward goes on
ZeRO-3  frozen | gather, F, gather, F ... B, scatter  weights are gathered block by block, the next while one computes;
                                                      gradients are scattered as they come

Sources: Li et al., "PyTorch Distributed", VLDB 2020 (buckets of 25 MiB); Rajbhandari et al., "ZeRO", SC 2020 (stage 3);
Zhao et al., "PyTorch FSDP", VLDB 2023 (prefetch).
"""

from collections.abc import Iterator, Sequence

from fxpipe.options import microbatch_sizes
from fxpipe.simulation.collectives import Collective
from passes.rehearsal.case import Case
from passes.rehearsal.op_writer import OpWriter

BUCKET_BYTES = 25 * 2**20


def ddp(case: Case, num_microbatches: int, recompute: bool = False) -> OpWriter:
    """One step; gradients are summed over ranks in the last micro-batch's backward."""
    writer = OpWriter(case.world_size)
    buckets = _buckets(case, writer)
    for rank, sizes in enumerate(local_sizes(case, num_microbatches)):
        for microbatch, size in enumerate(sizes):
            _forward(case, writer, rank, microbatch, size)
            last = microbatch == len(sizes) - 1
            for block in reversed(case.blocks):
                writer.begin(rank, f"{block}B{microbatch}")
                writer.run(rank, _backward_seconds(case, block, size, microbatch > 0, recompute))
                for bucket in buckets[block] if last else ():
                    writer.issue(rank, bucket)
        writer.end(rank)
        for bucket in (bucket for block in reversed(case.blocks) for bucket in buckets[block]):
            writer.wait_for(rank, bucket)
    return writer


def zero(case: Case, num_microbatches: int, recompute: bool = False) -> OpWriter:
    """One step with weights, gradients and optimizer states of trained blocks sharded over all ranks."""
    writer = OpWriter(case.world_size)
    shares = local_sizes(case, num_microbatches)
    plans = [_Sharded(case, writer) for _ in range(max(map(len, shares)))]
    for rank, sizes in enumerate(shares):
        for microbatch, size in enumerate(sizes):
            plans[microbatch].write(rank, microbatch, size, recompute)
        writer.end(rank)
        for plan in plans[: len(sizes)]:
            for scatter in plan.scatters:
                writer.wait_for(rank, scatter)
    return writer


def zero_seconds(case: Case) -> float:
    """All collectives of one micro-batch of `zero`, which follow each other."""
    ranks, costs = tuple(range(case.world_size)), case.costs
    gathers = [costs.parameter_bytes[block] for block in (*case.blocks, *case.blocks[:-1])]
    return sum(case.cluster.all_gather_seconds(ranks, size) for size in (*gathers, *costs.trained_bytes))


class _Sharded:
    """One micro-batch of ZeRO-3: the collectives that its ranks share."""

    def __init__(self, case: Case, writer: OpWriter) -> None:
        self._case, self._writer = case, writer
        self._order = [*case.blocks, *reversed(case.blocks)]
        # The last block's backward follows its forward: its weights are still there.
        self._gathers = [self._gather(block, place) for place, block in enumerate(self._order)]
        self._scatter_of = [self._collective("reduce_scatter", case.costs.trained_bytes[b]) for b in case.blocks]

    @property
    def scatters(self) -> list[Collective]:
        return [self._scatter_of[block] for block in reversed(self._case.blocks)]

    def write(self, rank: int, microbatch: int, size: int, recompute: bool) -> None:
        case, writer, num_blocks = self._case, self._writer, len(self._case.blocks)
        _frozen(case, writer, rank, microbatch, size)
        self._issue(rank, 0)
        for place, block in enumerate(self._order):
            backward = place >= num_blocks
            writer.begin(rank, f"{block}{'B' if backward else 'F'}{microbatch}")
            self._issue(rank, place + 1)
            gathered = self._gathers[place]
            if gathered is not None:
                writer.wait_for(rank, gathered)
            if backward:
                writer.run(rank, _backward_seconds(case, block, size, False, recompute))
                writer.issue(rank, self._scatter_of[block])
            else:
                writer.run(rank, case.costs.at(size).forward_seconds[block])

    def _issue(self, rank: int, place: int) -> None:
        gathered = self._gathers[place] if place < len(self._gathers) else None
        if gathered is not None:
            self._writer.issue(rank, gathered)

    def _gather(self, block: int, place: int) -> Collective | None:
        if place == len(self._case.blocks):
            return None
        return self._collective("all_gather", self._case.costs.parameter_bytes[block])

    def _collective(self, kind: str, num_bytes: int) -> Collective:
        return self._writer.collective(kind, range(self._case.world_size), num_bytes)


def local_sizes(case: Case, num_microbatches: int) -> list[tuple[int, ...]]:
    """Samples of every micro-batch of every rank."""
    return [microbatch_sizes(end - start, num_microbatches) for start, end in case.shares]


def _forward(case: Case, writer: OpWriter, rank: int, microbatch: int, size: int) -> None:
    _frozen(case, writer, rank, microbatch, size)
    writer.begin(rank, f"0F{microbatch}")
    writer.run(rank, sum(case.costs.at(size).forward_seconds))


def _frozen(case: Case, writer: OpWriter, rank: int, microbatch: int, size: int) -> None:
    for component, seconds in enumerate(case.costs.at(size).component_seconds):
        writer.begin(rank, f"{component}T{microbatch}")
        writer.run(rank, seconds)


def _backward_seconds(case: Case, block: int, size: int, add: bool, recompute: bool) -> float:
    """With the forward again, and the sum with an earlier micro-batch's gradient, where there is such."""
    times = case.costs.at(size)
    again = times.forward_seconds[block] if recompute else 0.0
    adding = case.adding_seconds(case.costs.trained_bytes[block]) if add else 0.0
    return times.backward_seconds[block] + again + adding


def _buckets(case: Case, writer: OpWriter) -> Sequence[list[Collective]]:
    """By block: the buckets that are full once its backward is done; what is left over goes with the first block."""
    found: list[list[Collective]] = [[] for _ in case.blocks]
    for block, size in _filled(case.costs.trained_bytes):
        found[block].append(writer.collective("reduce", range(case.world_size), size))
    return found


def _filled(gradient_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    left = 0
    for block in reversed(range(len(gradient_bytes))):
        left += gradient_bytes[block]
        while left >= BUCKET_BYTES or (block == 0 and left):
            yield block, min(left, BUCKET_BYTES)
            left -= min(left, BUCKET_BYTES)
