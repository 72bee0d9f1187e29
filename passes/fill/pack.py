"""Pack: a rank's own samples through all layers, in its own idle intervals.

    idle   |------------|      |-----|        |----...  (the tail)
           |vae 0:3     | vae 3 on 9 of 16 |vae 3 on 7|vae 4:8 ...

Every interval takes as many whole layers as fit, then a part of the next; what of the interval is left then goes to
the next component that can run. The samples never leave the rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from passes.fill.problem import FillProblem, Interval

PieceFields = tuple[int, int, int, int, int, float, float]
"""The fields of a `Piece`: thousands are made to be thrown away."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Runs in the order of time, of samples numbered from 0, and when the last ends."""

    end_seconds: float
    runs: tuple[PieceFields, ...]


def pack(problem: FillProblem, order: Sequence[int], num_samples: int, room: Sequence[Interval]) -> Packed:
    """`num_samples` through the components of `order`, each after those it depends on, in the intervals of `room`.

    The last interval of `room` has no end.
    """
    progress = {c: _Progress(problem, c, num_samples) for c in order if problem.components[c].layers and num_samples}
    runs: list[PieceFields] = []
    now = 0.0
    for start, end in room:
        if not progress:
            break
        now = start
        for component in order:
            if component in progress and progress.keys().isdisjoint(problem.before[component]):
                now = progress[component].advance(now, end, runs)
                if progress[component].is_done:
                    del progress[component]
    return Packed(now, tuple(runs))


class _Progress:
    """How far a component is: `_layer` is the first layer not done, `_done` on how many samples it is."""

    def __init__(self, problem: FillProblem, component: int, num_samples: int) -> None:
        self._component, self._num_samples = component, num_samples
        self._tables, self._prefix = problem.seconds[component], problem.prefix[component][num_samples]
        partial = problem.partial and not problem.components[component].whole
        self._sizes = problem.local_batches if partial else ()
        self._part_seconds = problem.part_seconds[component]
        self._layer = self._done = 0
        self.is_done = False

    def advance(self, now: float, end: float, runs: list[PieceFields]) -> float:
        """As far as possible between `now` and `end`; returns when that is done."""
        if self._done:
            seconds = self._tables[self._layer][self._num_samples - self._done]
            if now + seconds > end:
                return self._part(now, end, runs)
            now = self._run(self._layer + 1, self._num_samples, now, seconds, runs)
        before = self._prefix[self._layer]
        layer = bisect_right(self._prefix, before + (end - now)) - 1
        if layer > self._layer:
            now = self._run(layer, self._num_samples, now, self._prefix[layer] - before, runs)
        return now if self.is_done else self._part(now, end, runs)

    def _part(self, now: float, end: float, runs: list[PieceFields]) -> float:
        """The next layer on the most samples that fit, of those that leave some."""
        most = bisect_left(self._sizes, self._num_samples - self._done)
        seconds = self._part_seconds[self._layer]
        fitting = bisect_right(seconds, end - now, 0, most)
        if not fitting:
            return now
        return self._run(self._layer + 1, self._done + self._sizes[fitting - 1], now, seconds[fitting - 1], runs)

    def _run(self, last_layer: int, last_sample: int, now: float, seconds: float, runs: list[PieceFields]) -> float:
        end = now + seconds
        runs.append((self._component, self._layer, last_layer, self._done, last_sample, now, end))
        if last_sample == self._num_samples:
            self._layer, self._done = last_layer, 0
            self.is_done = last_layer == len(self._tables)
        else:
            self._done = last_sample
        return end
