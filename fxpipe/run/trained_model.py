"""The model's own parameters, as every engine offers them: what is trained here, and what other ranks have trained."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CompileError, RunError
from fxpipe.run.engine_base import EngineBase
from fxpipe.run.saves.weight_names import WeightNames
from fxpipe.run.shared_model import state_copy


class TrainedModel(EngineBase, ABC):
    """A model of which this process trains all, or a part."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model's own parameters that are trained in this process, by their names in the model."""
        yield from self._trained_here().items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same, for an optimizer; those of the whole model serve as well, for what is trained elsewhere has no
        gradient here. Never empty, since optimizers refuse that: a rank without any gives one of size zero."""
        yield from self._trained_here().values() or [nn.Parameter(torch.empty(0))]

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: nn.Parameter | Iterable[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Collective: as torch.nn.utils.clip_grad_norm_ of the whole model's parameters, or of those given, as a
        group's; returns their norm before.

        On a rank of several torch's own function would clip by the norm of what is trained there.
        """
        self._require_open("clip_grad_norm_")
        if not (isinstance(max_norm, Real | torch.Tensor) and max_norm >= 0):
            raise RunError(f"max_norm is {max_norm!r}; give a number, 0 or more (math.inf clips nothing)")
        given = self._model.parameters() if parameters is None else parameters
        clipped = [given] if isinstance(given, nn.Parameter) else [*given]
        own = {id(parameter): name for name, parameter in self._model.named_parameters()}
        if any(id(parameter) not in own for parameter in clipped):
            raise RunError("clip_grad_norm_: some of the parameters are not the model's")
        gradients = [p.grad for p in clipped if p.grad is not None]
        names = None if parameters is None else [own[id(parameter)] for parameter in clipped]
        total = self._norm(float(norm_type), float(max_norm), names)
        total = total.to(gradients[0].device) if gradients else total
        if error_if_nonfinite and not total.isfinite():
            raise RunError(f"the norm of the gradients is {float(total)}; they are as they were")
        torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, total)
        return total

    def sync_model(self, *averages: Any) -> None:
        """Collective: bring into the model, on every rank, what other ranks have trained; to sample from it there.

        Until then a rank's model holds what it trains itself; the rest is as it was at the start, or at the last call.
        So do averages of weights that a rank updates by its model.

        Args:
            averages: of weights, into which the same is brought: what has a tensor for each parameter of the model, or
                of one of its modules, in its `state_dict()`, by name or as a list in their order; or such a list. An
                EMAModel that has stepped goes by the parameters that it has stepped by.

        Raises:
            RunError: an average has no such tensors, or gives copies of them.
        """
        self._require_open("sync_model")
        own = (p for p in self._model.parameters() if p.requires_grad and self.rank in self._owners(p))
        names = WeightNames(self._model, own)
        found = [names.by_parameter(average) for average in averages]
        for average, tensors in zip(averages, found, strict=True):
            if not tensors:
                raise RunError(
                    f"{type(average).__name__} has no tensor for each parameter of the model, or of one of its modules"
                )
            if _places(tensors) != _places(names.by_parameter(average)):
                raise RunError(
                    f"{type(average).__name__} gives copies of its tensors in state_dict(), so that nothing could be "
                    "brought into it; give the tensors themselves, or the state, and load that into it after"
                )
        self._bring("sync_model", range(self._plan.world_size))
        for tensors in found:
            self._bring_averages(tensors)

    def release(self) -> int:
        """Collective: let go of the weights that this rank neither trains nor reads; returns how many bytes they had.

        They have their shape still, and no memory: the model is neither run nor saved before `sync_model` has brought
        them, for as long as until the next step. In one process, which runs all ranks, it is 0.
        """
        self._require_open("release")
        return self._released()

    def gather_state_dict(self, trainable_only: bool = False) -> dict[str, Any] | None:
        """Collective: on rank 0 a copy of the model's `state_dict()`, trained values of all ranks included, on the CPU,
        and these values in its model; None on the others.

        Weights that were put into the model on every rank, such as averages, are gathered as they are.

        Args:
            trainable_only: the parameters that require gradients alone, such as those of adapters.
        """
        self._require_open("gather_state_dict")
        self._bring("gather_state_dict", [0], trainable_only)
        return state_copy(self._model, trainable_only) if self._is_first() else None

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    @abstractmethod
    def _trained_here(self) -> Mapping[str, nn.Parameter]:
        """By the names the user knows."""


def _places(tensors: Mapping[str, list[torch.Tensor]]) -> list[int]:
    """Where in memory they are."""
    return [tensor.data_ptr() for of_parameter in tensors.values() for tensor in of_parameter]


def require_own(optimizer: Any, model: nn.Module, trains_here: bool) -> None:
    """Refuse an optimizer that would train nothing of the model, as far as it says what it trains, on ranks that train
    something."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
        raise CompileError(f"optimizer is {optimizer!r}; give one of torch.optim over model.parameters()")
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    groups = getattr(optimizer, "param_groups", None)
    if trains_here and groups and not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise CompileError(
            f"the optimizer has none of the {len(own)} parameters of {type(model).__name__} that are trained, and "
            "would train nothing; make it over model.parameters()"
        )
