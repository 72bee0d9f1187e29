"""One step of one rank: its program, run on a transport with the step's random draws."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.plan.outputs import Parts
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.step import StepPlan
from fxpipe.plan.transport import Transport
from fxpipe.run.accumulation import WithValues
from fxpipe.run.observe import Observe, Observed
from fxpipe.run.read_ahead import Inputs


@dataclass(frozen=True)
class NextBatch:
    """What a rank that works ahead is given beside its own batch: the next batch's random draws and tensors."""

    random: Callable[[int], torch.Tensor]
    tensors: Inputs


@dataclass(frozen=True)
class RankResult:
    """The loss of the whole batch (None in a prologue), this rank's gradients, what it made for the next step, and what
    the step returns beside the loss."""

    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    carries: dict[str, torch.Tensor]
    outputs: Parts = field(default_factory=dict)


def run_rank(
    module: nn.Module,
    program: RankProgram,
    transport: Transport,
    random: Callable[[int], torch.Tensor],
    tensors: Inputs,
    observe: Observe | None = None,
    ahead: NextBatch | None = None,
    carried: dict[str, torch.Tensor] | None = None,
    loss_scale: torch.Tensor | None = None,
    has_values: bool = False,
) -> RankResult:
    """One step of one rank; it empties `carried`, what this batch's frozen work has made.

    Where every replica `has_values` of what others train, none are brought.

    Gradients are those of `loss_scale` times the loss, where the program has a place for it.
    """
    if observe is not None:
        transport = Observed(transport, observe)
    if has_values:
        transport = WithValues(transport)
    arguments: list[Any] = [transport, random, *(tensors[name] for name in program.inputs)]
    if program.works_ahead:
        assert ahead is not None
        arguments += [ahead.random, *(ahead.tensors[name] for name in program.next_inputs)]
    if program.carried:
        if carried is None:
            raise RunError("a step on frozen work that no step before it has done; begin with the prologue")
        arguments.append(carried)
    if program.scaled:
        arguments.append(loss_scale)
    with torch.no_grad():
        loss, gradients, *rest = module(*arguments)
    transport.flush()
    carries = dict(zip(program.carries, rest.pop(0), strict=True)) if program.works_ahead else {}
    outputs = dict(zip(program.outputs, rest[0], strict=True)) if rest else {}
    return RankResult(loss, dict(zip(program.gradients, gradients, strict=True)), carries, outputs)


class Draws:
    """The random draws of one step, made when a rank asks, which it does once for each."""

    def __init__(self, plan: StepPlan, seed: int, step: int, device: torch.device) -> None:
        self._plan, self._seed, self._step, self._device = plan, seed, step, device

    def __call__(self, index: int) -> torch.Tensor:
        return self._plan.draws[index].sample(self._plan.batch_size, self._seed, self._step, self._device)


class SharedDraws(Draws):
    """The same, each made once for all ranks of the process, and kept for them."""

    def __init__(self, plan: StepPlan, seed: int, step: int, device: torch.device) -> None:
        super().__init__(plan, seed, step, device)
        self._made: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __call__(self, index: int) -> torch.Tensor:
        with self._lock:
            if index not in self._made:
                self._made[index] = super().__call__(index)
            return self._made[index]
