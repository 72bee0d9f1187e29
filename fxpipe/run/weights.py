"""A model without memory, whose ranks read what they hold, and nothing else, from files.

    model on the meta device   ->   parameters that have a shape here, and no memory   ->   those of this rank, read

Weights are found by the model's names, in checkpoints of `engine.save` and in safetensors files, as diffusers and
transformers save them; no file is read whole.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError
from fxpipe.run.ownership import empty, fill, is_empty, owners
from fxpipe.run.saves.checkpoint import Checkpoint
from fxpipe.run.saves.folders import checkpoints

Weights = Mapping[str, Any] | str | Path
"""Tensors by name; a checkpoint, a safetensors file or a folder of such; or these by the beginning of names."""
Readers = Mapping[str, Callable[[], torch.Tensor]]

_left = WeakTensorKeyDictionary()  # parameters on the meta device that models have no more


def readers(given: Weights) -> Readers:
    """What reads each tensor, by its name.

    Raises:
        RunError: a file is not there, or cannot be read, or several have a tensor of the same name.
    """
    if not isinstance(given, Mapping):
        return _of_path(Path(given))
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            found[name] = partial(torch.Tensor.detach, value)
        elif isinstance(value, str | Path):
            found |= {f"{name}.{key}": read for key, read in _of_path(Path(value)).items()}
        else:
            raise RunError(f"weights[{name!r}] is a {type(value).__name__}: give a tensor, or the path of a file")
    return found


def _of_path(path: Path) -> Readers:
    steps = [path] if any(path.glob("rank-*-of-*.safetensors")) else checkpoints(path)
    if steps:
        parts = Checkpoint(steps[0], 0, {}).by_key.items()
        return {key.removeprefix("model."): partial(of.tensor, key) for key, of in parts if key.startswith("model.")}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise RunError(f"{path} has no safetensors file and no checkpoint of engine.save")
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for file in files:
        try:
            opened = safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        for key in opened.keys():  # type: ignore[no-untyped-call]
            if key in found:
                raise RunError(f"{key} is in several files of {path}, also in {file.name}: give the file that is meant")
            found[key] = partial(opened.get_tensor, key)
    return found


def without_memory(model: nn.Module, given: Readers, device: torch.device) -> None:
    """Give a model on the meta device parameters that have no memory, and its buffers.

    Optimizers over the parameters that it had are refused when they step: they would train nothing.

    Raises:
        RunError: a buffer has no value, or all parameters have theirs already.
    """
    if not any(p.is_meta or is_empty(p) or owners(p) for p in model.parameters()):
        raise RunError(
            "weights= is for a model on the meta device, and this one has its weights, which would stay as they are; "
            "make it under torch.device('meta'), or load them with load_state_dict"
        )
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    lacking = [name for name in buffers if name not in given]
    if lacking:
        raise RunError(
            f"{len(lacking)} buffers are on the meta device and not among the weights ({lacking[0]}, ...): they are in "
            "no file, as position ids; put them into the model, or give them by their names in weights="
        )
    for name, buffer in buffers.items():
        path, _, last = name.rpartition(".")
        value = _fitting(name, given[name](), buffer).to(device, buffer.dtype)
        model.get_submodule(path)._buffers[last] = value
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                if old not in made:
                    shape = torch.empty((), dtype=old.dtype, device=device).expand(old.shape)
                    made[old], _left[old] = nn.Parameter(shape, old.requires_grad), True
                module._parameters[name] = made[old]
    empty(made.values())
    if made and not _left_is_watched:
        _left_is_watched.append(register_optimizer_step_pre_hook(_require_own))


_left_is_watched: list[Any] = []


def _require_own(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if any(p in _left for group in optimizer.param_groups for p in group["params"]):
        raise RunError(
            "the optimizer has parameters on the meta device, in whose place the model has others since "
            "program.engine(weights=...): make it after the engine"
        )


def read_own(model: nn.Module, given: Readers, is_own: Callable[[nn.Parameter], bool]) -> None:
    """Give memory to the parameters that are this rank's, and their values.

    Raises:
        RunError: one is not among the weights, or of another shape there.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_empty(parameter) and is_own(parameter):
            names.setdefault(parameter, []).append(name)
    lacking = [of[0] for of in names.values() if not any(name in given for name in of)]
    if lacking:
        raise RunError(f"{len(lacking)} parameters ({lacking[0]}, ...) are not among the weights that were given")
    for parameter, of in names.items():
        name = next(name for name in of if name in given)
        value = _fitting(name, given[name](), parameter)
        fill(parameter)
        with torch.no_grad():
            parameter.copy_(value)


def _fitting(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if value.shape != like.shape:
        raise RunError(f"{name} is {list(like.shape)}, and {list(value.shape)} among the weights: of another model")
    return value
