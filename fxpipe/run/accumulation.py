"""Steps that only add gradients to those of the step before: replicas still have each other's values, and send none.

step     broadcast, forward, backward         optimizer.step()     step     broadcast, ...
step                forward, backward
"""

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxpipe.plan.transport import Pending, Transport
from fxpipe.run.read_ahead import version

_steps = count()
_last_step = [next(_steps)]  # of any optimizer in this process


def _stepped(*_: Any) -> None:
    _last_step[0] = next(_steps)


register_optimizer_step_post_hook(_stepped)


def last_optimizer_step() -> int:
    """Another number after every step of any optimizer."""
    return _last_step[0]


class Accumulation:
    """Whether weights and gradients are as a step has left them, and no optimizer has stepped since."""

    def __init__(self) -> None:
        self._left: list[tuple[Any, ...]] | None = None

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step has ended."""
        self._left = [(*_seen(p), None if p.grad is None else weakref.ref(p.grad)) for p in parameters]

    def goes_on(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether nothing has changed since; writes through `.data` alone go unseen."""
        now = [(_seen(p), p.grad) for p in parameters]
        if self._left is None or len(now) != len(self._left):
            return False
        pairs = zip(now, self._left, strict=True)
        return all(seen == tuple(was) and grad is (of and of()) for (seen, grad), (*was, of) in pairs)


def _seen(parameter: nn.Parameter) -> tuple[int, ...]:
    gradient = parameter.grad
    return _last_step[0], version(parameter), parameter.data_ptr(), -1 if gradient is None else version(gradient)


class WithValues:
    """A rank's transport in a step before which all replicas have the values of all."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def broadcast(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[None]:
        return Pending(lambda: None)
