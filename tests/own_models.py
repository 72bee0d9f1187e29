"""A user's own training script: one optimizer over the model, made before any engine; and one device that runs it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.capture.randomness import SeededDraws
from fxpipe.plan.transport import Pending, Transport
from fxpipe.run.one_device import one_device

SEED, WIDTH, STEPS = 5, 6, 4


class Adapted(nn.Module):
    """Layers with low-rank adapters, the first also at the end; what no loss reads, and both kinds of buffers."""

    def __init__(self, trained: str = "all") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in self.layers)
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in self.layers)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)
        self.double()
        if trained == "adapters":
            self.layers.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + self.drop(F.silu(layer(x) + up(down(x))))
        return F.mse_loss(self.layers[0](x * self.scale) + self.shift, target)


def batch(number: int, rows: int) -> dict[str, Tensor]:
    """Four samples [4, rows, 6]."""
    draw = torch.Generator().manual_seed(number)
    return {name: torch.randn(4, rows, WIDTH, generator=draw, dtype=torch.float64) for name in ("x", "target")}


class OneDevice:
    """What an engine offers, by the uncompiled model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step_index = model, 0

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        found = one_device(self.model, (), batch, SeededDraws(SEED, self.step_index, torch.device("cpu")))
        self.step_index += 1
        parameters = dict(self.model.named_parameters())
        for name, gradient in found.gradients.items():
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return found.loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def gather_state_dict(self, trainable_only: bool = False) -> dict[str, Any]:
        named = dict(self.model.named_parameters())
        return {
            name: value.detach().clone()
            for name, value in self.model.state_dict().items()
            if not trainable_only or (name in named and named[name].requires_grad)
        }


@dataclass
class Trained:
    """What a script has seen: losses, norms, rates, and the states that it gathered (None on other ranks)."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor] | None] = field(default_factory=list)


def script(model: nn.Module, engines: Sequence[Callable[[], Any]], rows: Sequence[int], whole: bool = True) -> Trained:
    """Buckets of rows take turns; groups by name, accumulation, clipping, falling rates, an average of weights.

    Unless every rank has the `whole` model's memory, it is brought there before the averages are put into it.
    """
    found = Trained()
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups["bias" in name].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[False], "weight_decay": 0.1}, {"params": groups[True], "lr": 3e-2}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
    average = copy.deepcopy(model)
    made: dict[int, Any] = {}
    for index in range(STEPS):
        bucket = index % len(engines)
        engine = made[bucket] if bucket in made else made.setdefault(bucket, engines[bucket]())
        found.losses += [float(engine.step(batch(2 * index + part, rows[bucket]))) for part in range(2)]
        found.norms.append(float(engine.clip_grad_norm_(0.2, 2.0 if index else float("inf"))))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.rates.append(scheduler.get_last_lr()[0])
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.3)
    found.states = [engine.gather_state_dict(), engine.gather_state_dict(trainable_only=True)]
    if not whole:
        engine.sync_model()
    with torch.no_grad():
        for kept, now in zip(average.parameters(), model.parameters(), strict=True):
            now.copy_(kept)
    found.states.append(engine.gather_state_dict())
    return found


def assert_same(ours: Trained, theirs: Trained) -> None:
    for name in ("losses", "norms", "rates"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-10, atol=0.0)
    assert ours.norms[1] > 0.2, "nothing is clipped"
    for state, expected in zip(ours.states, theirs.states, strict=True):
        assert state is not None
        assert expected is not None
        assert list(state) == list(expected)
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)


class _Copying:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def recv(self, *given: Any) -> Pending[Tensor]:
        pending = self._transport.recv(*given)
        return Pending(lambda: pending.wait().clone())


def copying(transport: Transport) -> Transport:
    """A thread's, which copies what it receives as that of a process does: gradients are written in place."""
    return cast(Transport, _Copying(transport))
