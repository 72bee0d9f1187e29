"""What a layout takes at least, from seconds of operations alone: what cannot be the best need not be looked at.

A patch of the N-th part of an operation takes no less than the N-th part of its seconds, and no less than any kernel.

rows, N beside            steps x its patch
samples in turn           a sample through all stages, then one more for every turn of the busiest column
patches in turn           so for exact steps; then each column has its share of all patches
"""

from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.planning import Request


def least_seconds(case: SampleCase, way: Request, steps: int) -> float:
    """Of a call of so many steps; messages are free."""
    return _least_seconds(case, way, steps) / max(way.speeds, default=1.0)


def _least_seconds(case: SampleCase, way: Request, steps: int) -> float:
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
    steady = runs * patches * _patch_seconds(case, max(samples, 1), patches) / stages
    return warm * exact + (steps - warm) * steady


def _patch_seconds(case: SampleCase, num_samples: int, parts: int) -> float:
    """Of every operation that is done in each step, of a patch that is one of so many."""
    kernel, once = case.cost_model.moving_seconds(1, 1), case.once(num_samples)
    seconds = ((name, s) for name, s in case.node_seconds(num_samples).items() if name not in once)
    return sum(max(s / parts, min(s, kernel)) for _, s in seconds)
