"""Where forward is traced to run, and in which precision.

    compile(model, precision="bf16", device="cpu")      with torch.autocast("cpu", torch.bfloat16): forward(x, y)

A model whose weights are elsewhere (on the meta device, on the CPU for a step on GPUs) is traced as if it had been
moved: which operations autocast casts, and what forward itself decides by a tensor's device, depends on where they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from fxpipe.capture import private
from fxpipe.errors import CaptureError

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Surroundings:
    """The device that forward runs on, and the type of an autocast around it, None where there is none."""

    device: torch.device
    dtype: torch.dtype | None = None

    @classmethod
    def of_call(cls, model: nn.Module) -> "Surroundings | None":
        """The autocast that a call is inside of here, on the device where the model is; None where it casts nothing.
        A model on the meta device, where there is none to open, is traced as on the CPU."""
        device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
        if device.type == "meta":
            return cls(torch.device("cpu"))
        if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
            return None
        return cls(device, torch.get_autocast_dtype(device.type))

    @property
    def digest(self) -> tuple[str, str]:
        return str(self.device), str(self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def checked(self) -> AbstractContextManager[None]:
        """Raises CaptureError where what runs inside opens an autocast that casts nothing on the device."""
        return private.on_autocast(self._check)

    def _check(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> None:
        low = dtype in (None, *LOW)
        if enabled and low and device_type != self.device.type:
            raise CaptureError(
                f"forward opens torch.autocast({device_type!r}), and the ranks run on {self.device.type!r}, where that "
                f"casts nothing; open torch.autocast(x.device.type, ...), or compile with device={device_type!r}, or "
                "leave it out and compile with precision="
            )

    @contextmanager
    def moved(self, model: nn.Module, examples: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        """The examples; inside, they and the model's tensors are on the device, without memory where they were not.

        Weights that have no memory (one value in every place, as of what other ranks hold) are as those that have.
        """
        elsewhere = [t for t in (*model.parameters(), *model.buffers(), *examples) if t.device.type != self.device.type]
        if not elsewhere and not any(map(_has_no_memory, model.parameters())):
            yield tuple(examples)
            return
        mode = private.export_mode()
        known: dict[int, torch.Tensor] = {}

        def there(tensor: torch.Tensor) -> torch.Tensor:
            if not elsewhere and not _has_no_memory(tensor):
                return tensor
            if id(tensor) not in known:
                whole = torch.empty(tensor.shape, device="meta") if _has_no_memory(tensor) else tensor
                with mode:
                    made = torch.empty_strided(tensor.shape, whole.stride(), dtype=tensor.dtype, device=self.device)
                is_weight = isinstance(tensor, nn.Parameter)
                known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_weight else made
            return known[id(tensor)]

        with _replaced(model, there):
            yield tuple(map(there, examples))


def autocasts() -> dict[str, torch.dtype]:
    """Those that are on here, by device."""
    kinds = private.autocast_devices()
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def no_autocast() -> AbstractContextManager[object]:
    """Inside, none is on."""
    stack = ExitStack()
    for kind in autocasts():
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _has_no_memory(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.numel() > 1 and not any(tensor.stride())


@contextmanager
def _replaced(model: nn.Module, there: Any) -> Iterator[None]:
    """Inside, the model has other tensors: parameters, buffers and plain attributes."""
    held: list[dict[str, Any]] = [of for m in model.modules() for of in (m._parameters, m._buffers, m.__dict__)]
    before = [(of, name, value) for of in held for name, value in of.items() if isinstance(value, torch.Tensor)]
    for of, name, value in before:
        of[name] = there(value)
    try:
        yield
    finally:
        for of, name, value in before:
            of[name] = value
