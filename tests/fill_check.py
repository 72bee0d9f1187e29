"""An independent judge of fills: every frozen (layer, sample) once, in order, in idle time.

    rank 0: vae[0:3] x 0:16 @ 10.00-14.50, vae[3:4] x 0:16 @ 14.20-15.00  <-- HERE: starts before the piece before ends

Times come from `FillProblem.seconds`, as the fillers' do; the rest from the pieces alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from passes.fill.problem import FillProblem
from passes.fill.result import Fill, Piece

Times = NDArray[np.float64]
_TOLERANCE = 1e-9  # of the iteration


@dataclass(frozen=True)
class FillFault:
    """What is wrong with a rank's piece, by its place in order; None: with the rank, or with the fill as a whole."""

    rank: int | None
    piece: int | None
    message: str


def placed(fill: Fill) -> Iterator[tuple[int, int, Piece]]:
    """Every piece, with its rank and its place among the rank's pieces."""
    for rank, pieces in enumerate(fill.ranks):
        for place, piece in enumerate(pieces):
            yield rank, place, piece


def require(problem: FillProblem, fill: Fill) -> Fill:
    """The fill, if nothing is wrong with it."""
    faults = check(problem, fill)
    assert not faults, f"{fill}\n{faults}"
    return fill


def check(problem: FillProblem, fill: Fill) -> tuple[FillFault, ...]:
    """All faults of a fill; none if it is valid.

    Every layer runs once on every sample; after the layer before it on that sample, and after all of every component
    it depends on for that sample; only on ranks that may run it; for as long as its layers take; in idle intervals that
    are long enough, or after the pipeline; one piece at a time on a rank; on a part of the samples only where the
    problem permits, and on as many as it permits.
    """
    if len(fill.ranks) != problem.num_ranks:
        return (FillFault(None, None, f"it has {len(fill.ranks)} ranks, the problem {problem.num_ranks}"),)
    slack = _TOLERANCE * max(fill.iteration_seconds, problem.pipeline_seconds)
    malformed = tuple(_malformed(problem, fill))
    if malformed:
        return malformed
    faults = [*_times(problem, fill, slack), *_overlaps(fill, slack), *misordered(problem, fill, slack)]
    return (*faults, *_parts(problem, fill, slack), *misplaced(problem, fill), *_totals(problem, fill, slack))


def _malformed(problem: FillProblem, fill: Fill) -> Iterator[FillFault]:
    for rank, place, piece in placed(fill):
        if not 0 <= piece.component < len(problem.components):
            yield FillFault(rank, place, f"there is no component {piece.component}")
            continue
        component = problem.components[piece.component]
        if not 0 <= piece.first_layer < piece.last_layer <= len(component.layers):
            yield FillFault(rank, place, f"the component has {len(component.layers)} layers")
        if not 0 <= piece.first_sample < piece.last_sample <= problem.batch_size:
            yield FillFault(rank, place, f"the batch has {problem.batch_size} samples")
        if component.ranks is not None and rank not in component.ranks:
            yield FillFault(rank, place, f"it may run on ranks {component.ranks} only")
        if component.whole and piece.num_samples != problem.batch_size:
            yield FillFault(rank, place, "its samples can't be taken apart")


def _times(problem: FillProblem, fill: Fill, slack: float) -> Iterator[FillFault]:
    for rank, place, piece in placed(fill):
        layers = problem.seconds[piece.component][piece.first_layer : piece.last_layer]
        seconds = sum(of[piece.num_samples] for of in layers)
        if abs(piece.seconds - seconds) > slack:
            yield FillFault(rank, place, f"takes {piece.seconds:.6g} s, its layers take {seconds:.6g} s")
        if not _is_idle(problem, rank, piece, slack):
            yield FillFault(rank, place, "the rank is not idle all that time, or not for long enough")


def _is_idle(problem: FillProblem, rank: int, piece: Piece, slack: float) -> bool:
    """Within an idle interval, or after the pipeline, or in the idle time that lasts to its end and then on."""
    if piece.start_seconds >= problem.pipeline_seconds - slack:
        return True
    for start, end in problem.idle[rank]:
        if start - slack <= piece.start_seconds and piece.start_seconds < end:
            goes_on = end >= problem.pipeline_seconds
            return goes_on or (piece.end_seconds <= end + slack and end - start >= problem.min_bubble_seconds)
    return False


def _overlaps(fill: Fill, slack: float) -> Iterator[FillFault]:
    for rank, pieces in enumerate(fill.ranks):
        for place, (first, second) in enumerate(pairwise(pieces)):
            if second.start_seconds < first.end_seconds - slack:
                yield FillFault(rank, place + 1, "starts before the piece before ends")


