"""Sample programs: of every rank one straight-line FX graph that predicts, its patch of the rows in hand."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.plan.rank_program import nest


@dataclass(frozen=True)
class SampleProgram:
    """What one rank runs for every call of a denoiser.

    `graph` takes (transport, the whole inputs in `inputs`) and returns the whole prediction; it reads state by its
    original name, and `state` maps those names to shape and type.
    """

    rank: int
    graph: fx.Graph
    inputs: tuple[str, ...]
    state: Mapping[str, torch.Tensor]

    def bind(self, state: Mapping[str, torch.Tensor]) -> fx.GraphModule:
        """The runnable module, which shares `state`."""
        return fx.GraphModule(nest(state), self.graph, class_name=f"rank_{self.rank}")
