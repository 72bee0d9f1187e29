"""Training, as every engine offers it: steps over batches, with the next batch's frozen work in this one's idle time.

    for loss in engine.train(loader, optimizer): ...        reads one batch ahead
    loss = engine.step(batch, next_batch)                    the same by hand; adds to `.grad`

    batch 0 given     prologue: frozen work of 0
    step 0, next 1    steady: train on 0, frozen work of 1
    step 1, no next   epilogue: train on 1

What a step has made for the next one is used for that batch, step and seed only, and otherwise made again.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from fxpipe.capture.inputs import Batch
from fxpipe.errors import RunError
from fxpipe.plan.outputs import Parts
from fxpipe.plan.state_update import StateUpdate
from fxpipe.plan.step import FilledPlan, StepPlan
from fxpipe.plan.timeline import Timeline
from fxpipe.run.host_states import keep_on_host, put_back
from fxpipe.run.kinds import BatchKind, EngineKinds, Kinds
from fxpipe.run.live import Live
from fxpipe.run.loader import Loader
from fxpipe.run.marks import Marks, marks_of
from fxpipe.run.observe import Observe, Recording, both, shifted
from fxpipe.run.read_ahead import Inputs, ReadAhead, ReadBatch
from fxpipe.run.saves.engine_saves import EngineSaves
from fxpipe.run.scaler import EngineScaler, GradScaler
from fxpipe.run.state_updates import StateUpdates
from fxpipe.run.step_outputs import StepOutputs, put_together
from fxpipe.run.trained_model import TrainedModel, require_own
from fxpipe.run.unchanged import Unchanged

_log = logging.getLogger(__name__)

Ahead = tuple[int, Inputs]
"""The step and the tensors of the batch whose frozen work is done."""
Executed = tuple[torch.Tensor | None, Mapping[str, torch.Tensor], Any]
"""The loss, gradients by shown name, and what is carried to the next step."""

_WHEN_NOT_FINITE = (
    "weights are as they were before it; look at its batch, lower the learning rate, clip gradients (max_norm=1.0), or "
    "leave such steps out (nonfinite='skip')"
)


class Optimizer(Protocol):
    """What `train` needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


@dataclass(frozen=True)
class _Carried:
    """Frozen work done for `given` at `step` under `seed`, with weights as in `weights`; what it is, the engine knows.

    A step takes what it needs out of `made`: nothing can be served twice.
    """

    step: int
    seed: int
    weights: Marks
    given: ReadBatch
    made: Any


