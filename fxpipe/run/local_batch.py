"""What a rank is given of a batch: all of it, or the samples that it reads.

batch of 8      rank 0 reads 0 1 2 3      LocalBatch([0 1 2 3])     row i is sample `engine.samples()[i]`
                rank 1 reads none         LocalBatch(None)
                rank 2 reads 4 5 6 7      LocalBatch([4 5 6 7])
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from fxpipe.capture.inputs import call_of
from fxpipe.errors import CompileError
from fxpipe.plan.ops import BatchRows
from fxpipe.plan.reads import batched_inputs
from fxpipe.plan.step import StepPlan
from fxpipe.run.read_ahead import Inputs, ReadBatch


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The samples of one batch that this rank reads, `engine.samples(size)`, in that order; other ranks have theirs.

    Args:
        batch: as forward takes it; None where the rank reads none.
        size: samples of the whole batch; the program's where left out.
        place: which batch it is, with a text of its own, to be compared over the ranks.
        trained: called when it has been trained on.
    """

    batch: Any
    size: int | None = None
    place: object = None
    trained: Callable[[], None] | None = None


def bound(plan: StepPlan, batch: Any, samples: Callable[[int], Sequence[int]], device: torch.device) -> ReadBatch:
    """A batch's tensors by program input, on the device.

    Args:
        plan: of the whole batch; a smaller one is taken, too.
        samples: which of a batch of that size this rank reads.

    Raises:
        CompileError: names, shapes or types are not the compiled ones, these are not the rank's samples, or wait for a
            gradient.
    """
    if not isinstance(batch, LocalBatch):
        tensors, size = plan.tensors(*call_of(batch))
        plan.require_size(size)
        _require_data(plan, tensors)
        return ReadBatch.of(placed(tensors, device), size)
    size = plan.batch_size if batch.size is None else batch.size
    plan.require_size(size)
    own = samples(size)
    if (batch.batch is None) != (not own):
        what = "none" if batch.batch is None else "some"
        raise CompileError(f"this rank reads {said(own)} of a batch of {size}, and was given {what}; {_REMEDY}")
    if not own:
        return ReadBatch.of({}, size, batch)
    try:
        tensors, count = plan.tensors(*call_of(batch.batch))
    except CompileError as error:
        raise CompileError(f"{error}; a LocalBatch has the shape that was compiled first") from None
    if count != len(own):
        raise CompileError(
            f"this rank reads {said(own)} of a batch of {size}, {len(own)} in all, and was given {count}; {_REMEDY}"
        )
    _require_data(plan, tensors)
    tensors, rows = placed(tensors, device), batched_inputs(plan)
    given: Inputs = {name: BatchRows(tensor, own) if name in rows else tensor for name, tensor in tensors.items()}
    return ReadBatch.of(tensors, size, batch, tensors if len(own) == size else given)


_REMEDY = "give it what engine.samples() says, in that order, or the whole batch without LocalBatch"


def _require_data(plan: StepPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what would be trained, or what made it, by `loss.backward()` on one device."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise CompileError(
                f"input {plan.input_names[name]} requires a gradient, which a step gives to parameters of the model "
                "alone: compute it in forward, or make it a parameter of the model; or detach() it"
            )


def placed(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def said(samples: Sequence[int]) -> str:
    """Samples in words: samples 0-3, 8-11."""
    if not samples:
        return "no samples"
    runs = [[sample for _, sample in run] for _, run in groupby(enumerate(samples), lambda pair: pair[1] - pair[0])]
    return "samples " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
