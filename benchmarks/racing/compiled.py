"""fxpipe, as a user has it: the plan that it makes for the wire, run by `engine.train`, which reads one batch ahead."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

import fxpipe
from benchmarks.racing.contestant import optimizer_of, taken_gradients
from benchmarks.racing.model import Batch, RacedStep
from fxpipe.cluster import Cluster


class Compiled:
    """This rank's program on a copy of the model."""

    def __init__(self, step: RacedStep, batch: Batch, cluster: Cluster | None, **options: Any) -> None:
        self._step = copy.deepcopy(step)
        self.program = fxpipe.compile(
            self._step, 2, example_inputs=batch, cluster=cluster, cost_model="measured", **options
        )
        self.name = " ".join(["fxpipe", *(f"{name}={value}" for name, value in options.items())])
        self.engine = self.program.engine()
        self._optimizer = optimizer_of(self._step.parameters())
        self._losses: Iterator[Tensor] | None = None

    def gradients(self, batch: Batch) -> Iterator[tuple[Tensor | None, Mapping[str, Tensor]]]:
        """Of a step that does the next batch's frozen work, and of the last, which has none to do."""
        for following in (batch, None):
            loss = self.engine.step(batch, following)
            yield loss, taken_gradients(self._step)

    def step(self, batch: Batch) -> None:
        """Every call gives the same batch: the loop reads it one step ahead."""
        if self._losses is None:
            self._losses = self.engine.train(itertools.repeat(batch), self._optimizer)
        next(self._losses)

    def predicted_seconds(self) -> float:
        """Of a step that does the next batch's frozen work."""
        return self.program.simulate(filled=True).makespan_seconds

    def close(self) -> None:
        self._losses = None
        self.engine.close()
