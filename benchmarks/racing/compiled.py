"""fxpipe, as a user has it: profiled on the ranks at hand, then the plan that it makes for the wire, run by
`engine.train`, which reads one batch ahead."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 (puts profiles together)
from torch import Tensor

import fxpipe
from benchmarks.racing.contestant import optimizer_of, taken_gradients
from benchmarks.racing.model import Batch, RacedStep
from cost_models import devices
from cost_models.profiled import Profile
from fxpipe.analysis import costed
from fxpipe.cluster import Cluster
from fxpipe.profiling import Profiler, gathered


class Profiled:
    """What the step's blocks take, timed by both ranks at once, each its share: in rounds, for a machine drifts."""

    def __init__(self, step: RacedStep, batch: Batch) -> None:
        count = len(batch["pixels"])
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= count]
        share = dist.get_rank(), dist.get_world_size()
        self._mine = Profiler(costed(step, batch, count, devices.device(), 24), sizes, torch.device("cpu"), share)

    def profile(self, rounds: int) -> Profile:
        """Collective: after so many rounds more."""
        for _ in range(rounds):
            self._mine.round()
        found = [self._mine.profile()] * dist.get_world_size()
        dist.all_gather_object(found, found[0])
        return gathered(found)


class Compiled:
    """This rank's program on a copy of the model."""

    def __init__(self, step: RacedStep, batch: Batch, cluster: Cluster, profile: Profile, **options: Any) -> None:
        self._step = copy.deepcopy(step)
        self.program = fxpipe.compile(
            self._step, 2, example_inputs=batch, cluster=cluster, cost_model=profile, **options
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

    def predicted_seconds(self, profile: Profile) -> float:
        """Of a step that does the next batch's frozen work; without the optimizer's."""
        return self.program.simulate(profile, filled=True).makespan_seconds

    def close(self) -> None:
        self._losses = None
        self.engine.close()
