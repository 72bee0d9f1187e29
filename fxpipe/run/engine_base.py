"""What the parts of an engine share: its state, and what it asks of all ranks.

    engine.gather_outputs()    _gathered       one process that runs all ranks has them all: `EngineBase`
                                               one rank is sent what others have made:       `Engine`

The answers here are those of one process that runs all ranks; an engine of one rank gives every one anew.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.plan.outputs import Output, Parts
from fxpipe.plan.step import StepPlan
from fxpipe.run.averages import watch_averages
from fxpipe.run.host_states import put_back

_INSTEAD = {
    **dict.fromkeys(("accumulate", "no_sync"), "several engine.step before optimizer.step() add up their gradients"),
    "backward": "engine.step(batch) is forward and backward",
    "gather": "every rank has the whole batch's loss, and engine.gather_outputs() what forward returns beside it",
    "lr_scheduler": "torch's own over the optimizer, stepped in the loop, is as on one device",
    "materialize": "program.engine(weights=...) reads this rank's share of a model on the meta device from files",
    "prepare": "optimizers, schedulers and averages stay as they are; engine.dataloader takes a dataset or DataLoader",
    "sampler": "engine.dataloader(dataset) reads a rank's samples; engine.samples() says which of a batch they are",
    "zero_grad": "optimizer.zero_grad() is as on one device",
}
"""What other trainers' engines are asked for, and what does it here."""


class EngineBase:
    """`_loss_scale` is what losses are multiplied with now; `_parts` are what the last step has made of what forward
    returns beside the loss, `_returned` what its plan says of that."""

    rank: int = 0
    seed: int
    step_index: int
    num_samples: int  # that it has trained on
    check_batches: bool
    device: torch.device
    _plan: StepPlan
    _model: nn.Module
    _closed: bool
    _loss_scale: torch.Tensor | None
    _loader_failure: Exception | None
    _parts: Parts
    _returned: Sequence[Output]
    _num_writers: int = 1
    _added_after: int | None = None  # which step of the optimizers was the last when gradients came

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _INSTEAD:
                raise AttributeError(f"an engine has no {name!r}: {_INSTEAD[name]}", name=name, obj=self)
            return object.__getattribute__(self, name)  # raises, and what a property has raised, where it is that

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes that this process has sent since the engine was made."""

    @property
    def mesh(self) -> Any:
        """Raises RunError: there is none of ranks that are threads."""
        raise RunError("mesh: a DeviceMesh is of processes, and ranks are threads of this one; use program.engine()")

    def _require_open(self, call: str) -> None:
        """Before every call: nothing that failed has left weights on the host, and averages are watched."""
        if self._closed:
            raise RunError(f"{call} after close(): call it before, or make another engine of the program")
        for name, value in {"seed": self.seed, "step_index": self.step_index}.items():
            if not isinstance(value, SupportsIndex):
                raise RunError(f"{name} is {value!r}; set engine.{name} to a whole number")
        watch_averages()
        put_back(self._model.parameters())

    def _reads(self) -> Sequence[int]:
        """The samples of a whole batch that are read in this process, by whichever form of the step."""
        return range(self._plan.batch_size)

    def _is_first(self) -> bool:
        """Whether this process runs rank 0."""
        return True

    def _owners(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The ranks that train it; none where all processes do."""
        return ()

    def _everyones(self, mine: Any) -> list[Any]:
        """Collective: what every rank gave, on every rank."""
        return [mine]

    def _on_any(self, mine: bool) -> bool:
        """Collective: whether it is so on any rank."""
        return mine

    def _alike(self, call: str, parts: Mapping[str, Any]) -> None:
        """Collective: RunError unless all ranks make this call with these values."""

    def _gathered(self, parts: Parts) -> Parts:
        """Collective: all ranks' parts on rank 0."""
        return parts

    def _released(self) -> int:
        """Collective: what this process needs not hold is let go; its bytes."""
        return 0

    def _bring(self, call: str, ranks: Sequence[int], *asked: object) -> None:
        """Collective: all trained values into the models of some ranks."""

    def _bring_averages(self, averages: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Collective: averages of what other ranks train, to all."""

    def _norm(self, norm_type: float, max_norm: float, names: Collection[str] | None) -> torch.Tensor:
        """Collective: of the whole model's gradients, or of those of these parameters."""
        parameters = ((name, p) for name, p in self._model.named_parameters() if names is None or name in names)
        gradients = [p.grad for _, p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)
