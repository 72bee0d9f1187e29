"""What a layout takes at least: what cannot be the best need not be looked at.

First from seconds of operations alone, of which no patch is written:

A patch of the N-th part of an operation takes no less than any kernel, and the N-th part of what it takes longer. Those
on text that the first patch may have alone count as N-th parts: patches are balanced by them.

rows, N beside            steps x its patch
samples in turn           a sample through all stages, then one more for every turn of the busiest column
patches in turn           so for exact steps, unless other layouts' are faster; then each column has its share of all
                          patches, of which those of one turn are done at once

Then from what a patch of the layout does: all its kernels, and of patches beside each other what they wait for, but for
keys and values of exact attention, whose kind is not known yet. Of stages, messages are free.
"""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from math import inf

import numpy as np

from fxpipe.cluster import Cluster
from fxpipe.errors import CompileError
from fxpipe.sampling.beside import Beside, attending
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.clocks import alone, together
from fxpipe.sampling.links import Links
from fxpipe.sampling.planning import Choices, SampleRequest, bounds_of, grid_of
from passes.sampling.work import PatchWork


def least_seconds(case: SampleCase, way: SampleRequest, steps: int, fresh: float = inf) -> float:
    """Of a call of so many steps, where other layouts' exact steps take `fresh` seconds at least; messages are free."""
    fastest = max(way.speeds, default=1.0)
    return _least_seconds(case, way, steps, fresh * fastest) / fastest


def _least_seconds(case: SampleCase, way: SampleRequest, steps: int, fresh: float) -> float:
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


def least_seconds_of_work(
    case: SampleCase, way: SampleRequest, cluster: Cluster, steps: int, fresh: float = inf
) -> float:
    """The same, from the work of its patches; 0 of a layout that cannot be. Of a folded line it is that of any."""
    one = replace(way, fold=None), cluster, steps, fresh
    return case.found_once(("least seconds", case.num_samples, *one), lambda: _least_seconds_of_work(case, *one))


def _least_seconds_of_work(case: SampleCase, way: SampleRequest, cluster: Cluster, steps: int, fresh: float) -> float:
    try:
        grid = grid_of(case, way)
        bounds, text_first = bounds_of(case, way, grid)
    except CompileError:
        return 0.0
    fastest = max(way.speeds, default=1.0)
    if way.stages is None:
        made = Choices(grid, None, bounds, text_first, "rows", way.how)
        return Beside(case, made, cluster).least_seconds(steps, fresh * fastest) / fastest
    size, (start, stop), links = case.run_size(grid), grid.spans(case.num_samples)[0], case.links(cluster, grid)
    runs = len(case.runs(start, stop))
    turns = (len(bounds) - 1) // grid.patches
    through = _through(case, size, case.work(size, bounds[::turns], 0, False), links, way.in_turn)
    exact = through * (1 + (runs - 1) / grid.stages) / fastest
    if not way.in_turn:
        return steps * exact
    warm = min(way.how.warmup, steps)
    works = Counter(case.work(size, bounds, turn, None, turns=turns) for turn in range(turns))
    each = sum(count * _through(case, size, work, links, in_turn=True) for work, count in works.items())
    steady = runs * each / grid.stages / fastest
    return _fresh_seconds(warm, exact, fresh) + (steps - warm) * steady


def _through(case: SampleCase, num_samples: int, work: PatchWork, links: Links, in_turn: bool) -> float:
    """Seconds of a run through all stages, of what depends on the patch; none of them cuts an operation from what it
    reads of others. Patches in turn gather keys and values, and show the prediction to all instead of gathering it."""
    late, beside = case.late(num_samples), links.grid.patches
    is_open = beside > 1 and not in_turn
    items = attending(work.items, case.attention_seconds(num_samples, beside) if is_open else {})
    columns, known, total = range(links.grid.stages if beside > 1 else 1), dict[object, float](), 0.0
    for name, places in groupby(range(len(items)), key=lambda place: items[place].name):
        if name not in late:
            continue
        own = [place for place in places if not (in_turn and (one := items[place].told) and one.kind == "prediction")]
        if any(items[place].told for place in own):
            parts = alone(items, own)
            alike = tuple((s, told and (told.seconds, id(told.sent)), reads) for _, s, told, reads in parts)
            if alike not in known:
                known[alike] = min(together([parts], links, column, lambda told: True).seconds for column in columns)
            total += known[alike]
        else:
            total += sum(items[place].seconds for place in own)
    return total
