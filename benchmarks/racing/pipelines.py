"""torch.distributed.pipelining: the U-Net in two stages, cut by hand; and which cut and micro-batches are its best.

encoders "first"     rank 0 encodes the images, both ranks the text, then the pipeline
encoders "halves"    a rank encodes half of the samples, they exchange what it makes, then the pipeline
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist  # noqa: TID251 (a peer)
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: TID251 (a peer)
from torch.nn.functional import mse_loss

from benchmarks.racing.contestant import optimizer_of, taken_gradients
from benchmarks.racing.model import Batch, RacedStep
from benchmarks.racing.units import Stage, State, units

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
ENCODERS = ("first", "halves")


@dataclass(frozen=True)
class Split:
    """A way to run the pipeline."""

    schedule: str
    cut: int
    microbatches: int
    encoders: str

    def __str__(self) -> str:
        return f"{self.schedule}, cut {self.cut}, {self.microbatches} micro-batches, encoders {self.encoders}"


class Pipeline:
    """This rank's stage of one split."""

    def __init__(self, step: RacedStep, split: Split) -> None:
        self.name, self._step, self._rank = str(split), step, dist.get_rank()
        self._halves = split.encoders == "halves"
        self._part = Stage(step, split.cut, self._rank == 0)
        stage = PipelineStage(self._part, self._rank, 2, torch.device("cpu"))
        self._schedule = SCHEDULES[split.schedule](stage, split.microbatches, loss_fn=mse_loss)
        self._optimizer = optimizer_of(self._part.parameters())

    def gradients(self, batch: Batch) -> Iterator[tuple[Tensor | None, Mapping[str, Tensor]]]:
        loss = self.run(batch)
        yield loss, taken_gradients(self._step)

    def step(self, batch: Batch) -> None:
        self.run(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self, batch: Batch) -> Tensor | None:
        """Forward and backward; the loss on the last rank."""
        noise, timesteps = batch["noise"], batch["timesteps"]
        if self._halves:
            latents, text = self._exchanged(batch)
        else:
            text = self._step.text(batch["token_ids"])
            latents = self._step.latents(batch["pixels"]) if self._rank == 0 else None
        if self._rank == 0:
            self._schedule.step(self._step.noisy(latents, noise, timesteps), text=text, timesteps=timesteps)
            return None
        losses: list[Tensor] = []
        self._schedule.step(text=text, timesteps=timesteps, target=noise, losses=losses)
        return torch.stack(losses).mean().detach()

    def _exchanged(self, batch: Batch) -> list[Tensor]:
        found = []
        half = {name: batch[name].chunk(2)[self._rank] for name in ("pixels", "token_ids")}
        for mine in (self._step.latents(half["pixels"]), self._step.text(half["token_ids"])):
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine.contiguous())
            found.append(torch.cat(both))
        return found


def likely_splits(
    step: RacedStep, batch: Batch, bytes_per_second: float, counts: list[int]
) -> list[tuple[int, int, str]]:
    """Every (cut, micro-batches, encoders), the most promising first.

    By units' seconds, timed on both ranks at once: the busier stage, a micro-batch of the other, and what crosses the
    cut, to and fro, since torch waits for it.
    """
    size = batch["noise"].shape[0]
    frozen = _seconds(lambda: step.encoded(batch["pixels"], batch["token_ids"]))
    found = list[tuple[float, tuple[int, int, str]]]()
    for count in counts:
        taken, crossing = _timed_units(step, {name: value[: size // count] for name, value in batch.items()})
        for cut in range(1, len(taken)):
            stages = [count * sum(taken[:cut]), count * sum(taken[cut:])]
            wire = 2 * count * crossing[cut] / bytes_per_second
            piped = max(stages[0] + stages[1] / count, stages[1] + stages[0] / count) + wire
            found += [(piped + frozen / (2 if how == "halves" else 1), (cut, count, how)) for how in ENCODERS]
    estimates = [sorted(found)]
    dist.broadcast_object_list(estimates)
    return [split for _, split in estimates[0]]


def _timed_units(step: RacedStep, batch: Batch) -> tuple[list[float], list[int]]:
    """Seconds of every unit, forward and backward, and the bytes that cross a cut before it."""
    latents, text = step.encoded(batch["pixels"], batch["token_ids"])
    sample = step.noisy(latents, batch["noise"], batch["timesteps"])
    times = step.unet.time_embedding(step.unet.get_time_embed(sample=sample, timestep=batch["timesteps"])).detach()
    state: State = sample, ()
    seconds, crossing, opens = [], [], True
    for unit in units(step):
        values = state[1] if opens else (*state[1], state[0])
        crossing.append(sum(value.numel() * value.element_size() for value in (times, *values)))
        given = _leaf(state[0]), tuple(_leaf(skip) for skip in state[1])

        def run(unit: torch.nn.Module = unit, given: State = given) -> State:
            made: State = unit(given, times, text)
            made[0].sum().backward(inputs=[*unit.parameters(), given[0]])
            return made

        state = run()
        seconds.append(_seconds(run))
        opens = unit.opens_skip
        state = state[0].detach(), tuple(skip.detach() for skip in state[1])
    for parameter in step.parameters():
        parameter.grad = None
    return seconds, crossing


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def _seconds(run: object) -> float:
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        run()  # type: ignore[operator]
        taken.append(time.perf_counter() - started)
    return min(taken)
