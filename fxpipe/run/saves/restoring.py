"""Puts a checkpoint back into a run, whatever layout it is of: each rank reads what it has, by name."""

from collections.abc import Callable
from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.run.host_states import states_on_host
from fxpipe.run.ownership import is_empty, renew
from fxpipe.run.saves.checkpoint import Checkpoint
from fxpipe.run.saves.optimizers import load_state, saved_state
from fxpipe.run.saves.parts import tensor_sum
from fxpipe.run.saves.run import Progress, Stateful, TrainingRun, named_state


def prepare(run: TrainingRun, checkpoint: Checkpoint) -> Callable[[], dict[str, Any]]:
    """What puts it into the model, the optimizer and the sections that the run has, and returns the plain values.

    Raises:
        RunError: the run is another one than was saved; nothing has been changed.
    """
    saved = checkpoint.own.body["sections"]
    absent = [name for name in run.sections if name not in saved]
    if absent:
        raise RunError(f"{', '.join(absent)} was not saved; in the checkpoint are {', '.join(saved)}")
    for name, value in run.sections.items():
        if not (saved[name]["type"] and isinstance(value, Stateful)):
            raise RunError(f"{name} was saved, or is given, as a plain value: those are in what load returns")
        if name == "scheduler" and type(value).__name__ != saved[name]["type"]:
            raise RunError(f"the scheduler is a {type(value).__name__}, and a {saved[name]['type']} was saved")
    _require_fitting(run, checkpoint)
    states = {name: saved_state(run, name, optimizer, checkpoint) for name, optimizer in run.optimizers.items()}
    values = {name: checkpoint.section(name) for name, of in saved.items() if name in run.sections or not of["type"]}
    for name, value in run.sections.items():
        if isinstance(value, Progress):
            value.require(values[name])

    def put_back() -> dict[str, Any]:
        for name, optimizer in run.optimizers.items():
            with states_on_host(optimizer):
                load_state(optimizer, states[name])
        _restore_model(run, checkpoint)
        for name, value in run.sections.items():
            value.load_state_dict(values.pop(name))
        return values

    return put_back


def _require_fitting(run: TrainingRun, checkpoint: Checkpoint) -> None:
    """The model has the tensors that were saved, and frozen ones that were not are the same as then."""
    state = named_state(run.model)
    saved = _saved_names(checkpoint)
    frozen = {name: found for part in checkpoint.parts for name, found in part.body["frozen"].items()}
    more, fewer = (saved | frozen.keys()) - state.keys(), state.keys() - saved - frozen.keys()
    for names, what in (more, "not in the model"), (fewer, "not in the checkpoint"):
        if names:
            raise RunError(f"{len(names)} tensors ({min(names)}, ...) are {what}: load into the model that was saved")
    for name, tensor in state.items():
        if name in frozen and not is_empty(tensor) and frozen[name] != tensor_sum(tensor):
            raise RunError(f"{name} is frozen, was not saved, and is not what it was then: load the same base model")
        if name in saved:
            dtype, *sizes, _ = checkpoint.by_key[f"model.{name}"].sums[f"model.{name}"]
            if (dtype, sizes) != (str(tensor.dtype), [*tensor.shape]):
                raise RunError(f"{name} is {list(tensor.shape)} {tensor.dtype}, and was saved as {sizes} {dtype}")


def _restore_model(run: TrainingRun, checkpoint: Checkpoint) -> None:
    state = named_state(run.model)
    for parameter in run.model.parameters():
        parameter.grad = None  # of batches that this run was not trained on
    with torch.no_grad():
        for name in _saved_names(checkpoint):
            if not is_empty(state[name]):  # which its owner reads
                state[name].copy_(checkpoint.read(f"model.{name}"))
    renew(parameter for parameter in run.model.parameters() if not is_empty(parameter))


def _saved_names(checkpoint: Checkpoint) -> set[str]:
    return {key.removeprefix("model.") for key in checkpoint.by_key if key.startswith("model.")}
