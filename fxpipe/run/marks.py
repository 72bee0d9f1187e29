"""Whether tensors were written since: by torch's count of writes, and, for those through `.data` that it does not
count, by a few entries of each.

ema.lerp_(weight, 0.01)                                 counted
ema.data.mul_(0.99).add_(weight.data, alpha=0.01)       other entries
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fxpipe.run.read_ahead import version

_ENTRIES = 16  # of a tensor


@dataclass(frozen=True, eq=False)
class Marks:
    """Where tensors are, how often they were written to, and some entries, by type."""

    places: tuple[tuple[int, int], ...]
    entries: tuple[torch.Tensor, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks) or self.places != other.places:
            return False
        return all(torch.equal(*pair) for pair in zip(self.entries, other.entries, strict=True))

    __hash__ = None  # type: ignore[assignment]


@torch.no_grad()
def marks_of(tensors: Iterable[torch.Tensor]) -> Marks:
    """As they are now."""
    held = list(tensors)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in held:
        if (some := _some(tensor)) is not None:
            by_kind.setdefault((some.dtype, some.device), []).append(some)
    entries = tuple(torch.cat(some).view(torch.uint8) for some in by_kind.values())
    return Marks(tuple((tensor.data_ptr(), version(tensor)) for tensor in held), entries)


def _some(tensor: torch.Tensor) -> torch.Tensor | None:
    """Entries all over a tensor, in the order of memory; none of one whose entries share it."""
    count = tensor.numel()
    if not count or not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)):
        return None
    each = -(-count // _ENTRIES)
    return tensor.as_strided((-(-count // each),), (each,), tensor.storage_offset())
