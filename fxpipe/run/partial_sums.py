"""What torch computes over all gradients at once, on a rank that has a part of them: refused, not left wrong.

rank 0   clip_grad_norm_(model.parameters(), 1.0)     the norm of this rank's gradients: another factor on every rank
rank 0   get_total_norm(gradients)                    likewise
rank 1   LBFGS(model.parameters()).step(closure)      products of this rank's gradients
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.capture import private
from fxpipe.errors import RunError

_in_parts = WeakTensorKeyDictionary()  # parameter -> references to those of its model that other ranks train
_watched: list[Any] = []
_WHOLE = "or compile with data_parallel= as many as ranks and shard='none', where every rank has all gradients"


def trained_in_parts(parameters: Iterable[torch.Tensor], elsewhere: Iterable[torch.Tensor]) -> None:
    """Of these parameters of a model, some have their gradient elsewhere."""
    others = [weakref.ref(parameter) for parameter in elsewhere]
    for parameter in parameters:
        _in_parts[parameter] = others
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_refuse_optimizer))
        private.on_clipping(_refuse_clipping, _refuse_norm)


def _has_part(parameter: torch.Tensor) -> bool:
    """Whether gradients are elsewhere, too: all are here where the model was trained without an engine since."""
    others = [of() for of in _in_parts.get(parameter, ())]
    return bool(others) and all(other is None or other.grad is None for other in others)


def _refuse_clipping(parameters: Iterable[torch.Tensor]) -> None:
    if any(map(_has_part, parameters)):
        raise RunError(
            "torch.nn.utils.clip_grad_norm_ would clip by the norm of the gradients on this rank, where other ranks "
            f"have others; call engine.clip_grad_norm_ on every rank, {_WHOLE}"
        )


def _refuse_norm(tensors: Iterable[torch.Tensor]) -> None:
    given = {id(tensor) for tensor in tensors}
    if any(id(parameter.grad) in given and _has_part(parameter) for parameter in _in_parts):
        raise RunError(
            "torch.nn.utils would take the norm of the gradients on this rank, where other ranks have others; call "
            "engine.clip_grad_norm_ on every rank, which returns that of all (with max_norm=math.inf it clips none), "
            f"{_WHOLE}"
        )


def _refuse_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, torch.optim.LBFGS) and any(map(_has_part, given)):
        raise RunError(
            "LBFGS computes with all gradients at once, of which other ranks have others; take an optimizer that "
            f"updates every parameter by itself, {_WHOLE}"
        )
