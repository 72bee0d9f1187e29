"""Bytes that runs of blocks exchange with the rest, for all runs at once.

    blocks     0  1 [2  3] 4  5        run [2, 4) receives 1-2 and 0-3, sends 3-4
    values     0-1 1-2 2-3 3-4 4-5, 0-3

A value goes once to a run that reads it, and is counted once where it leaves; its gradient goes the other way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpipe.plan.block_graph import BlockGraph, Edge
from passes.placement.memory import Floats


@dataclass(frozen=True, eq=False)
class LineTraffic:
    """Bytes per sample, by first block and end: [blocks + 1, blocks + 1]; and by position of a cut: [blocks + 1]."""

    busiest: Floats  # of a run's two directions, in a micro-batch's forward and backward
    values: Floats  # forward over a cut
    gradients: Floats  # back over it, of no more values
    main: Floats  # forward, without skips


def traffic(graph: BlockGraph) -> LineTraffic:
    """What blocks send each other; kept for the last graphs."""
    return _traffic(graph.edges, len(graph.blocks))


@lru_cache(maxsize=4)
def _traffic(edges: tuple[Edge, ...], num_blocks: int) -> LineTraffic:
    size = num_blocks + 1
    received, sent = (np.zeros((2, size, size)) for _ in range(2))  # values, gradients
    crossing, main = np.zeros((2, size)), np.zeros(size)
    for edge in edges:
        readers = sorted(c for c in edge.consumers if isinstance(c, int))
        if not isinstance(edge.producer, int) or not readers:
            continue
        made, last, num_bytes = edge.producer, readers[-1], float(edge.bytes_per_sample)
        kinds = slice(0, 2 if edge.requires_grad else 1)
        sent[kinds, : made + 1, made + 1 : last + 1] += num_bytes
        for before, reader in zip([made, *readers], readers, strict=False):
            received[kinds, before + 1 : reader + 1, reader + 1 :] += num_bytes
        crossing[kinds, made + 1 : last + 1] += num_bytes
        direct = _last_direct(edge, readers)
        main[made + 1 : direct + 1] += num_bytes
    out, back = sent[0] + received[1], received[0] + sent[1]
    return LineTraffic(np.maximum(out, back), crossing[0], crossing[1], main)


def _last_direct(edge: Edge, readers: Sequence[int]) -> int:
    """The last block that reads the value as anything but a skip; before all where there is none."""
    return max((reader for reader in readers if edge.kind_for(reader) != "skip"), default=-1)
