"""Frozen work in pieces: layers of a component on some samples, between a rank's actions.

shared out first    rank 0: vae[0:16] x 0:32   text[0:16] x 0:32   0F0 0F1 ...      every rank its share
in idle time        rank 0: 0F0   vae[0:3] x 0:9   0F1 ...                          of the next batch: ahead
"""

from collections.abc import Sequence
from dataclasses import dataclass

from passes.fill import Fill, FillProblem, parts
from passes.rehearsal.case import Case


@dataclass(frozen=True)
class Piece:
    """Layers `first_layer` to before `last_layer` on samples `start` to before `stop`, after `position` actions.

    `ahead`: of the next batch.
    """

    component: int
    first_layer: int
    last_layer: int
    start: int
    stop: int
    position: int
    ahead: bool

    def is_final(self, case: Case) -> bool:
        """Whether its samples are done with the component."""
        return self.last_layer == case.frozen.num_layers[self.component]

    def __str__(self) -> str:
        return f"{self.component}T[{self.first_layer}:{self.last_layer}]x{self.start}:{self.stop}"

    def seconds(self, case: Case) -> float:
        layers = case.frozen.seconds_at(self.stop - self.start)[self.component]
        return sum(layers[self.first_layer : self.last_layer])


def shared_out(case: Case, most_samples: int | None = None) -> list[list[Piece]]:
    """Frozen work first: every rank all components on its share of the samples, `most_samples` at a time."""
    pieces: list[list[Piece]] = []
    for start, stop in case.shares:
        step = most_samples or max(stop - start, 1)
        pieces.append(
            [
                Piece(component, 0, num_layers, first, min(first + step, stop), 0, False)
                for first in range(start, stop, step)
                for component, num_layers in enumerate(case.frozen.num_layers)
            ]
        )
    return pieces


def filled(problem: FillProblem, found: Fill, starts: Sequence[Sequence[float]]) -> list[list[Piece]]:
    """A fill's pieces among the actions of every rank, which start at these seconds."""
    return [
        [
            Piece(
                p.component, p.first_layer, p.last_layer, samples.start, samples.stop,
                sum(start < p.start_seconds for start in of_actions), True,
            )
            for p in of_rank for samples in parts(problem, p)
        ]
        for of_rank, of_actions in zip(found.ranks, starts, strict=True)
    ]  # fmt: skip