def _parts(problem: FillProblem, fill: Fill, slack: float) -> Iterator[FillFault]:
    """Pieces that leave samples of a layer for later, to the same rank or (where samples move) to any."""
    latest: dict[tuple[int, int, int], float] = {}
    for rank, _, piece in placed(fill):
        for layer in range(piece.first_layer, piece.last_layer):
            key = piece.component, layer, rank if fill.stays else 0
            latest[key] = max(latest.get(key, 0.0), piece.start_seconds)
    for rank, place, piece in placed(fill):
        layers = range(piece.first_layer, piece.last_layer)
        last = max(latest[piece.component, layer, rank if fill.stays else 0] for layer in layers)
        if last > piece.start_seconds + slack and not problem.partial:
            yield FillFault(rank, place, "leaves samples for later, which is not permitted")
        elif last > piece.start_seconds + slack and piece.num_samples not in problem.local_batches:
            yield FillFault(rank, place, f"leaves samples for later: {piece.num_samples} is no local batch")


def _totals(problem: FillProblem, fill: Fill, slack: float) -> Iterator[FillFault]:
    ends = [piece.end_seconds for _, _, piece in placed(fill)]
    tail = max(0.0, max(ends, default=0.0) - problem.pipeline_seconds)
    if abs(fill.tail_seconds - tail) > slack or fill.pipeline_seconds != problem.pipeline_seconds:
        yield FillFault(None, None, f"the tail is {tail:.6g} s, the pipeline {problem.pipeline_seconds:.6g} s")
    used = sum(piece.seconds for _, _, piece in placed(fill))
    total = problem.num_ranks * fill.iteration_seconds
    busy = problem.num_ranks * problem.pipeline_seconds - sum(b - a for idle in problem.idle for a, b in idle)
    ratio = 1 - (busy + used) / total if total else 0.0
    if abs(fill.bubble_ratio - ratio) > 1e-6:
        yield FillFault(None, None, f"{ratio:.4%} of all device time is idle")


def misordered(problem: FillProblem, fill: Fill, slack: float) -> Iterator[FillFault]:
    """Layers that run on a sample not once, or before the layer before it, or before a component they depend on."""
    ready: list[Times] = []  # by component: when each sample's result is there
    for index, component in enumerate(problem.components):
        shape = len(component.layers), problem.batch_size
        runs, starts, ends = np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape)
        mine = [(rank, place, piece) for rank, place, piece in placed(fill) if piece.component == index]
        for _, _, piece in mine:
            _stamp(problem, piece, runs, starts, ends)
        for layer, sample in np.argwhere(runs != 1)[:1]:
            count = runs[layer, sample]
            yield FillFault(None, None, f"layer {layer} of {component.name} runs {count} times on sample {sample}")
        inputs = np.vstack([np.max([np.zeros(shape[1]), *(ready[d] for d in component.depends)], axis=0), ends])
        yield from _early(mine, starts, inputs, slack)
        ready.append(inputs[-1])


def _stamp(problem: FillProblem, piece: Piece, runs: NDArray[np.int64], starts: Times, ends: Times) -> None:
    now, samples = piece.start_seconds, slice(piece.first_sample, piece.last_sample)
    for layer in range(piece.first_layer, piece.last_layer):
        runs[layer, samples] += 1
        starts[layer, samples] = now
        now += problem.seconds[piece.component][layer][piece.num_samples]
        ends[layer, samples] = now


def _early(mine: Sequence[tuple[int, int, Piece]], starts: Times, inputs: Times, slack: float) -> Iterator[FillFault]:
    early = starts < inputs[:-1] - slack
    for rank, place, piece in mine:
        layers, samples = slice(piece.first_layer, piece.last_layer), slice(piece.first_sample, piece.last_sample)
        for layer, _ in np.argwhere(early[layers, samples])[:1]:
            yield FillFault(rank, place, f"layer {piece.first_layer + layer} starts before its inputs are there")


def misplaced(problem: FillProblem, fill: Fill) -> Iterator[FillFault]:
    """Pieces on another rank than their samples, in a fill that says these stay."""
    if not fill.stays:
        return
    homes = np.full((len(problem.components), problem.batch_size), -1)
    for rank, place, piece in placed(fill):
        home = homes[piece.component, piece.first_sample : piece.last_sample]
        if ((home >= 0) & (home != rank)).any():
            yield FillFault(rank, place, "its samples were on another rank before")
        home[:] = rank
