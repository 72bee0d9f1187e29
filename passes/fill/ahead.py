"""The next batch's frozen work in a schedule of this batch's training: Schedule -> Schedule.

    rank 0: 0F0 0F1     0B0 0B1                  rank 0: 0F0 0F1 0T[0:4]x0:1 0B0 0B1 0T[4:9]x0:1
    rank 1:     1F0 1B0 1F1 1B1        ->        rank 1: 0T[0:9]x1:2 1F0 1B0 1F1 1B1

A sample's frozen work stays on one rank as far as the ranks that hold the weights allow, and on one of the pipeline
that trains on it: what moves is what the components make, once, to the ranks that read it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.plan.actions import Action, piece
from fxpipe.plan.plan import microbatch_samples
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import Staged
from passes.costs.frozen_layers import FrozenLayers
from passes.fill.problem import FillProblem, Interval
from passes.fill.result import Fill, Piece, parts


@dataclass(frozen=True)
class Unfilled:
    """A step's training as it was simulated: when every rank's actions start, and when it is idle."""

    schedule: Schedule
    seconds: float
    starts: Sequence[Sequence[float]]
    idle: Sequence[tuple[Interval, ...]]


def filled(
    training: Unfilled,
    layers: FrozenLayers,
    staged: Staged,
    sizes: Sequence[int],
    how: Callable[[FillProblem], Fill],
    room_bytes: float | None = None,
    whole: bool = False,
) -> Schedule:
    """The schedule with the frozen work of a batch of as many samples.

    Args:
        sizes: samples of every micro-batch.
        how: a filler.
        room_bytes: what a rank has for an operation of frozen work; as many samples run at once as that permits.
        whole: samples can't be taken apart.
    """
    actions, fills = list(training.schedule.ranks), dict[FillProblem, Fill]()
    for ranks, samples in groups(staged, sizes, training.schedule):
        able = staged.frozen_places({rank: place for place, rank in enumerate(ranks)})
        components = layers.components(len(samples), room_bytes, whole, able)
        problem = FillProblem(training.seconds, tuple(training.idle[r] for r in ranks), components, len(samples))
        if problem not in fills:  # of equal pipelines once
            fills[problem] = how(problem)
        for rank, pieces in zip(ranks, fills[problem].ranks, strict=True):
            actions[rank] = _among(actions[rank], training.starts[rank], problem, pieces, samples)
    return replace(training.schedule, ranks=tuple(actions))


def groups(staged: Staged, sizes: Sequence[int], schedule: Schedule) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Ranks with the samples whose frozen work they share: every one of equal pipelines by itself, of those that the
    schedule has actions of; else all."""
    samples, pipelines = microbatch_samples(sizes), staged.pipelines or [tuple(range(staged.world_size))]
    for first, ranks in enumerate(pipelines):
        if any(schedule.ranks[rank] for rank in ranks):
            yield ranks, [sample for of in samples[first :: len(pipelines)] for sample in range(*of)]


def _among(
    actions: Sequence[Action],
    starts: Sequence[float],
    problem: FillProblem,
    pieces: Sequence[Piece],
    samples: Sequence[int],
) -> tuple[Action, ...]:
    """A rank's pieces before those of its actions that start later."""
    placed = [
        (found.start_seconds, 0, piece(found.component, (found.first_layer, found.last_layer), run))
        for found in pieces
        for run in _runs(problem, found, samples)
    ]
    placed += [(start, 1, action) for start, action in zip(starts, actions, strict=False)]
    return tuple(action for *_, action in sorted(placed, key=lambda item: item[:2]))


def _runs(problem: FillProblem, found: Piece, samples: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The samples of a piece, as many together as may run at once and are neighbours in the batch."""
    for part in parts(problem, found):
        start = stop = samples[part.start]
        for sample in (samples[place] for place in part):
            if sample != stop:
                yield start, stop
                start = sample
            stop = sample + 1
        yield start, stop
