"""Whether all ranks step the same optimizer between steps of an engine, with the same options.

    rank 0   engine.step   optimizer.step   engine.step        told: stepped, {"lr of group 0": 0.1, ...}
    rank 1   engine.step                    engine.step        told: left out

Were ranks to differ, the parts of a model would be of different runs. Optimizers that a rank has made over what it
trains alone may differ, and are not compared.
"""

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxpipe.run.ownership import is_idle, num_claims, owners

_PLAIN = (type(None), bool, int, float, str, tuple)
_watching: "weakref.WeakSet[OptimizerSteps]" = weakref.WeakSet()


class OptimizerSteps:
    """Those of optimizers over a whole model, of which this rank trains a part."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rank, self._by_itself = rank, False
        self._count, self._options = 0, dict[str, Any]()
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[Any, bool]] = weakref.WeakKeyDictionary()
        _watching.add(self)

    def saw(self, optimizer: Optimizer) -> None:
        state = num_claims(), [len(group["params"]) for group in optimizer.param_groups]
        known, is_of_all = self._known.get(optimizer, (None, False))
        if known != state:
            is_of_all = self._is_of_all(optimizer)
            self._known[optimizer] = state, is_of_all
        if not is_of_all:
            return
        self._count += 1
        self._options = {"optimizer": type(optimizer).__name__, "number of optimizer steps since": self._count}
        for number, group in enumerate(optimizer.param_groups):
            options = {name: value for name, value in group.items() if type(value) in _PLAIN and name != "param_names"}
            self._options |= {f"{name} of group {number} of its optimizer": value for name, value in options.items()}

    def _is_of_all(self, optimizer: Optimizer) -> bool:
        """Whether it is over the whole model, and not over what this rank trains alone."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for parameter in self._trained if owners(parameter) and not is_idle(parameter)]
        own = [self._rank in owners(parameter) for parameter in trained if id(parameter) in held]
        found = not all(own) or len(own) == len(trained)
        self._by_itself |= bool(own) and not found
        return found

    def taken(self) -> tuple[bool | None, dict[str, Any]]:
        """Since it was last asked: whether there was any, None where that is not to be compared; the last's options."""
        options, self._options, self._count = self._options, {}, 0
        is_told = options or (not self._by_itself and any(self._rank in owners(p) for p in self._trained))
        return bool(options) if is_told else None, options


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for steps in [*_watching]:
        steps.saw(optimizer)


register_optimizer_step_post_hook(_stepped)
