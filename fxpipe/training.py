"""Training, as every engine offers it: steps over batches, with the next batch's frozen work in this one's idle time.

    for loss in engine.train(loader, optimizer): ...        reads one batch ahead
    loss = engine.step(batch, next_batch)                    the same by hand; adds to `.grad`

    batch 0 given     prologue: frozen work of 0
    step 0, next 1    steady: train on 0, frozen work of 1
    step 1, no next   epilogue: train on 1

What a step has made for the next one is used for that batch at that step only, and otherwise made again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fxpipe.capture.inputs import Batch, call_of
from fxpipe.step import FilledPlan, StepPlan

Tensors = Mapping[str, torch.Tensor]
_END = object()


class Optimizer(Protocol):
    """What `train` needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


@dataclass(frozen=True)
class _Carried:
    """Frozen work done for `tensors` at `step`; what it is, the engine knows."""

    step: int
    tensors: Tensors
    made: Any

    def serves(self, step: int, tensors: Tensors) -> bool:
        if step != self.step or tensors.keys() != self.tensors.keys():
            return False
        return all(t is self.tensors[n] or torch.equal(t, self.tensors[n]) for n, t in tensors.items())


class Training(ABC):
    """Steps and parameters. `seed` and `step_index` choose a step's random draws; set the index to resume."""

    parameters_by_name: Mapping[str, nn.Parameter]

    def __init__(self, plan: StepPlan, seed: int, filled: Callable[[], FilledPlan] | None) -> None:
        self._plan, self._make_filled = plan, filled
        self.seed, self.step_index = seed, 0
        self._filled: FilledPlan | None = None
        self._carried: _Carried | None = None
        self._read_ahead: dict[int, tuple[Iterator[Batch], Any]] = {}  # by the loader's iterator, which is kept alive

    def step(self, batch: Batch, next_batch: Batch | None = None) -> torch.Tensor:
        """One training step: returns the loss, a scalar, and adds the gradients to `.grad`.

        With `next_batch` its frozen work is done in this step's idle time, and the next step, on that batch, begins
        with its training.
        """
        tensors = self._bind(batch)
        nexts = None if next_batch is None else self._bind(next_batch)
        self._check(tensors, nexts)
        carried = self._carried if self._carried and self._carried.serves(self.step_index, tensors) else None
        if self._make_filled is None or (carried is None and nexts is None):
            loss, gradients, _ = self._execute(self._plan.drawn(self.seed, self.step_index), tensors, None, None)
        else:
            loss, gradients = self._filled_step(self._forms(), tensors, nexts, carried)
        assert loss is not None
        self.step_index += 1
        self._add_gradients(gradients)
        return loss

    def train(self, loader: Iterable[Batch], optimizer: Optimizer) -> Iterator[torch.Tensor]:
        """Train on every batch, one optimizer step each, and yield its loss.

        Reads one batch ahead. An exception of the loader is raised after the batch before it has been trained on. When
        the loop is left early, a further call with the same iterator begins with the batch that was read ahead.
        """
        batches = iter(loader)
        batch: Any = self._read_ahead.pop(id(batches), (None, _END))[1]
        if batch is _END:
            batch = next(batches, _END)
        while batch is not _END:
            failure: Exception | None = None
            try:
                following: Any = next(batches, _END)
            except Exception as error:
                following, failure = _END, error
            self._read_ahead = {id(batches): (batches, following)}
            loss = self.step(batch, None if following is _END else following)
            optimizer.step()
            optimizer.zero_grad()
            yield loss
            self._read_ahead.clear()
            if failure is not None:
                raise failure
            batch = following

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.parameters_by_name.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """For an optimizer: never empty, since optimizers refuse that; a rank without any gives one of size zero."""
        yield from self.parameters_by_name.values() or [nn.Parameter(torch.empty(0))]

    def _filled_step(
        self, forms: FilledPlan, tensors: Tensors, nexts: Tensors | None, carried: _Carried | None
    ) -> tuple[torch.Tensor | None, Mapping[str, torch.Tensor]]:
        now = self.step_index
        made = carried.made if carried else self._execute(forms.prologue, tensors, (now, tensors), None)[2]
        ahead = None if nexts is None else (now + 1, nexts)
        form = (forms.epilogue if ahead is None else forms.steady).drawn(self.seed, now)
        loss, gradients, following = self._execute(form, tensors, ahead, made)
        self._carried = None if nexts is None else _Carried(now + 1, nexts, following)
        return loss, gradients

    def _forms(self) -> FilledPlan:
        if self._filled is None:
            assert self._make_filled is not None
            self._filled = self._make_filled()
            self._prepare(self._filled)
        return self._filled

    def _bind(self, batch: Batch) -> Tensors:
        return self._plan.bind(*call_of(batch))

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.parameters_by_name[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @abstractmethod
    def _check(self, tensors: Tensors, nexts: Tensors | None) -> None:
        """Called before a step with what it will run on."""

    @abstractmethod
    def _prepare(self, forms: FilledPlan) -> None:
        """Called once before the first form runs."""

    @abstractmethod
    def _execute(
        self, plan: StepPlan, tensors: Tensors, ahead: tuple[int, Tensors] | None, carried: Any
    ) -> tuple[torch.Tensor | None, Mapping[str, torch.Tensor], Any]:
        """Run one form at this step: loss, gradients by shown name, and what is carried to the next step.

        `ahead` is the step and the tensors of the batch whose frozen work is done.
        """
