"""What a step writes into a parameter or buffer of the model, beside its gradients."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from fxpipe.plan.rank_program import bound, nest


@dataclass(frozen=True)
class StateUpdate:
    """The new value of `name`: `graph` returns it alone, has the tensors `reads` as attributes of these names, and is
    given the step's outputs `seen`.

    With `is_first` it is written before the step's programs run, else after them.
    """

    name: str
    reads: tuple[str, ...]
    graph: fx.Graph
    is_first: bool
    seen: tuple[str, ...] = ()

    def bound(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """What returns it, of tensors by name."""
        return bound(nest({name: state[name] for name in self.reads}), self.graph, "update")
