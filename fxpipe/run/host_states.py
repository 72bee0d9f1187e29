"""Optimizers whose states are on the host: before a step of one, what it updates is brought there, and after it back.

    optimizer.step()    before: gradient -> host, value -> host     step: on the host, where its states are made
                        after:  value -> device

Any `torch.optim` optimizer does, over any of the parameters: it finds them on the host while it steps.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError

HOST = torch.device("cpu")
_buffers = WeakTensorKeyDictionary()  # parameter -> its value and its gradient on the host, once they are there
_on_device = WeakTensorKeyDictionary()  # parameter that is on the host now -> its value and its gradient on the device
_hooked: list[Any] = []


def keep_on_host(parameters: Iterable[nn.Parameter]) -> None:
    """From now on, as long as they live, every optimizer updates these there, and keeps its states of them there."""
    for parameter in parameters:
        _buffers.setdefault(parameter, None)
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before))
        _hooked.append(register_optimizer_step_post_hook(_after))


def put_back(parameters: Iterable[nn.Parameter]) -> None:
    """Those that an optimizer which raised has left on the host: values are as they were before it, and gradients as
    they are there, where `zero_grad` or a clip finds them."""
    for parameter in parameters if _on_device else ():
        if parameter in _on_device:
            value, gradient = _on_device.pop(parameter)
            since, parameter.grad = parameter.grad, None
            parameter.data = value
            if since is not None:
                parameter.grad = gradient.copy_(since)


@contextmanager
def states_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around `load_state_dict`, which puts states where parameters are: these are on the host, without memory there."""
    there = [(p, p.data, p.grad) for p in _hosted(optimizer) if not p.is_meta]
    for parameter, _, _ in there:
        nothing = torch.empty((), dtype=parameter.dtype, device=HOST)
        parameter.grad, parameter.data = None, nothing.expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, value, gradient in there:
            parameter.data, parameter.grad = value, gradient


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    put_back(_hosted(optimizer))
    updated = [p for p in _hosted(optimizer) if p.grad is not None]
    if updated and (args[1:] or kwargs.get("closure") is not None):
        raise RunError(
            "optimizer.step(closure) where the plan keeps optimizer states on the host: a closure would run the model "
            "while its weights are there; call engine.step, then optimizer.step() without one"
        )
    for parameter in updated:
        assert parameter.grad is not None
        _on_device[parameter] = parameter.data, parameter.grad
        value, gradient = _buffers_of(parameter)
        value.copy_(parameter.data, non_blocking=True)
        gradient.copy_(parameter.grad.detach(), non_blocking=True)
    for device in {p.device for p in updated if p.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    for parameter in updated:
        value, gradient = _buffers_of(parameter)
        parameter.grad, parameter.data = None, value
        parameter.grad = gradient
        state = optimizer.state.get(parameter, {})  # of an optimizer that has stepped, or was loaded, elsewhere
        state.update({k: v.to(HOST) for k, v in state.items() if isinstance(v, torch.Tensor)})


@torch.no_grad()
def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in _hosted(optimizer):
        if parameter in _on_device:
            value, gradient = _on_device.pop(parameter)
            updated, parameter.grad = parameter.data, None
            parameter.data, parameter.grad = value, gradient
            parameter.copy_(updated, non_blocking=True)


def _hosted(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p in _buffers]


def _buffers_of(parameter: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Its value and gradient on the host: made once, in memory that a GPU copies from and to without a detour."""
    if _buffers[parameter] is None:
        _buffers[parameter] = tuple(
            torch.empty_like(parameter.data, device=HOST, pin_memory=parameter.is_cuda) for _ in range(2)
        )
    found: tuple[torch.Tensor, torch.Tensor] = _buffers[parameter]
    return found
