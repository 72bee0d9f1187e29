"""What a filler returns: which frozen work runs where and when.

fill per-device: 61.20 ms (pipeline 60.00 ms, tail 1.20 ms), 2.1% idle
rank 0: vae[0:3] x 0:16 @ 10.00-14.50, text[0:6] x 0:16 @ 14.50-15.25
rank 1: ...
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from passes.fill.problem import FillProblem


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers `first_layer` to before `last_layer` of a component on samples `first_sample` to before `last_sample`."""

    component: int
    first_layer: int
    last_layer: int
    first_sample: int
    last_sample: int
    start_seconds: float
    end_seconds: float

    @property
    def num_samples(self) -> int:
        return self.last_sample - self.first_sample

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Fill:
    """Pieces of every rank in the order they run; those that start at the pipeline's end or later are the tail.

    `method` says what found it. Where `stays`, a sample is on one rank for all layers of a component, and changes ranks
    between components only; otherwise it may between any two layers.
    `bubble_ratio` is idle device time over iteration x devices, as in DiffusionPipe.
    """

    method: str
    stays: bool
    components: tuple[str, ...]
    ranks: tuple[tuple[Piece, ...], ...]
    pipeline_seconds: float
    tail_seconds: float
    bubble_ratio: float

    @property
    def iteration_seconds(self) -> float:
        return self.pipeline_seconds + self.tail_seconds

    def __str__(self) -> str:
        """A line per rank, times in milliseconds."""
        whole, tail = 1e3 * self.iteration_seconds, 1e3 * self.tail_seconds
        lines = [
            f"fill {self.method}: {whole:.2f} ms (pipeline {1e3 * self.pipeline_seconds:.2f} ms, tail {tail:.2f} ms), "
            f"{self.bubble_ratio:.1%} idle"
        ]
        lines += [
            f"rank {rank}: {', '.join(map(self._word, pieces))}".rstrip() for rank, pieces in enumerate(self.ranks)
        ]
        return "\n".join(lines)

    def _word(self, piece: Piece) -> str:
        layers, samples = f"{piece.first_layer}:{piece.last_layer}", f"{piece.first_sample}:{piece.last_sample}"
        times = f"{1e3 * piece.start_seconds:.2f}-{1e3 * piece.end_seconds:.2f}"
        return f"{self.components[piece.component]}[{layers}] x {samples} @ {times}"


def make_fill(problem: FillProblem, method: str, stays: bool, ranks: Sequence[Iterable[Piece]]) -> Fill:
    """A fill with its times worked out from the pieces."""
    ordered = tuple(tuple(sorted(pieces, key=lambda p: (p.start_seconds, p.end_seconds))) for pieces in ranks)
    pieces = [piece for of_rank in ordered for piece in of_rank]
    end = max((piece.end_seconds for piece in pieces), default=0.0)
    tail = max(0.0, end - problem.pipeline_seconds)
    total = problem.num_ranks * (problem.pipeline_seconds + tail)
    idle = problem.idle_seconds + problem.num_ranks * tail - sum(piece.seconds for piece in pieces)
    ratio = max(0.0, idle / total) if total else 0.0
    names = tuple(component.name for component in problem.components)
    return Fill(method, stays, names, ordered, problem.pipeline_seconds, tail, ratio)


def parts(problem: FillProblem, piece: Piece) -> Iterator[range]:
    """The samples of a piece as they run: as many at once as its component may."""
    step = problem.components[piece.component].most or piece.num_samples
    for start in range(piece.first_sample, piece.last_sample, step):
        yield range(start, min(start + step, piece.last_sample))
