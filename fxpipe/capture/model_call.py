"""A call of a model, as it is captured: whose, of what, inside of what."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.known import Given
from fxpipe.capture.surroundings import Surroundings


@dataclass(frozen=True, eq=False)
class ModelCall:
    """`examples` are the tensor leaves in the order of `inputs`; only shapes and types are used.

    `surroundings`: where it runs, and in which precision; where the model is, as it computes, where there are none.
    `given`: what forward may read of its inputs, in a graph for calls that are alike in that, and of one size.
    """

    model: nn.Module
    inputs: InputSpec
    examples: Sequence[torch.Tensor]
    surroundings: Surroundings | None = None
    given: Given | None = None
