"""Stages: the operations that depend on the patch, cut into runs that columns of ranks have.

    line, 3 columns            conv_in res0 | res1 mid up0 | up1 out       stages 0 1 2 on columns 0 1 2
    fold, 3 columns            conv_in | res0 | res1 mid up0 | up1 | out   stages 0 1 2 3 4 on columns 0 1 2 1 0

What is known before the patch (text, time embeddings, positions) belongs to no stage: whoever reads it computes it.
The busiest column decides how fast patches follow each other, so it is made as light as it can be, a slower one the
lighter; among cuts that are nearly as good the one with the fewest bytes on the wire is taken. A fold keeps both ends
of a skip on one column.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpipe.errors import CompileError
from fxpipe.plan.block_graph import Block, bytes_at, tensor_bytes
from passes.blocks import blocks
from passes.blocks.freeze import Freeze
from passes.rows import RowPlan
from passes.rows.sized import Sized

_BLOCKS = 8  # for every column, from which stages are made
_SLACKS = (1.15, 1.4, 2.0, inf)  # of the mean load: the busiest column has no more, if that can be


@dataclass(frozen=True)
class Stage:
    """A run of operations by node name, and the column of ranks that has it.

    `reads` are values of other stages, `returns` those that other stages read. `seconds`: of its operations, once.
    """

    index: int
    column: int
    nodes: frozenset[str]
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class StageLine:
    """All stages in order. `early` are the operations that every stage computes for itself."""

    stages: tuple[Stage, ...]
    num_columns: int
    early: frozenset[str]

    @property
    def folded(self) -> bool:
        return len(self.stages) > self.num_columns

    def readers(self, value: str) -> list[int]:
        """The columns that read a value."""
        return sorted({stage.column for stage in self.stages if value in stage.reads})


@dataclass(frozen=True, eq=False)
class LateBlocks:
    """What depends on the patch as runs of operations, with names and seconds; `early` is what does not."""

    sized: Sized
    blocks: tuple[Block, ...]
    seconds: tuple[float, ...]
    early: frozenset[str]


StageSpan = tuple[int, int, int]
"""A stage: its blocks from the first to before the second, and its column."""


def num_blocks(columns: int) -> int:
    """From how many blocks the stages of so many columns are made."""
    return max(_BLOCKS * columns, 2)


def late_blocks(
    plan: RowPlan, sample: Mapping[str, int], late_values: frozenset[str], node_seconds: Mapping[str, float], count: int
) -> LateBlocks:
    """Cut a denoiser into about so many blocks of equal time.

    Args:
        sample: the inputs that have rows.
        late_values: what depends on the patch.
        node_seconds: of every operation, by its name.

    Raises:
        CompileError: nothing of it depends on the patch.
    """
    calls = [node.name for node in plan.sized.graph.nodes if node.op == "call_function"]
    late = [name for name in calls if name in late_values]
    if plan.sized.result.name not in late:
        raise CompileError(f"the prediction is not made of {', '.join(sample)}: there are no stages; leave stages open")

    def bytes_of(value: Any) -> tuple[int, bool] | None:
        """At the call's batch, which any tensor may follow as it likes: samples that are mixed pass together."""
        of_any = isinstance(value, torch.Tensor)
        return tensor_bytes(value) or ((bytes_at(value, plan.sized.batch_size), True) if of_any else None)

    cut = blocks(plan.sized.capture, Freeze(tuple(late), (), frozenset(), ()), node_seconds, count, bytes_of)
    seconds = tuple(sum(node_seconds.get(name, 0.0) for name in block.nodes) for block in cut)
    return LateBlocks(plan.sized, cut, seconds, frozenset(calls).difference(late))


def stage_spans(
    late: LateBlocks, columns: int, fold: bool | None, speeds: Sequence[float] = ()
) -> tuple[StageSpan, ...]:
    """Stages for so many columns of ranks.

    Args:
        speeds: of every column; all the same where left out.
        fold: whether the line is folded, so that a column has two stages; where fewer bytes cross, if left out.

    Raises:
        CompileError: it cannot be divided so often.
    """
    count = len(late.blocks)
    if count < columns:
        raise CompileError(
            f"stages={columns}, but the denoiser divides into {count} blocks; use stages={count} or fewer"
        )
    values = list(_values(late.sized.nodes, [block.nodes for block in late.blocks]))
    ways = (False, True) if fold is None else (fold,)
    found = [_columns(late.seconds, values, speeds or [1.0] * columns, way) for way in ways]
    _, bounds = min(found, key=lambda way: (way[0], _sent(values, way[1], count)))
    edges = [(0, count), *bounds]
    spans = [(edges[c][0], edges[c + 1][0], c) for c in range(len(bounds))]
    spans.append((*edges[-1], len(bounds)))
    spans += [(edges[c + 1][1], edges[c][1], c) for c in reversed(range(len(bounds)))]
    return tuple(span for span in spans if span[0] < span[1])


