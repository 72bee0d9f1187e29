"""A denoiser's call as one flat graph, and where the image's rows are in its inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from fxpipe.analysis import Observe
from fxpipe.capture import capture
from fxpipe.capture.inputs import InputSpec, describe
from fxpipe.capture.settings import require_stateless
from fxpipe.capture.trees import Returned
from fxpipe.errors import FxpipeError
from fxpipe.sampler import Traced

RowsOf = Callable[[nn.Module, Mapping[str, torch.Tensor]], Mapping[str, int]]
"""Which inputs of a module's call have rows, and in which dimension."""


def traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows_of: RowsOf, observe: Observe
) -> Traced:
    """The call as one flat graph; the module stays as it is.

    A single sample is traced as two, since a graph of one holds for one alone; where that fails, as it is.

    Raises:
        CaptureError: the module cannot be captured as one graph.
        CompileError: where its rows are is not known.
    """
    inputs, tensors = describe(module, args, kwargs, None)
    if inputs.batch_size == 1:
        with suppress(FxpipeError):
            twice = describe(module, *inputs.rebuild(_twice(inputs, tensors)), 2)
            found = _traced(module, *twice, rows_of, observe)
            if found.captured.batch:
                return found
    return _traced(module, inputs, tensors, rows_of, observe)


def _twice(inputs: InputSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every sample once more."""
    leaves = [leaf for leaf in inputs.leaves if leaf.is_tensor]
    return [torch.cat([t, t]) if leaf.batched else t for leaf, t in zip(leaves, tensors, strict=True)]


def _traced(
    module: nn.Module, inputs: InputSpec, tensors: Sequence[torch.Tensor], rows_of: RowsOf, observe: Observe
) -> Traced:
    rows = rows_of(module, dict(zip(inputs.tensor_names, tensors, strict=True)))
    returned: list[Returned] = []

    def result_of(output: Any) -> torch.Tensor:
        returned[:] = [Returned.of(output)]
        return returned[0].tensor(output)

    require_stateless(module)
    with _sampling(module):
        captured = capture(module, inputs, tensors, result_of)
    observe("capture", captured)
    return Traced(captured, returned[0], rows)


@contextmanager
def _sampling(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval and no parameter requires a gradient."""
    modes = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode
