"""Which checkpoint is loaded: the newest that all ranks find whole; and the same with no engine, on one device."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.run.saves.checkpoint import Checkpoint
from fxpipe.run.saves.folders import candidates
from fxpipe.run.saves.restoring import prepare
from fxpipe.run.saves.run import RandomState, Stateful, TrainingRun

T = TypeVar("T")
Everyones = Callable[[Any], list[Any]]
"""Collective: what every rank gave, on every rank."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded: its folder, how many steps were trained, and the plain values that were saved in `extra`."""

    folder: Path
    step_index: int
    extra: Mapping[str, Any]


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Stateful] | None = None,
) -> Loaded:
    """Load what `engine.save` has written, on any number of ranks, into a model on one device, without an engine.

    Arguments, what is restored and errors are those of `engine.load`; the random state is torch's on the CPU.
    """
    sections = sections_of(scheduler, extra) | {"random": RandomState(torch.device("cpu"))}
    return load(directory, TrainingRun(model, optimizer, sections), lambda mine: [mine])


def sections_of(scheduler: Any, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of a run, by name."""
    named = {f"extra.{name}": value for name, value in (extra or {}).items()}
    return named if scheduler is None else named | {"scheduler": scheduler}


def load(directory: str | Path, run: TrainingRun, everyones: Everyones) -> Loaded:
    """Collective: restore a run from the newest whole checkpoint."""
    checkpoint = _newest(Path(directory), run, everyones)
    put_back = on_all(everyones, lambda: prepare(run, checkpoint), f"{checkpoint.folder} was not loaded")
    values = put_back()
    extra = {name.removeprefix("extra."): value for name, value in values.items() if name.startswith("extra.")}
    return Loaded(checkpoint.folder, checkpoint.section("engine")["step_index"], extra)


def on_all(everyones: Everyones, make: Callable[[], T], what: str) -> T:
    """Collective: what `make` gives here. Where it fails on any rank all raise the same RunError, and can go on."""
    made, fault = None, ""
    try:
        made = make()
    except (RunError, OSError) as error:
        fault = str(error)
    faults = {rank: found for rank, found in enumerate(everyones(fault)) if found}
    if faults:
        raise RunError(f"{what}: " + "; ".join(f"rank {rank}: {found}" for rank, found in faults.items()))
    return cast(T, made)


def _newest(directory: Path, run: TrainingRun, everyones: Everyones) -> Checkpoint:
    said: list[str] = []
    found = on_all(everyones, lambda: candidates(directory) if run.rank == 0 else [], "nothing was loaded")
    for folder in everyones(found)[0]:
        checkpoint = Checkpoint(folder, run.rank, run.layout)
        faults = [fault for fault in everyones(_fault(checkpoint)) if fault]
        if not faults:
            if said and run.rank == 0:
                warnings.warn(f"loading {folder.name}, since {'; '.join(said)}", stacklevel=5)
            return checkpoint
        said.append(f"{folder.name} is not whole: {faults[0]}")
    raise RunError(
        f"nothing in {directory} can be loaded: {'; '.join(said)}; copy it again from where it is whole, see that all "
        "ranks see the same directory, or load another one"
    )


def _fault(checkpoint: Checkpoint) -> str:
    """What this rank finds wrong with it, if anything."""
    try:
        checkpoint.check()
    except RunError as error:
        return str(error)
    return ""
