"""What a layout takes at least: what cannot be the best need not be looked at.

It is from seconds of operations alone, of which no patch is written:

A patch of the N-th part of an operation takes no less than any kernel, and the N-th part of what it takes longer. Those
on text that the first patch may have alone count as N-th parts: patches are balanced by them.

rows, N beside            steps x its patch
samples in turn           a sample through all stages, then one more for every turn of the busiest column
patches in turn           so for exact steps, unless other layouts' are faster; then each column has its share of all
                          patches, of which those of one turn are done at once
"""

from math import inf

import numpy as np

from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.planning import Request


def least_seconds(case: SampleCase, way: Request, steps: int, fresh: float = inf) -> float:
    """Of a call of so many steps, where other layouts' exact steps take `fresh` seconds at least; messages are free."""
    fastest = max(way.speeds, default=1.0)
    return _least_seconds(case, way, steps, fresh * fastest) / fastest


def _least_seconds(case: SampleCase, way: Request, steps: int, fresh: float) -> float:
    groups, stages = way.cfg or 1, way.stages or 1
    beside = way.world_size // (way.copies * groups * stages)
    in_group = case.num_samples // groups
    if way.stages is None:
        return steps * _patch_seconds(case, max(in_group, 1), beside)
    runs = 1 if case.dependent else max(in_group, 1)
    samples = in_group if case.dependent else 1
    through = _patch_seconds(case, max(samples, 1), beside)
    exact = through * (1 + (runs - 1) / stages)
    if not way.in_turn:
        return steps * exact
    warm, patches = min(way.how.warmup, steps), way.num_patches or 1
    steady = runs * patches * _patch_seconds(case, max(samples, 1), patches) / (stages * beside)
    return _fresh_seconds(warm, exact, fresh) + (steps - warm) * steady


def _fresh_seconds(warm: int, exact: float, fresh: float) -> float:
    """Of so many exact steps, the last of which is the layout's own."""
    return (warm - 1) * min(exact, fresh) + exact


def _patch_seconds(case: SampleCase, num_samples: int, parts: int) -> float:
    """Of every operation that is done in each step, of a patch that is one of so many."""
    kernel = case.cost_model.moving_seconds(1, 1)
    seconds, of_text = case.step_seconds(num_samples)
    fixed = np.minimum(seconds, kernel)
    return float((fixed + (seconds - fixed) / parts).sum() + of_text.sum() / parts)
