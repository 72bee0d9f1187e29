"""Self-conditioning: a backbone that is fed its own first prediction, in some of the steps (Chen et al., "Analog Bits",
ICLR 2023; Chen, Zhang, Hinton, 2022).

    step's forward        first = backbone(x, 0) under no_grad;  loss = mse(backbone(x, first), target)
    SelfConditioning(p)   with probability p as it is; else the first pass is left out and `first` is zeros
"""

from typing import Any

import torch
from torch import nn

from fxpipe.capture.randomness import seeded
from fxpipe.errors import CompileError

_INDEX = -1  # of the draw: those of the model count from zero


class SelfConditioning(nn.Module):
    """A step whose forward calls its backbone twice, the first time under `torch.no_grad()`.

    Compiled, every step draws, alike on all ranks, whether the first pass runs; where it does not, what the second pass
    reads of it is zeros. Run as a module, both passes run.

    Args:
        step: an `nn.Module` whose forward returns the loss.
        probability: of the first pass, 0 to 1.

    Raises:
        CompileError: the probability is none.
    """

    def __init__(self, step: nn.Module, probability: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= probability <= 1.0:
            raise CompileError(f"probability={probability!r} of self-conditioning must be from 0 to 1")
        self.step, self.probability = step, float(probability)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)


def conditioned(seed: int, step: int, probability: float) -> bool:
    """Whether the first pass of this step runs."""
    with seeded(seed, step, _INDEX, torch.device("cpu")):
        return bool(torch.rand((), dtype=torch.float64) < probability)
