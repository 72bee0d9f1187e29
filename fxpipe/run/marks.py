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
    """Where tensors are, how often they were written to, and some entries as bytes, by type; `counts` has how many
    bytes of which tensor."""

    places: tuple[tuple[int, int], ...]
    entries: tuple[torch.Tensor, ...]
    counts: tuple[tuple[tuple[int, int], ...], ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks) or self.places != other.places:
            return False
        return all(torch.equal(*pair) for pair in zip(self.entries, other.entries, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def differing(self, before: "Marks") -> list[int]:
        """The numbers of the tensors that were written since; all, where others are marked."""
        if (len(self.places), self.counts) != (len(before.places), before.counts):
            return [*range(len(self.places))]
        pairs = enumerate(zip(self.places, before.places, strict=True))
        found = {number for number, (now, then) in pairs if now != then}
        for own, other, counts in zip(self.entries, before.entries, self.counts, strict=True):
            parts = (own != other).split([size for _, size in counts])
            found |= {number for (number, _), part in zip(counts, parts, strict=True) if bool(part.any())}
        return sorted(found)


@torch.no_grad()
def marks_of(tensors: Iterable[torch.Tensor]) -> Marks:
    """As they are now."""
    held = list(tensors)
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(held):
        if (some := _some(tensor)) is not None:
            by_kind.setdefault((some.dtype, some.device), []).append((number, some))
    entries = tuple(torch.cat([some for _, some in of]).view(torch.uint8) for of in by_kind.values())
    counts = tuple(tuple((number, some.nbytes) for number, some in of) for of in by_kind.values())
    return Marks(tuple((tensor.data_ptr(), version(tensor)) for tensor in held), entries, counts)


def _some(tensor: torch.Tensor) -> torch.Tensor | None:
    """Entries all over a tensor, in the order of memory; none of one whose entries share it."""
    count = tensor.numel()
    if not count or not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)):
        return None
    each = -(-count // _ENTRIES)
    return tensor.as_strided((-(-count // each),), (each,), tensor.storage_offset())
