"""Batches of several kinds, which have programs of their own; engines take the one for each batch.

engine        x [8, 4, 32, 32]     step 0, 1, 3: its own
  others      x [8, 4, 32, 48]     step 2: another engine of the same model, on the same transport
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.plan.step import FilledPlan, StepPlan


@dataclass(frozen=True)
class Kind:
    """What an engine runs for a kind of batches: its programs, the model's state as they name it, its filled forms."""

    plan: StepPlan
    state: Mapping[str, torch.Tensor]
    filled: Callable[[], FilledPlan] | None


@dataclass(frozen=True)
class Kinds:
    """`key` tells a call's kind as a text, `first` is that of the engine's own batches; `made` gives a call's programs,
    compiled if need be: all ranks ask."""

    first: str

    key: Callable[[Sequence[Any], Mapping[str, Any]], str]
    made: Callable[[Sequence[Any], Mapping[str, Any]], Kind]


class Bound(dict[str, torch.Tensor]):
    """A batch's tensors by program input, and the engine that steps on them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], engine: Any) -> None:
        super().__init__(tensors)
        self.engine = engine
