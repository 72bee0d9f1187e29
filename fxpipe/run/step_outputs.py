"""What the last step returned beside the loss, as engines offer it.

loss = engine.step(batch)
engine.outputs["mse"]               numbers: on every rank, as the loss is
engine.gather_outputs()["pred"]     all of it, samples in their order: on one rank, from those that made it
"""

from collections.abc import Mapping, Sequence

import torch

from fxpipe.plan.outputs import Output, Parts
from fxpipe.run.engine_base import EngineBase


class StepOutputs(EngineBase):
    """The outputs of the last step."""

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The numbers that the model's forward returned beside the loss in the last step, by name, on every rank.

        Each is the whole batch's; without gradient, and not to be written to.
        """
        return put_together([output for output in self._returned if output.is_number], self._parts)

    def gather_outputs(self) -> dict[str, torch.Tensor] | None:
        """Collective: on rank 0 all that forward returned beside the loss in the last step, by name, tensors of samples
        too; None on the others.

        Until the next step every rank keeps what it has made of them.
        """
        self._require_open("gather_outputs")
        parts = self._gathered(self._parts)
        return put_together(self._returned, parts) if self._is_first() else None


def put_together(outputs: Sequence[Output], parts: Parts) -> dict[str, torch.Tensor]:
    """The whole batch's values, of those that the step has made."""
    made: Mapping[str, torch.Tensor | None] = {output.name: output.of(parts) for output in outputs}
    return {name: value for name, value in made.items() if value is not None}
