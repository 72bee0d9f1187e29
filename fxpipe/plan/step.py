"""A step plan: everything an engine needs to run one batch size, and nothing about how it was found."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.randomness import Draw
from fxpipe.errors import CompileError
from fxpipe.models.self_conditioning import conditioned
from fxpipe.plan.lanes import SendOrder
from fxpipe.plan.outputs import Output
from fxpipe.plan.rank_program import Gathering, Message, RankProgram, Reduction, Traffic
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.state_update import StateUpdate
from fxpipe.plan.transport import Channel


class Predicted(NamedTuple):
    """A step's seconds, and on which devices."""

    seconds: float
    device: str


@dataclass(frozen=True)
class StepPlan:
    """Rank programs and messages for one batch size; `input_names` maps a program's input to the model's argument.

    `programs` are those of all ranks, or of this process's alone; messages, reductions and gatherings are all ranks'.
    `source` is the fingerprint of the costed step, which is the same graph from `fewest` samples on. Of a self-
    conditioned step `without` is what runs where a step draws no first pass, and `probability` that of one. `outputs`
    are what it returns beside the loss, for users and for its `updates`, which are what it writes into the model's own
    tensors; `sends` its messages in an order in which all can be sent. `backend` is what stage graphs run by;
    `predicted` what a step in a row of them takes. Where it is `offloaded` the optimizer's states are on the host.
    """

    inputs: InputSpec
    input_names: Mapping[str, str]
    batch_size: int
    fewest: int
    draws: Mapping[int, Draw]
    schedule: Schedule
    programs: tuple[RankProgram, ...]
    messages: tuple[Message, ...]
    reductions: tuple[Reduction, ...]
    device: torch.device
    source: str
    without: "StepPlan | None" = None
    probability: float = 1.0
    outputs: tuple[Output, ...] = ()
    sends: SendOrder = field(default_factory=lambda: SendOrder((), {}))
    backend: str = "eager"
    predicted: Predicted | None = None
    offloaded: bool = False
    gatherings: tuple[Gathering, ...] = ()
    updates: tuple[StateUpdate, ...] = ()

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
        """A call's tensors by program input, of any number of samples, and that number; CompileError where names,
        shapes or types are not the compiled ones."""
        tensors, size = self.inputs.bind(args, kwargs)
        return {name: tensors[argument].contiguous() for name, argument in self.input_names.items()}, size

    def takes(self, size: int) -> bool:
        """Whether a batch of so many samples is this step's, or its micro-batches' first ones."""
        return self.fewest <= size <= self.batch_size

    def require_size(self, size: int) -> None:
        """Raises CompileError where a batch is larger than this step's, or has too few samples for the same graph."""
        if size > self.batch_size:
            raise CompileError(f"{self._has(size)}: compile with batch_size={size}")
        if size < self.fewest:
            compiled = f", or compile with batch_size={size}" if size else ""
            raise CompileError(
                f"{self._has(size)}, and the model is the same from {self.fewest} samples on; leave the last batch of "
                f"an epoch out (drop_last=True){compiled}"
            )

    def _has(self, size: int) -> str:
        return f"the batch has {size} samples, the program was compiled for {self.batch_size}"

    @property
    def world_size(self) -> int:
        return len(self.schedule.ranks)

    def program(self, rank: int) -> RankProgram:
        """A rank's program; KeyError where this process has not lowered it."""
        return {program.rank: program for program in self.programs}[rank]

    @property
    def channels(self) -> dict[Channel, int]:
        """The bytes that each carries in a step."""
        others = self.without.channels if self.without else {}
        return {**others, **Traffic(self.messages).channels}

    def drawn(self, seed: int, step: int) -> "StepPlan":
        """What runs at this step."""
        return self if self.without is None or conditioned(seed, step, self.probability) else self.without

    @property
    def returned(self) -> list[Output]:
        """The outputs that forward returns."""
        seen = {name for update in self.updates for name in update.seen}
        return [output for output in self.outputs if output.name not in seen]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups of ranks that sum gradients, or share parameters out."""
        return sorted({of.ranks for of in self.reductions} | {of.ranks for of in self.gatherings})

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks where they run programs of one step, lowered from the same cut of the same capture."""
        messages = (f"{message.edge} {message.channel} {message.action} {message}" for message in self.messages)
        text = [self.source, self.schedule.text(), *messages, *map(str, self.reductions), *map(str, self.gatherings)]
        if self.without is not None:
            text.append(f"{self.probability} {self.without.fingerprint}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


class FilledPlan(NamedTuple):
    """The forms of a step whose frozen work is done in the step before.

    `prologue` does the frozen work of the first batch, `steady` trains on a batch and does the frozen work of the next,
    `epilogue` trains on the last.
    """

    prologue: StepPlan
    steady: StepPlan
    epilogue: StepPlan
