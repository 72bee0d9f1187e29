"""Saving and loading a run, as every engine offers them.

engine.save("run", optimizer, scheduler=scheduler)         run/step-200     each rank writes what it trains
engine.load("run", optimizer, scheduler=scheduler)         the newest that is whole, into any layout
"""

import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.run.accumulation import last_optimizer_step
from fxpipe.run.engine_base import EngineBase
from fxpipe.run.optimizer_steps import tell_parts
from fxpipe.run.saves import folders
from fxpipe.run.saves.base import NO_BASE, Base
from fxpipe.run.saves.choice import Loaded, load, on_all, sections_of
from fxpipe.run.saves.contents import contents
from fxpipe.run.saves.parts import part_name, write_part
from fxpipe.run.saves.run import Progress, RandomState, Stateful, TrainingRun
from fxpipe.run.saves.writing import Writing, not_written


class EngineSaves(EngineBase):
    """What a run needs to survive."""

    base: Base = NO_BASE
    _writing: Writing | None = None

    def save(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int = 3,
        trainable_only: bool = False,
        asynchronous: bool = False,
    ) -> Path:
        """Collective: write the run to `directory/step-N`, where all ranks see it; returns that folder.

        Saved are the model's parameters and buffers, the optimizer's state by the names of parameters, seed and step
        index, torch's random state of every rank, and what is given. Gradients are not: save after `optimizer.step()`.
        Within `train` a loader, and what it draws of that random state, is a batch ahead.
        The folder has its name once all of it is on the disk; whatever ends a run before leaves those that were there.

        Args:
            directory: of one run: the last `keep` checkpoints stay in it, and those of later steps are set aside.
            extra: values, or objects with `state_dict` and `load_state_dict`, by name, such as averages of weights,
                further optimizers, a loader that knows its position, and other engines over the same model, for their
                seed and step index. Tensors by a parameter's name are taken where it is trained.
            trainable_only: leave frozen weights and buffers out that nobody has written to since the engine was made;
                they must be the same when it is loaded.
            asynchronous: copy to the CPU, then write while training goes on. The next `save` or `close` waits for it,
                and raises what went wrong.

        Raises:
            RunError: something cannot be saved, or was not written on some rank. Nothing else has changed: training
                can go on, and the last complete checkpoint is loaded as before.
        """
        self._require_open("save")
        _require_named(directory, scheduler, extra)
        if keep < 1:
            raise RunError(f"keep={keep}: at least the checkpoint itself is kept, 1")
        for ahead in [name for name, value in (extra or {}).items() if self._is_ahead(value)]:
            raise RunError(
                f"extra[{ahead!r}] was read a batch ahead by engine.train, and would be taken up behind that batch: "
                "call engine.step in a loop over it, or leave it out and skip the first step_index batches after load"
            )
        self._finish()
        folder = Path(directory).resolve()
        self._alike("save", {
            "directory": str(folder), "step index or seed": (self.step_index, self.seed),
            "names in extra": sorted(extra or ()),
            "other argument": (optimizer is None, scheduler is None, keep, trainable_only, asynchronous),
        })  # fmt: skip
        if any(self._everyones(self._accumulates())) and self._is_first():
            warnings.warn(
                "gradients that no optimizer has used are not saved, and a run that is taken up here goes on without "
                "them: save after optimizer.step()",
                stacklevel=2,
            )
        run = self._run(optimizer, scheduler, extra)
        name = f"step-{self.step_index}"
        tensors, body = on_all(self._everyones, lambda: contents(run, trainable_only), f"{name} was not saved")
        made = on_all(self._everyones, lambda: self._begin(folder), not_written(name))
        into = self._everyones(made)[0]
        if asynchronous:
            tensors = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        path = into / part_name(run.rank, run.num_ranks)

        def write() -> None:
            write_part(path, tensors, body | {"save": into.name})
            folders.complete(into, run.num_ranks, keep)

        self._writing = Writing(into, write, asynchronous)
        if not asynchronous:
            self._finish()
        return folders.final(into)

    def load(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Loaded:
        """Collective: go on with a run that any engine has saved, on as many ranks, of any layout.

        The newest checkpoint of the directory that is whole is loaded, with a warning where a newer one is not; or give
        the folder of one. Gradients are None after it. In the same layout the run goes on to the same bits (up to
        rounding where frozen work had been done ahead, and is done again). In another one ranks take rank 0's random
        state, and its values in `extra`, which must then have been the same everywhere.

        Returns:
            The folder, the step index, and what was given to `save` in `extra` as plain values.

        Raises:
            RunError: none is whole; or model, optimizer or `extra` are others than those that were saved. Nothing has
                been changed then, on any rank.
        """
        self._require_open("load")
        _require_named(directory, scheduler, extra)
        self._finish()
        folder = Path(directory).resolve()
        self._alike("load", {
            "directory": str(folder), "names in extra": sorted(extra or ()),
            "other argument": (optimizer is None, scheduler is None),
        })  # fmt: skip
        loaded = load(folder, self._run(optimizer, scheduler, extra), self._everyones)
        self._forget_batches()
        return loaded

    def _accumulates(self) -> bool:
        """Whether there are gradients here that no optimizer has stepped by."""
        gradients = (parameter.grad for parameter in self._model.parameters())
        return self._added_after == last_optimizer_step() and any(g is not None and bool(g.any()) for g in gradients)

    def _begin(self, directory: Path) -> Path:
        return folders.begin(directory, self.step_index) if self.rank == 0 else directory

    def _run(
        self, optimizer: torch.optim.Optimizer | None, scheduler: Any, extra: Mapping[str, Any] | None
    ) -> TrainingRun:
        others = {name: Progress(of) if isinstance(of, EngineSaves) else of for name, of in (extra or {}).items()}
        own = {"engine": Progress(self), "random": RandomState(self.device)}
        run = TrainingRun(
            self._model, optimizer, own | sections_of(scheduler, others), self.rank, self._num_writers, self._owners,
            self.base,
        )  # fmt: skip
        for one in run.optimizers.values():
            tell_parts(one, self.rank)
        return run

    def _finish(self) -> None:
        """Collective: the last save is complete, on all ranks."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            on_all(self._everyones, writing.require, not_written(folders.final(writing.folder).name))
        except RunError:
            if self.rank == 0:
                folders.discard(writing.folder)
            raise

    def _finish_alone(self) -> None:
        """What this rank was writing has ended; RunError where it has not been written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            on_all(lambda fault: [fault], writing.require, not_written(folders.final(writing.folder).name))

    @abstractmethod
    def _is_ahead(self, loader: object) -> bool:
        """Whether a loader has given batches that have not been trained on."""

    @abstractmethod
    def _forget_batches(self) -> None:
        """What was read or made ahead belongs to another run."""


def _require_named(directory: object, scheduler: object, extra: object) -> None:
    if not isinstance(directory, str | os.PathLike):
        raise RunError(f"directory is {directory!r}; give the path of the run's folder")
    if not isinstance(scheduler, Stateful | None):
        raise RunError(f"scheduler is {scheduler!r}; give one of torch.optim.lr_scheduler, or what has a state_dict")
    if not isinstance(extra, Mapping | None):
        raise RunError(f"extra is {extra!r}; give a dict of what is saved besides, by names of your own")
