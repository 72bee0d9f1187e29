"""Fill: the frozen work of the next iteration, put into the idle time of this one.

    rank 0  |0F0 0F1 0F2|     |0B0 |   |0B1 |    |0B2 |        |0F0 0F1 0F2|vae..|0B0 |vae|0B1 |text|0B2 |vae|
    rank 1  |   |1F0 1B0 1F1 1B1 1F2 1B2|             |   ->   |vae|1F0 1B0 1F1 1B1 1F2 1B2|vae.. text...    |
                                                                                                  pipeline ^ ^ tail

A filler takes a `FillProblem` (idle intervals, frozen components with a time per layer and number of samples) and
returns a `Fill` (pieces of work per rank). What does not fit runs after the pipeline, on all ranks: the tail.

    "none"        all of it is tail
    "greedy"      common-span bubbles, the longest combination of layers in each: DiffusionPipe's Algorithms 1 and 2
    "exact"       common-span bubbles, the least tail
    "per-device"  every rank its own samples in its own idle time
"""

from collections.abc import Callable
from dataclasses import replace

from fxpipe.errors import CompileError
from passes.fill.bound import lower_bound_seconds
from passes.fill.bubbles import idle_intervals, idle_of_schedule, idle_of_timeline
from passes.fill.check import check, require
from passes.fill.exact import exact
from passes.fill.greedy import greedy
from passes.fill.layer import Layer
from passes.fill.per_device import no_fill, per_device
from passes.fill.problem import FillProblem, FrozenComponent, Interval, published
from passes.fill.result import Fill, Piece, among, holders, parts

__all__ = [
    "FILLERS",
    "Fill",
    "FillProblem",
    "FrozenComponent",
    "Interval",
    "Layer",
    "Piece",
    "among",
    "check",
    "fill",
    "holders",
    "idle_intervals",
    "idle_of_schedule",
    "idle_of_timeline",
    "lower_bound_seconds",
    "no_fill",
    "parts",
    "per_device",
    "published",
    "require",
]


def fill(problem: FillProblem, how: str = "per-device") -> Fill:
    """The frozen work in the idle time, by one of `FILLERS`.

    "per-device" returns the greedy filler's result, under the problem's own limits or the published ones, where that
    has a shorter iteration: its `method` is "greedy" then, and samples change ranks between layers.

    Raises:
        CompileError: an unknown filler, or too many combinations for the exact one.
    """
    if how not in FILLERS:
        raise CompileError(f"unknown filler {how!r}; choose one of {', '.join(map(repr, FILLERS))}")
    return FILLERS[how](problem)


def _best(problem: FillProblem) -> Fill:
    found = per_device(problem)
    if found.tail_seconds == 0.0:
        return found
    paper = published(problem)
    stricter = replace(
        problem,
        min_bubble_seconds=max(problem.min_bubble_seconds, paper.min_bubble_seconds),
        local_batches=tuple(n for n in paper.local_batches if n in problem.local_batches),
    )
    others = [no_fill(problem), greedy(problem), *([greedy(stricter)] if stricter != problem else [])]
    return min([found, *others], key=lambda each: each.iteration_seconds)


FILLERS: dict[str, Callable[[FillProblem], Fill]] = {
    "none": no_fill,
    "greedy": greedy,
    "exact": exact,
    "per-device": _best,
}
