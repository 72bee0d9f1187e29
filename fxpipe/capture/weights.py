"""A model's own tensors: what they must be before forward is traced."""

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.errors import CaptureError

_FAULTS: tuple[tuple[Callable[[torch.Tensor], bool], str], ...] = (
    (nn.parameter.is_lazy, "has no shape yet (a lazy module); call forward once before compiling"),
    (
        lambda tensor: private.mode_of(tensor) is not None,
        "is a fake tensor; build the model under torch.device('meta') instead, which compiles without weights",
    ),
    (torch.Tensor.is_inference, "was made under inference_mode, which forbids gradients; build the model outside"),
    (lambda tensor: tensor.layout != torch.strided, "is no dense tensor; call to_dense() on it"),
    (lambda tensor: tensor.is_quantized, "is quantized, which has no gradient; dequantize it"),
)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return dict(chain(*named))


def by_memory(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """Parameters, buffers and constants by name, by the memory that they are in."""
    found = dict[int, dict[str, torch.Tensor]]()
    for name, tensor in (*tensors_of(model).items(), *constants.items()):
        found.setdefault(private.memory_of(tensor), {})[name] = tensor
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where it computes; the CPU where it is on the meta device, or has no tensors."""
    device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def check_weights(model: nn.Module) -> None:
    """Refuse tensors that no step could be traced, trained or sent with.

    Raises:
        CaptureError: a parameter or buffer is lazy, fake, sparse or quantized, or only some are on the meta device.
    """
    named = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in named.items():
        for found, why in _FAULTS:
            if found(tensor):
                raise CaptureError(f"{name} {why}")
    places: dict[bool, str] = {tensor.is_meta: name for name, tensor in named.items() if tensor.numel()}
    if len(places) == 2:
        raise CaptureError(
            f"{places[True]} is on the meta device, {places[False]} is not; materialise all of the model "
            "(to_empty, load_state_dict), or none of it to compile without weights"
        )
