"""A batch of random values for a pipeline's training step, of the sizes that the pipeline itself works on."""

from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CompileError


def example_batch(step: Any, batch_size: int) -> dict[str, Tensor]:
    """By name what `step.inputs` says, on the denoiser's device; the same on every call.

    Raises:
        CompileError: the size of an input is not known.
    """
    generator = torch.Generator().manual_seed(0)
    return {name: _example(step, name, batch_size, generator) for name in step.inputs}


def _example(step: Any, name: str, batch_size: int, generator: torch.Generator) -> Tensor:
    weight = next(step.denoiser.parameters())
    if name.startswith("input_ids"):
        most = step.get_submodule(name.replace("input_ids", "text_encoder")).config.vocab_size
        return torch.randint(most, (batch_size, step.lengths[name]), generator=generator).to(weight.device)
    if name.startswith("attention_mask"):
        return torch.ones(batch_size, step.lengths[name], dtype=torch.long, device=weight.device)
    if name == "class_labels":
        most = step.denoiser.config.num_class_embeds
        return torch.randint(most, (batch_size,), generator=generator).to(weight.device)
    if name not in step.shapes:
        raise CompileError(
            f"{type(step).__name__} does not know the size of {name}: pass example_inputs, a dict with "
            f"{', '.join(step.inputs)}"
        )
    return torch.rand(batch_size, *step.shapes[name], generator=generator).to(weight) * 2 - 1
