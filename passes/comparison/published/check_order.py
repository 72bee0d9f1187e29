"""Check that every frozen (layer, sample) runs once, after its inputs, and where a fill says that samples stay."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from passes.fill.problem import FillProblem
from passes.fill.result import Fill, FillFault, Piece, placed

Times = NDArray[np.float64]


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
        now += problem.components[piece.component].layers[layer].seconds(piece.num_samples)
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
