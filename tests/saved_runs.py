"""A training run that is saved and taken up again: groups, a second optimizer, accumulation, clipping, rates,
weights averaged twice."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from tests.own_models import SEED, Adapted, OneDevice, batch

ROWS = 5


class Averages:
    """Of weights, as a list in the order of the parameters, as diffusers keeps them."""

    def __init__(self, model: nn.Module) -> None:
        self.averages = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.7, "averages": self.averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages = state["averages"]


class SavedRun:
    """`engine` is an engine, or one device."""

    def __init__(self, model: nn.Module, engine: Any) -> None:
        self.model, self.engine = model, engine
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            groups["bias" in name].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": groups[False], "weight_decay": 0.1}, {"params": groups[True], "lr": 3e-2}], lr=1e-2
        )
        self.momentum = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3, 3], 0.5)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        self.averages = Averages(model)

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for index in range(start, stop):
            losses += [float(self.engine.step(batch(2 * index + part, ROWS))) for part in range(2)]
            self.engine.clip_grad_norm_(0.2)
            self.optimizer.step()
            self.momentum.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)
            with torch.no_grad():
                for average, now in zip(self.averages.averages, self.model.parameters(), strict=True):
                    average.lerp_(now, 0.3)
        return losses

    def save(self, directory: Path, **options: Any) -> Path:
        extra = self.extra | {"number": 3}
        path: Path = self.engine.save(directory, self.optimizer, scheduler=self.scheduler, extra=extra, **options)
        return path

    def load(self, directory: Path) -> Any:
        return self.engine.load(directory, self.optimizer, scheduler=self.scheduler, extra=self.extra)

    def load_plain(self, directory: Path) -> fxpipe.Loaded:
        loaded = fxpipe.load_checkpoint(
            directory, self.model, self.optimizer, scheduler=self.scheduler, extra=self.extra
        )
        self.engine.step_index = loaded.step_index
        return loaded

    @property
    def extra(self) -> dict[str, Any]:
        return {"average": self.average, "averages": self.averages, "momentum": self.momentum}

    def weights(self) -> list[dict[str, Tensor] | None]:
        """Trained, averaged, and averaged in the list, on rank 0."""
        found = [self.engine.gather_state_dict()]
        if not isinstance(self.engine, OneDevice):
            self.engine.sync_model()  # a rank may have no memory for what others hold
        for averages in ([*self.average.parameters()], self.averages.averages):
            with torch.no_grad():
                for now, average in zip(self.model.parameters(), averages, strict=True):
                    now.copy_(average)
            found.append(self.engine.gather_state_dict())
        return found


def on_one_device() -> SavedRun:
    model = Adapted()
    return SavedRun(model, OneDevice(model))


def local(layout: Mapping[str, Any]) -> SavedRun:
    """Two ranks in this process."""
    model = Adapted()
    program = fxpipe.compile(model, 2, example_inputs=batch(0, ROWS), microbatches=2, **layout)
    return SavedRun(model, program.local_engine(seed=SEED))
