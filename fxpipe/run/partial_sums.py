"""What torch computes over all gradients at once, on a rank that has a part of them: refused, not left wrong.

rank 0   clip_grad_norm_(model.parameters(), 1.0)     the norm of this rank's gradients: another factor on every rank
rank 1   LBFGS(model.parameters()).step(closure)      products of this rank's gradients
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.capture import private
from fxpipe.errors import RunError

_in_parts = WeakTensorKeyDictionary()  # parameters of models of which other ranks train some
_watched: list[Any] = []
_WHOLE = "or compile with data_parallel= as many as ranks and shard='none', where every rank has all gradients"


def trained_in_parts(parameters: Iterable[torch.Tensor]) -> None:
    """Of these, not all have their gradient in this process."""
    for parameter in parameters:
        _in_parts[parameter] = True
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_refuse_optimizer))
        private.on_clipping(_refuse_clipping)


def _refuse_clipping(parameters: Iterable[torch.Tensor]) -> None:
    if any(parameter in _in_parts for parameter in parameters):
        raise RunError(
            "torch.nn.utils.clip_grad_norm_ would clip by the norm of the gradients on this rank, where other ranks "
            f"have others; call engine.clip_grad_norm_ on every rank, {_WHOLE}"
        )


def _refuse_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and any(p in _in_parts for p in optimizer.param_groups[0]["params"]):
        raise RunError(
            "LBFGS computes with all gradients at once, of which other ranks have others; take an optimizer that "
            f"updates every parameter by itself, {_WHOLE}"
        )
