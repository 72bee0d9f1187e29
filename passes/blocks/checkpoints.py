"""The blocks that the model itself wants computed again: those in calls of `torch.utils.checkpoint`.

h = checkpoint(res0, x)      | conv_in | res0.norm .. conv1 | res0.conv2 | mid | out |
y = out(mid(h))                 0        1                    2            3     4        ->  blocks 1-2, one run
"""

from collections.abc import Iterator
from itertools import pairwise

from fxpipe.capture import Capture
from fxpipe.plan.block_graph import BlockGraph
from fxpipe.plan.staged import Run


def checkpointed(capture: Capture, graph: BlockGraph) -> tuple[Run, ...]:
    """Runs of blocks that lie in such calls, by half of their operations at least; one call's blocks are one run."""
    calls = [[capture.nodes[name].meta.get("checkpoint") for name in block.nodes] for block in graph.blocks]
    return tuple(_runs([marks if 2 * marks.count(None) <= len(marks) else [None] for marks in calls]))


def _runs(calls: list[list[int | None]]) -> Iterator[Run]:
    start = None
    none: list[int | None] = [None]
    for block, (marks, following) in enumerate(pairwise([*calls, none])):
        known = [mark for mark in marks if mark is not None]
        if known and start is None:
            start = block
        if start is not None and (not known or known[-1] not in following):
            yield start, block + 1
            start = None
