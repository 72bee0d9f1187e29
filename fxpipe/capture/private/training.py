"""Of training: scalers, clipping, gradient hooks and torch's compiler."""

import sys
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.amp.grad_scaler import OptState


def uncompiled(part: Any) -> Any:
    """The module that `torch.compile` was given, where this is what it has made of it."""
    return getattr(part, "_orig_mod", part) if isinstance(part, nn.Module) else part


def inductor(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """The module compiled for inputs like these; of an input that is a list, with `steal_arg`, the list is emptied."""
    from torch import _inductor

    found: Callable[..., Any] = _inductor.compile(module, given)
    return found


def overflows(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[torch.device, torch.Tensor]:
    """What `scaler.unscale_(optimizer)` has found, by device: more than 0 where a gradient is not finite."""
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Whether `scaler.unscale_(optimizer)` was called since the last update."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


def on_clipping(
    check: Callable[[Iterable[torch.Tensor]], None], check_norm: Callable[[Iterable[torch.Tensor]], None]
) -> None:
    """From now on calls `check` with the parameters whose gradients torch's own `clip_grad_norm_` is about to scale,
    and `check_norm` with tensors whose norm it, or `get_total_norm`, is to take; `clip_grad_value_` takes parameters
    without any gradient, too."""
    module: Any = torch.nn.utils.clip_grad
    original, grouped = module._clip_grads_with_norm_, module._group_tensors_by_device_and_dtype

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        check([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        original(parameters, *args, **kwargs)

    def grouping(lists: Any, *rest: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_get_total_norm":
            check_norm(lists[0])
        return grouped(lists, *rest) if lists[0] else {}

    module._clip_grads_with_norm_ = checked  # what torch.nn.utils offers by itself stays the original
    module._group_tensors_by_device_and_dtype = grouping


def has_gradient_hooks(item: torch.Tensor | nn.Module) -> bool:
    """Whether someone changes gradients at a parameter or module."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(item, name, None) for name in names)


def have_gradient_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """The same of any of many tensors, in a tenth of the time."""
    return any(chain.from_iterable(map(attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), tensors)))