def line_of(late: LateBlocks, spans: Sequence[StageSpan]) -> StageLine:
    """The stages with what crosses between them."""
    members = [[name for block in late.blocks[start:stop] for name in block.nodes] for start, stop, _ in spans]
    stage_of = {name: index for index, names in enumerate(members) for name in names}
    operands = [dict.fromkeys(chain.from_iterable(map(late.sized.reads.__getitem__, names))) for names in members]
    reads = [tuple(n for n in of if stage_of.get(n, index) != index) for index, of in enumerate(operands)]
    read, made = {*chain.from_iterable(reads)}, []
    for index, ((start, stop, column), names) in enumerate(zip(spans, members, strict=True)):
        returns = tuple(name for name in names if name in read)
        made.append(Stage(index, column, frozenset(names), reads[index], returns, sum(late.seconds[start:stop])))
    return StageLine(tuple(made), 1 + max(column for *_, column in spans), late.early)


Bounds = tuple[tuple[int, int], ...]
"""Of every column but the last: its blocks end before the first number, and go on from the second."""


def _values(nodes: Mapping[str, fx.Node], runs: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, set[int]]]:
    """What crosses between blocks: (bytes, the block that makes it, the blocks that read it)."""
    block_of = {name: index for index, run in enumerate(runs) for name in run}
    for name, own in block_of.items():
        readers = {block_of[user.name] for user in nodes[name].users if user.name in block_of} - {own}
        if readers:
            yield nodes[name].meta["val"].nbytes, own, readers


def _columns(
    seconds: Sequence[float], values: Sequence[tuple[int, int, set[int]]], speeds: Sequence[float], fold: bool
) -> tuple[float, Bounds]:
    """How even loads can be, and the bounds: columns of these speeds take blocks from both ends until the last has the
    rest.

    A value that passes over several columns counts for each of them.
    """
    count, columns, mean = len(seconds), len(speeds), sum(seconds) / sum(speeds)
    sums, crossing = [sum(seconds[:i]) for i in range(count + 1)], _crossing(values, count)

    def best(limit: float) -> Bounds | None:
        @cache
        def rest(i: int, j: int, left: int) -> tuple[float, Bounds]:
            own = limit * speeds[-left]
            if left == 1:
                return (0.0 if sums[j] - sums[i] <= own else inf), ()
            found: tuple[float, Bounds] = inf, ()
            most = limit * sum(speeds[1 - left :]) * (1 + 1e-9)  # of the columns inside
            for start in range(i + 1, j - left + 2):
                before = sums[start] - sums[i]
                if before > own:
                    break
                last = bisect_right(sums, sums[start] + most) - 1
                for stop in range(min(j, last), start + left - 2, -1) if fold else (j,) * (j <= last):
                    if before + sums[j] - sums[stop] > own:
                        break
                    inner, bounds = rest(start, stop, left - 1)
                    if inner + crossing[start][stop] < found[0]:
                        found = inner + crossing[start][stop], ((start, stop), *bounds)
            return found

        cost, bounds = rest(0, count, columns)
        return bounds if cost < inf else None

    for slack in _SLACKS:
        if (bounds := best(max(slack * mean, max(seconds) / max(speeds)) * (1 + 1e-9))) is not None:
            return slack, bounds
    raise AssertionError("there are as many blocks as columns")


def _crossing(values: Sequence[tuple[int, int, set[int]]], count: int) -> list[list[int]]:
    """Bytes that go into or out of blocks [i, j), for every i and j."""
    touched = np.zeros((len(values), count + 1), np.int64)  # blocks before the i-th that make or read a value
    for index, (_, own, readers) in enumerate(values):
        touched[index, [block + 1 for block in {own, *readers}]] = 1
    touched = touched.cumsum(1)
    sizes, of_all = np.array([size for size, *_ in values], np.int64), touched[:, -1:]
    inside = (touched - touched[:, [start]] for start in range(count + 1))
    return [(sizes @ ((0 < of) & (of < of_all))).tolist() for of in inside]


def _sent(values: Sequence[tuple[int, int, set[int]]], bounds: Bounds, count: int) -> int:
    """Bytes that go from column to column."""
    column = [sum(start <= block < stop for start, stop in bounds) for block in range(count)]
    return sum(size * len({column[r] for r in readers} - {column[own]}) for size, own, readers in values)
