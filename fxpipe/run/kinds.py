"""Batches of several shapes, which have programs of their own; engines take the one for each batch.

engine        x [8, 4, 32, 32]     steps 0, 1, 3: its own, of 8 samples or fewer
  others      x [8, 4, 32, 48]     step 2: another engine of the same model, on the same transport
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.capture.inputs import Batch, call_of
from fxpipe.plan.step import FilledPlan, StepPlan
from fxpipe.run.accumulation import last_optimizer_step
from fxpipe.run.engine_data import EngineData
from fxpipe.run.local_batch import LocalBatch, bound
from fxpipe.run.read_ahead import ReadBatch
from fxpipe.run.unchanged import Unchanged


@dataclass(frozen=True)
class BatchKind:
    """What an engine runs for a kind of batches: its programs, the model's state as they name it, its filled forms, and
    what makes the programs of fewer samples."""

    plan: StepPlan
    state: Mapping[str, torch.Tensor]
    filled: Callable[[], FilledPlan] | None = None
    smaller: Callable[[int], StepPlan] | None = None


@dataclass(frozen=True)
class Kinds:
    """`key` tells a call's kind as a text, `first` is that of the engine's own batches; `made` gives a call's programs,
    compiled if need be: all ranks ask."""

    first: str
    key: Callable[[Sequence[Any], Mapping[str, Any]], str]
    made: Callable[[Sequence[Any], Mapping[str, Any]], BatchKind]


class EngineKinds(EngineData, ABC):
    """`_kind` is that of this engine's own batches, `_others` the engines of others."""

    _kinds: Kinds | None
    _kind: str
    _others: "dict[str, EngineKinds]"
    unchanged: Unchanged
    _carried: Any  # what its last step has made for the next one

    def _bind(self, batch: Batch) -> ReadBatch:
        """A batch for the engine of its kind. A `LocalBatch` is of the first one: a rank may have no values of it."""
        engine = self if isinstance(batch, LocalBatch) else self._engine_for(*call_of(batch))
        return replace(bound(engine._plan, batch, self.samples, self.device), kind=engine._kind)

    def _by_kind(self, batch: ReadBatch, following: ReadBatch | None) -> torch.Tensor:
        """A step of the engine for such batches; the next one's frozen work is done where it is of the same kind."""
        engine = self._others.get(batch.kind, self)
        if self._others and not self.check_batches:
            self._alike("step", {"shape of the batch": batch.kind})
        if following is not None and following.kind != batch.kind:
            following = None
        for other in (self, *self._others.values()):
            if other is not engine:
                other._carried = None
        engine.seed, engine.step_index, engine.check_batches = self.seed, self.step_index, self.check_batches
        engine._loss_scale, engine._loader_failure, self._parts = self._loss_scale, self._loader_failure, {}
        loss = engine._step(batch, following)
        parts, engine._parts = engine._parts, {}
        self.num_samples += batch.size
        self._added_after = last_optimizer_step()
        self.step_index, self._parts, self._returned = engine.step_index, parts, engine._of_size(batch.size).returned
        return loss

    def _engine_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "EngineKinds":
        """This one, or another for batches of that kind, which all ranks make together."""
        if self._kinds is None:
            return self
        kind = self._kinds.key(args, kwargs)
        if kind == self._kind:
            return self
        if kind not in self._others:
            self._alike("step", {"shape of the batch": kind})
            other = self._others[kind] = self._another(self._kinds.made(args, kwargs))
            other._kind, other.unchanged = kind, self.unchanged
        return self._others[kind]

    @abstractmethod
    def _step(self, batch: ReadBatch, following: ReadBatch | None) -> torch.Tensor:
        """A step on a batch of this engine's kind."""

    @abstractmethod
    def _of_size(self, size: int) -> StepPlan:
        """The step of a batch of that size."""

    @abstractmethod
    def _another(self, kind: BatchKind) -> "EngineKinds":
        """An engine over the same model for batches of another kind."""
