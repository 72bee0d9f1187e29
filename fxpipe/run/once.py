"""What is computed once in a call, and again when what it is made of has changed: known, or computed.

conditions as before: the same tensors, not written since, or equal ones    ->  the values of then
other conditions: a callback's, those without the prompt                    ->  other values, beside the last ones

Every rank may decide by itself: nothing is sent, and values computed again are the same to the last bit. Weights count
as changed when torch counts a write; what is written through `.data` in the middle of a call is seen by the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_KEPT = 2
"""As many conditions as a step of a pipeline mostly has: with the prompt, and without."""

Values = Sequence[torch.Tensor]


@dataclass
class _Seen:
    """A tensor as it was: by its object, for as long as nobody writes it, and by its entries."""

    given: torch.Tensor
    version: int | None
    entries: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Seen":
        return _Seen(tensor, _version(tensor), tensor.clone())

    def is_now(self, tensor: torch.Tensor) -> bool:
        version = _version(tensor)
        if tensor is self.given and version is not None and version == self.version:
            return True
        old = self.entries
        if (tensor.shape, tensor.dtype, tensor.device) != (old.shape, old.dtype, old.device):
            return False
        if not torch.equal(tensor, old):
            return False
        self.given, self.version = tensor, version
        return True


@dataclass
class _Known:
    program: object
    weights: list[object]
    conditions: list[_Seen]
    values: Values


class Once:
    """The values of a call's last conditions."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def values(self, program: object, conditions: Values, weights: Values, compute: Callable[[], Values]) -> Values:
        """What `compute` gives, or gave for equal conditions and weights that nobody has written since.

        Args:
            program: whose values these are.
        """
        stamps = [_stamp(tensor) for tensor in weights]
        for known in self._known:
            same = known.program is program and known.weights == stamps
            if same and all(old.is_now(new) for old, new in zip(known.conditions, conditions, strict=True)):
                return known.values
        self._known = self._known[: _KEPT - 1]  # before others are made
        self._known.insert(0, _Known(program, stamps, list(map(_Seen.of, conditions)), compute()))
        return self._known[0].values

    def forget(self) -> None:
        self._known.clear()


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was written in place; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _stamp(tensor: torch.Tensor) -> object:
    """Equal for as long as nobody writes it; to none where that cannot be told."""
    version = _version(tensor)
    return object() if version is None else (id(tensor), tensor.data_ptr(), version)