class Training(TrainedModel, EngineKinds, EngineSaves, EngineScaler, StepOutputs):
    """Steps and parameters. `seed` and `step_index` choose a step's random draws; set the index to resume."""

    def __init__(
        self,
        own: BatchKind,
        model: nn.Module,
        seed: int = 0,
        shown: Callable[[str], str] = str,
        observe: Observe | None = None,
        kinds: Kinds | None = None,
    ) -> None:
        plan = own.plan
        if plan.offloaded:
            keep_on_host(p for p in model.parameters() if p.requires_grad)
        self._kinds, self._kind, self._others = kinds, "" if kinds is None else kinds.first, {}
        self._plan, self._model, self._make_filled = plan, model, own.filled
        self._state = self._given = own.state  # those of a rank alone are fewer than those given
        self._make_smaller, self._smaller = own.smaller, dict[int, StepPlan]()  # by the number of samples
        self._shown, self._observe = shown, observe
        self.seed, self.step_index, self.device = seed, 0, plan.device
        self.num_samples, self.unchanged = 0, Unchanged(model)
        self.write_trace: Callable[[Timeline, str | Path, bool], object] | None = None  # beside the predicted step
        self.check_batches, self._closed = True, False
        self._loaders, self._positions = [], []
        self._modules: dict[int, Any] = {}  # by form: what runs it
        self._updates: dict[int, StateUpdates] = {}  # by form: what it writes into the model
        self._loss_scale: torch.Tensor | None = None
        self._filled: FilledPlan | None = None
        self._parts, self._returned = {}, plan.returned
        self._carried: _Carried | None = None
        self._loader_failure = None
        self._last_read: tuple[Any, ReadAhead] | None = None  # by which loader, and how far
        self._readers: dict[int, tuple[Iterator[Batch], ReadAhead]] = {}  # by the user's iterator, which is kept alive

    def step(self, batch: Batch, next_batch: Batch | None = None, scaler: GradScaler | None = None) -> torch.Tensor:
        """One training step: returns the loss, a scalar, and adds the gradients to `.grad`.

        A batch is the whole one, the same on every rank, or a `LocalBatch` of this rank's samples, as those of a
        `dataloader` are. It may have fewer samples than were compiled for; whole batches of other shapes have programs
        of their own, see `shapes` of `fxpipe.compile`. What forward returns beside the loss is in `outputs` and
        `gather_outputs`.

        With `next_batch` its frozen work is done in this step's idle time, and the next step, on that batch, begins
        with its training. Should that step be on another batch, or frozen weights be written to in between, it is done
        again (writes through `.data` are told by 16 entries of a tensor: use `step(batch)` where they change fewer).

        With `scaler`, of `engine.scaler()`, the gradients are those of `scaler.scale(loss)`.
        """
        self._require_open("step")
        self._scale_losses(scaler)
        return self._by_kind(self._bind(batch), None if next_batch is None else self._bind(next_batch))

    def train(
        self,
        loader: Iterable[Batch],
        optimizer: Optimizer,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        live: Live | None = None,
        nonfinite: Literal["raise", "skip", "train"] = "raise",
    ) -> Iterator[torch.Tensor]:
        """Train on every batch, one optimizer step each, and yield its loss. A mapping is one batch.

        Gradients are clipped to `max_norm` where it is given. The loop's body is the place to step a scheduler. With
        `scaler`, of `engine.scaler()`, losses are scaled, and steps whose gradients overflow on any rank left out.
        `live`, of `engine.live()`, is told of every step.

        Where the loss is no finite number, or the norm by which gradients are clipped, all ranks alike leave the
        optimizer's step out: they raise, or warn and go on with the next batch ("skip"). "train" asks nothing. With a
        scaler its own verdict counts alone.

        Reads one batch ahead. An exception of the loader is raised after the batches before it have been trained on.
        When the loop is left, a further call with the same iterator goes on with what was read ahead.

        Raises:
            CompileError: a batch does not fit the program; those before it have been trained on. Or the optimizer has
                none of the model's parameters.
            RunError: the loader has written into a batch that it gave, a loss is not finite, or a rank failed.
        """
        self._require_open("train")
        if nonfinite not in ("raise", "skip", "train"):
            raise RunError(f"nonfinite={nonfinite!r}; give 'raise', 'skip' or 'train'")
        require_own(optimizer, self._model, bool(self._trained_here()))
        try:
            batches = iter([loader] if isinstance(loader, Mapping) else loader)
        except TypeError as error:
            raise RunError(f"{error}: give batches, such as engine.dataloader(dataset), or one batch") from error
        reader = self._reader(loader, batches)
        self._last_read = loader, reader
        while (pair := self._read(reader)) is not None:
            self._scale_losses(scaler)
            self._loader_failure = reader.failure
            try:
                loss = self._by_kind(*pair)
            except RunError as error:
                if reader.failure is not None:
                    error.add_note(f"before that, this rank's loader raised {reader.failure!r}")
                raise
            reader.trained()
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = None if max_norm is None else self.clip_grad_norm_(max_norm)
            fault = "" if scaler is not None or nonfinite == "train" else _not_finite(loss, norm)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif not fault:
                optimizer.step()
            optimizer.zero_grad()
            if fault and nonfinite == "raise":
                raise RunError(f"step {self.step_index - 1}: {fault}; {_WHEN_NOT_FINITE}")
            if fault and self.rank == 0:
                _log.warning("step %d: %s; the optimizer's step is left out", self.step_index - 1, fault)
            if live is not None:
                live(loss)
            yield loss
        self._readers.pop(id(batches), None)

    def live(self, total: int | None = None, every: int = 10) -> Live:
        """How the run goes, on rank 0: step, loss, samples per second, seconds of a step beside the predicted ones,
        bytes sent and memory, on a terminal as a line that is kept up to date, else a line every so many steps.

            with engine.live(total=200) as live:
                for loss in engine.train(loader, optimizer, live=live): ...      by hand: live(engine.step(batch))
        """
        return Live(self, total, every)

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Write the steps made inside, as they run, beside the predicted one, as a Chrome trace, for Perfetto.

        Every rank calls it; rank 0 writes the events of all. The first step of an engine also makes what it runs: trace
        a later one. Clocks of ranks are set against each other when it begins.
        """
        self._require_open("trace")
        engines: list[Any] = [self, *self._others.values()]
        before, recording = [engine._observe for engine in engines], Recording()
        self._everyones(None)
        start = time.perf_counter()
        for engine, observe in zip(engines, before, strict=True):
            engine._observe = recording if observe is None else both(recording, observe)
        try:
            yield
        finally:
            for engine, observe in zip(engines, before, strict=True):
                engine._observe = observe
        mine = [shifted(event, -start) for event in recording.events]
        events = [event for of_rank in self._everyones(mine) for event in of_rank]
        if self._is_first():
            assert self.write_trace is not None, "an engine of a program knows what is predicted"
            is_ahead = any("[" in event.action for event in events)  # pieces of the next batch's frozen work
            self.write_trace(Recording(events).timeline(), path, is_ahead)

    def close(self) -> None:
        """Leave the network; every rank calls it when it is done. What is trained stays in the model.

        Raises:
            RunError: the last asynchronous save was not written.
        """
        self._closed = True
        put_back(self._model.parameters())
        self._finish_alone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RunError("an engine runs one model in one process, and is neither copied nor pickled: copy the model")

    def _read(self, reader: ReadAhead) -> tuple[ReadBatch, ReadBatch | None] | None:
        """The next batch and the one after it; None at the end."""
        return reader.pair()

    def _reader(self, loader: Iterable[Batch], batches: Iterator[Batch]) -> ReadAhead:
        if batches is not loader:  # nobody else has this iterator, so nobody can go on with it
            return ReadAhead(batches, self._bind)
        return self._readers.setdefault(id(batches), (batches, ReadAhead(batches, self._bind)))[1]

    def _step(self, batch: ReadBatch, following: ReadBatch | None) -> torch.Tensor:
        if torch.is_autocast_enabled(self.device.type):
            raise RunError(
                "a step under torch.autocast: its programs compute in the types that they were compiled in; compile "
                "with precision='bf16' or 'fp16', or with the autocast in the model's forward, and step outside of it"
            )
        self.unchanged.require()
        if following is not None and min(batch.size, following.size) < self._plan.batch_size:
            following = None  # frozen work is done a step early for whole batches alone, and beside those
        carried, self._carried, self._parts = self._carried, None, {}
        weights = self._weights() if carried else None
        made = carried.made if carried and self._serves(carried, batch, weights) else None
        made = made if self._check(batch, following, made is not None) else None
        plan = self._of_size(batch.size)
        self._write_state(plan, is_first=True)
        self._bring_values(plan)
        if self._make_filled is None or (made is None and following is None):
            now = self.step_index
            loss, gradients, _ = self._execute(plan.drawn(self.seed, now), now, batch.given)
        else:
            loss, gradients, _ = self._filled_step(self._forms(), batch, following, made, weights)
        assert loss is not None
        self._write_state(plan, is_first=False)
        self.step_index += 1
        self._add_gradients(gradients, plan)
        if batch.part is not None and batch.part.trained is not None:
            batch.part.trained()
        return loss

    def _filled_step(
        self, forms: FilledPlan, batch: ReadBatch, following: ReadBatch | None, made: Any, weights: Marks | None
    ) -> Executed:
        now = self.step_index
        if made is None:
            *_, made = self._execute(forms.prologue, now, batch.given, (now, batch.given))
        if following is None:
            return self._execute(forms.epilogue.drawn(self.seed, now), now, batch.given, None, made)
        steady = forms.steady.drawn(self.seed, now)
        done = self._execute(steady, now, batch.given, (now + 1, following.given), made)
        self._carried = _Carried(now + 1, self.seed, weights or self._weights(), following, done[2])
        return done

    def _serves(self, carried: _Carried, batch: ReadBatch, weights: Marks | None) -> bool:
        now = self.step_index, self.seed, weights
        return (carried.step, carried.seed, carried.weights) == now and carried.given.equals(batch)

    def _weights(self) -> Marks:
        """The frozen weights as they are."""
        names = {name for program in self._forms().prologue.programs for name in program.state}
        return marks_of(self._state[name] for name in sorted(names & self._state.keys()))

    def _forms(self) -> FilledPlan:
        if self._filled is None:
            assert self._make_filled is not None
            self._filled = self._make_filled()
            self._prepare(self._filled)
        return self._filled

    def _of_size(self, size: int) -> StepPlan:
        """The step of a batch of that size, made when the first one comes."""
        if size == self._plan.batch_size:
            return self._plan
        if size not in self._smaller:
            if self._make_smaller is None:
                raise RunError(f"a batch of {size} samples: this engine has programs of {self._plan.batch_size} alone")
            if self.rank == 0:
                _log.warning("a batch of %d samples, of %d: making its program", size, self._plan.batch_size)
            self._smaller[size] = self._make_smaller(size)
            self._prepare((self._smaller[size],))
        return self._smaller[size]

    def _is_ahead(self, loader: object) -> bool:
        known = isinstance(loader, Loader)  # whose position is behind what was trained on
        ahead = self._last_read is not None and self._last_read[0] is loader and self._last_read[1].is_ahead
        return ahead and not known

    def _forget_batches(self) -> None:
        for engine in (self, *self._others.values()):
            engine._carried = None
        self._last_read = None
        self._readers.clear()

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor], plan: StepPlan) -> None:
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient.stride() == parameter.stride():
                parameter.grad = gradient
            else:  # in memory as the parameter is, which fused optimizers take for granted
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def _check(self, batch: ReadBatch, following: ReadBatch | None, has_made: bool) -> bool:
        """Called before a step with what it will run on, and whether its frozen work is done already; whether it is so
        on all ranks."""
        return has_made

    def _updates_of(self, plan: StepPlan) -> StateUpdates:
        if id(plan) not in self._updates:
            self._updates[id(plan)] = StateUpdates(plan.updates, self._given)
        return self._updates[id(plan)]

    def _write_state(self, plan: StepPlan, is_first: bool) -> None:
        """Called before and after a step: write what forward writes."""
        updates = [update for update in plan.updates if update.is_first == is_first]
        self._updates_of(plan).write(updates, self._seen(plan, updates))

    def _seen(self, plan: StepPlan, updates: Sequence[StateUpdate]) -> Mapping[str, torch.Tensor]:
        """What the step that was made has seen, for updates after it; nothing else is made of it."""
        names = {name for update in updates for name in update.seen}
        parts = self._everywhere({key: part for key, part in self._parts.items() if key[0] in names}) if names else {}
        self._parts = {key: part for key, part in self._parts.items() if key[0] not in names}
        return put_together([output for output in plan.outputs if output.name in names], parts)

    def _everywhere(self, parts: Parts) -> Parts:
        """What ranks have made, on all of them."""
        return parts

    def _bring_values(self, plan: StepPlan) -> None:
        """Called before a program runs: of what others have trained, it needs today's values."""

    def _prepare(self, forms: Sequence[StepPlan]) -> None:
        """Called once before the first of them runs."""

    @abstractmethod
    def _execute(
        self, plan: StepPlan, step: int, tensors: Inputs, ahead: Ahead | None = None, carried: Any = None
    ) -> Executed:
        """Run one form at a step; it empties `carried`, and leaves what the step returns in `_parts`."""


def _not_finite(loss: torch.Tensor, norm: torch.Tensor | None) -> str:
    """What of these is no finite number, in words; they are one on all ranks."""
    named = {"the loss": loss, "the norm of the gradients": norm}
    bad = (f"{name} is {float(one)}" for name, one in named.items() if one is not None and not one.isfinite())
    return next(bad, "")
