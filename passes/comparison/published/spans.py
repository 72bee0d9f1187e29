"""Frozen work in common-span bubbles: idle time that several ranks share, what can be done in it, and what that leaves.

    rank 0  |####|-----------|####|                   bubbles: {1}     from 2 to 4
    rank 1  |##|----|########|----|           ->               {0, 1}  from 4 to 6
            0  2    4    6   9                                 {0}     from 6 to 9 ...

A bubble ends whenever any rank becomes busy or idle, so that one rank's idle time is cut up by the others.

    vae done to layer 3, text not begun;  bubble: 20 ms, ranks 0 1 idle

    vae 3:6 on all samples, text 0:1 on all, then text layer 1 on 8 of each rank's 16 samples   ->  vae 6, text 1 + 16
    vae 3:5 on all samples, text 0:4 on all, ...                                                ->  vae 5, text 4 + ..

All idle ranks work on the same layer, each on its share of the samples; a component that is restricted to some ranks
uses those of them that are idle, a whole one a single rank. At most one layer of a bubble runs on a part of its
samples, and is its component's first layer afterwards. Samples may change ranks between any two layers, at no cost:
that is the model of DiffusionPipe (Tian et al., MLSys 2024, Algorithms 1 and 2).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from fxpipe.errors import CompileError
from passes.fill.problem import FillProblem

State = tuple[tuple[int, int], ...]
"""Per component the first layer that is not done, and on how many samples it is."""

_COMBINATIONS = 1 << 14


@dataclass(frozen=True, slots=True)
class Bubble:
    """A span in which exactly `ranks` are idle."""

    start_seconds: float
    end_seconds: float
    ranks: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def common_bubbles(problem: FillProblem) -> tuple[Bubble, ...]:
    """The maximal spans with a constant set of idle ranks, in time order, none shorter than the problem's least."""
    times = sorted({time for idle in problem.idle for interval in idle for time in interval})
    is_idle = np.zeros((problem.num_ranks, len(times)), dtype=bool)
    for rank, idle in enumerate(problem.idle):
        for first, last in np.searchsorted(times, idle).reshape(-1, 2):
            is_idle[rank, first:last] = True
    found: list[Bubble] = []
    for span, (start, end) in enumerate(pairwise(times)):
        ranks = tuple(np.flatnonzero(is_idle[:, span]).tolist())
        if found and (found[-1].ranks, found[-1].end_seconds) == (ranks, start):
            start = found.pop().start_seconds
        if ranks:
            found.append(Bubble(start, end, ranks))
    return tuple(bubble for bubble in found if bubble.seconds >= problem.min_bubble_seconds)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do in a bubble: how many next layers of every component on all their samples, then `partial`: the next
    layer of a component on so many samples per rank. All of it takes `seconds`."""

    counts: tuple[int, ...]
    partial: tuple[int, int] | None
    seconds: float


def initial(problem: FillProblem) -> State:
    """Nothing is done."""
    return ((0, 0),) * len(problem.components)


def width(problem: FillProblem, component: int, ranks: Sequence[int]) -> int:
    """How many of `ranks` can share a component's layer."""
    usable = len(set(ranks).intersection(problem.ranks_of(component)))
    return min(usable, 1) if problem.components[component].whole else usable


def choices(problem: FillProblem, state: State, bubble: Bubble, thin: bool) -> Iterator[Choice]:
    """Every choice that no other one in this bubble contains.

    The component whose layer runs in part has before it as many whole layers as fit beside those of the others, for
    another one would take its place. Where there are more than 2^14 combinations of the others, `thin` keeps one of
    those within a 2^14th of the bubble of each other.

    Raises:
        CompileError: there are more, and `thin` is not set.
    """
    room = bubble.seconds
    widths = [width(problem, c, bubble.ranks) for c in range(len(state))]
    ready = [c for c in range(len(state)) if widths[c] and _ready(problem, state, c)]
    times = {c: _whole_layers(problem, state, c, widths[c], room) for c in ready}
    times = {c: found for c, found in times.items() if len(found) > 1 or problem.partial}
    for last, found in times.items():
        others = [c for c in times if c != last]
        for counts, used in _combinations([times[c] for c in others], room, thin):
            count = bisect_right(found, room - used) - 1
            used += found[count]
            full = [0] * len(state)
            for c, number in zip(others, counts, strict=True):
                full[c] = number
            full[last] = count
            partial, seconds = _partial(problem, state, last, count, widths[last], room - used)
            yield Choice(tuple(full), partial, used + seconds)


def _ready(problem: FillProblem, state: State, component: int) -> bool:
    def done(c: int) -> bool:
        return state[c][0] == len(problem.components[c].layers)

    return not done(component) and all(done(c) for c in problem.before[component])


def _whole_layers(problem: FillProblem, state: State, component: int, ways: int, room: float) -> list[float]:
    """Seconds of the next 0, 1, ... layers on all their samples, as many as fit."""
    layer, done = state[component]
    found = [0.0]
    for index, table in enumerate(problem.seconds[component][layer:]):
        left = problem.batch_size - (0 if index else done)
        found.append(found[-1] + table[-(-left // ways)])
        if found[-1] > room:
            return found[:-1]
    return found


def _combinations(times: Sequence[Sequence[float]], room: float, thin: bool) -> Sequence[tuple[tuple[int, ...], float]]:
    """Numbers of layers of each component that fit together, with their seconds."""
    found: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for each in times:
        found = [((*n, k), used + t) for n, used in found for k, t in enumerate(each) if used + t <= room]
        if len(found) > _COMBINATIONS:
            if not thin:
                raise CompileError(
                    f"more than {_COMBINATIONS} combinations of layers fit into a bubble of {room:.6g} s; the exact "
                    'filler is for few components: use "greedy" or "per-device"'
                )
            found = list({int(pair[1] / room * _COMBINATIONS): pair for pair in found}.values())
    return found


def _partial(
    problem: FillProblem, state: State, component: int, count: int, ways: int, room: float
) -> tuple[tuple[int, int] | None, float]:
    """The largest part of the layer after `count` more that fits, and its seconds."""
    layer, done = state[component]
    tables = problem.seconds[component][layer + count :]
    if not (tables and problem.partial) or problem.components[component].whole:
        return None, 0.0
    left = problem.batch_size - (0 if count else done)
    smaller = problem.local_batches[: bisect_left(problem.local_batches, -(-left // ways))]
    fitting = bisect_right(smaller, room, key=lambda n: tables[0][n])
    return ((component, smaller[fitting - 1]), tables[0][smaller[fitting - 1]]) if fitting else (None, 0.0)


def after(problem: FillProblem, state: State, bubble: Bubble, choice: Choice) -> State:
    """What is done once a choice is."""
    progress = [
        (layer + count, 0 if count else done) for (layer, done), count in zip(state, choice.counts, strict=True)
    ]
    if choice.partial is not None:
        component, size = choice.partial
        layer, done = progress[component]
        progress[component] = layer, done + size * width(problem, component, bubble.ranks)
    return tuple(progress)


def tail_seconds(problem: FillProblem, state: State) -> float:
    """Seconds of what is left, after the pipeline: layer after layer, each shared by all ranks that may run it."""
    everything = range(problem.num_ranks)
    times = (_whole_layers(problem, state, c, width(problem, c, everything), inf)[-1] for c in range(len(state)))
    return sum(times)
