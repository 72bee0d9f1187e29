"""A model in training, as one rank has it, and what else belongs to the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.run.ownership import as_is
from fxpipe.run.saves.base import NO_BASE, Base


@runtime_checkable
class Stateful(Protocol):
    """What gives its state as nested plain values and tensors, and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class Progress:
    """Of an engine: which random numbers it draws next, and which batches its loaders give."""

    engine: Any

    def state_dict(self) -> dict[str, Any]:
        own = {"seed": self.engine.seed, "step_index": self.engine.step_index}
        return own | {"loaders": self.engine.loader_states()}

    def require(self, state: Mapping[str, Any]) -> None:
        """Raises RunError where the state is not of such an engine."""
        self.engine.require_loaders(state.get("loaders", ()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.engine.seed, self.engine.step_index = state["seed"], state["step_index"]
        self.engine.restore_loaders(state.get("loaders", ()))


@dataclass(frozen=True)
class RandomState:
    """Of torch, on the CPU and on a device."""

    device: torch.device

    def state_dict(self) -> dict[str, torch.Tensor]:
        cpu = {"cpu": torch.get_rng_state()}
        return cpu if self.device.type != "cuda" else cpu | {"cuda": torch.cuda.get_rng_state(self.device)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A model in training, as one rank has it.

    `given` is what else belongs to the run, by name, `Stateful` or values, further optimizers over the model among
    them; `owners` tells who trains a parameter, `base` what was not written since the run began.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    given: Mapping[str, Any]
    rank: int = 0
    num_ranks: int = 1
    owners: Callable[[nn.Parameter], tuple[int, ...]] = lambda parameter: ()
    base: Base = NO_BASE

    @cached_property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Those over the model's parameters, by name, whose states go by these."""
        own = {id(parameter) for parameter in self.model.parameters()}
        main = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return main | {name: value for name, value in self.given.items() if _is_over(value, own)}

    @property
    def sections(self) -> dict[str, Any]:
        """What else belongs to it."""
        return {name: value for name, value in self.given.items() if name not in self.optimizers}

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether its value and its state are this rank's, too."""
        return not self.owners(parameter) or self.rank in self.owners(parameter)

    @property
    def own(self) -> list[nn.Parameter]:
        """What is trained here, and not everywhere."""
        return [p for p in self.model.parameters() if p.requires_grad and self.rank in self.owners(p)]

    def writes(self, tensor: torch.Tensor) -> bool:
        owners = self.owners(tensor) if isinstance(tensor, nn.Parameter) else ()
        return self.rank == (owners or (0,))[0]

    @property
    def layout(self) -> dict[str, Any]:
        """Equal in two runs where every rank trains the same."""
        trained = {name: list(self.owners(p)) for name, p in self.model.named_parameters() if p.requires_grad}
        return {"ranks": self.num_ranks, "owners": {name: ranks for name, ranks in trained.items() if ranks}}


def _is_over(value: Any, own: set[int]) -> bool:
    """Whether it is an optimizer over these parameters, and nothing else."""
    if not isinstance(value, torch.optim.Optimizer):
        return False
    return all(id(p) in own or not p.numel() for group in value.param_groups for p in group["params"])


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own parameters and persistent buffers, each by the first of its names in `state_dict`."""
    with as_is():
        state = model.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in state.items():
        if id(value) not in own:
            raise RunError(f"{name} of state_dict() is no parameter or buffer of the model: save it through extra")
        found.setdefault(id(value), (name, value))
    return dict(found.values())


def state_of(value: Any) -> Any:
    """As it is on this rank, which may have old values of what others train."""
    with as_is():
        return value.state_dict() if isinstance(value, Stateful) else value
