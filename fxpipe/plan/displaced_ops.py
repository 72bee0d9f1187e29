"""Operations of displaced forms: values of others that come from the step before. Each is one line of a program.

flat = pack([k, v, edge])                         one message of several values
k, v, edge = unpack(flat, shapes)                 a step later, on another rank
carried = done(flat)                              what has arrived already, as if it had been posted
k_now = advanced(k, k_change, alpha)              moved on by its own last change
m, usable = corrected(latest, before, [0], ...)   others' moments moved on as one's own have moved, and where they are
usable = counted(usable before, [usable, ...])    of all of a step's corrected ones the share, added up over steps

rows = own_rows(x, 1, 2, sizes, ...)              patch 1 of an input; of patches on their way it alone is waited for
k = put(k, k_own, 2, ...)                         what a patch has of a value, over what it had in the step before
"""

from collections.abc import Sequence

import torch

from fxpipe.plan.row_ops import Stretch, cut_rows, merge_moments, shares
from fxpipe.plan.transport import Pending

USABLE = "usable"
"""Under which a step carries what is `counted`."""
UNUSABLE = 0.25  # of the merged variance: a corrected one below this is not used


def pack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """All entries of values of one dtype, one value after the other."""
    flat = [value.reshape(-1) for value in values]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The values of these shapes that were packed, as views."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(tuple(shape)) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def flat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all entries, which keeps nothing else alive."""
    return torch.cat([value.reshape(-1) for value in values])


def change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What a flat value has gone through in a step."""
    return now - before


def kept_going(change: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """How much of its last change a flat value goes through again, in [0, 1]: by least squares; 0 after none."""
    wide = torch.promote_types(change.dtype, torch.float32)
    new, old = change.to(wide), last.to(wide)
    return new.dot(old).div_(old.dot(old)).clamp_(0, 1).nan_to_num_(0).to(change.dtype)


def advanced(latest: torch.Tensor, change: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """A value moved on by this much of its last change."""
    return torch.addcmul(latest, change, alpha)


def done(value: torch.Tensor) -> Pending[torch.Tensor]:
    """A receive that is over."""
    return Pending(lambda: value)


def held(values: Sequence[object]) -> None:
    """What crosses to the next step: there to the end of this one, whether that reads it or not."""


def corrected(
    latest: Sequence[torch.Tensor], before: Sequence[torch.Tensor], fresh: Sequence[int], counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of all patches' entries where only the patches `fresh` have told those of this step.

    The others are taken to have moved as these did. Li et al., "DistriFusion" (CVPR 2024), eq. 2, for any number of
    fresh patches; with one it is the paper's, with all it is exact. With M and V the merged latest moments, s and q the
    mean changes of the fresh ones' means and mean squares, and a the share of all others in the entries, all have

        mean M + a s,   variance V + a q' - a a s s,   q' = q - 2 M s = change of variance + s (now - M + before - M)

    of each fresh patch's means now and before: differences of means, so that nothing cancels where means are large.
    Where patches move apart the variance may fall far below V, even below zero: then M and V are used as they are.

    Args:
        latest: of every patch, [2, samples, groups], its latest moments; those of `fresh` are of this step.
        before: of every patch in `fresh`, those of the step before.
        counts: entries of every patch in one group.

    Returns:
        The moments [2, samples, groups], and which [samples, groups] of them are corrected ones.
    """
    merged = merge_moments(latest, counts)
    mean, variance = merged
    now, old = torch.stack([latest[patch] for patch in fresh], 1), torch.stack(list(before), 1)
    weights = shares(tuple(counts[patch] for patch in fresh), mean.dtype, mean.device)
    moved, widened = now - old  # [fresh, samples, groups]
    apart = (now[0] - mean).add_(old[0] - mean)
    shift, change = torch.tensordot(torch.stack([moved, torch.addcmul(widened, moved, apart)]), weights, ([1], [0]))
    others = 1 - sum(counts[patch] for patch in fresh) / sum(counts)
    widths = variance.add(change, alpha=others).addcmul_(shift, shift, value=-(others**2))
    usable = widths > UNUSABLE * variance
    found = torch.stack([mean.add(shift, alpha=others), widths])
    return torch.where(usable, found, merged), usable


def uncounted(like: torch.Tensor) -> torch.Tensor:
    """What is `counted` before the first displaced step, on the device of another value."""
    return torch.zeros((), dtype=torch.float32, device=like.device)


def counted(before: torch.Tensor, usable: Sequence[torch.Tensor]) -> torch.Tensor:
    """The shares of corrected moments that were usable, added up over the steps so far and this one; on the device."""
    return before + torch.cat([each.reshape(-1) for each in usable]).mean(dtype=before.dtype)


def own_rows(
    value: torch.Tensor, patch: int, dim: int, sizes: Sequence[int], stretches: Sequence[Stretch]
) -> torch.Tensor:
    """A patch's rows of an input that may come in patches of these sizes, one after the other."""
    part_of = getattr(value, "part_of", None)
    part: torch.Tensor | None = None if part_of is None else part_of(patch, dim, sizes)
    return cut_rows(value, dim, stretches) if part is None else part


def put(cache: torch.Tensor, value: torch.Tensor, dim: int, stretches: Sequence[Stretch]) -> torch.Tensor:
    """The cache, in which a patch's entries of a dimension are `value`'s now. It is written in place."""
    at = 0
    for first, outer, each, start, length in stretches:
        kept = cache.narrow(dim, first, outer * each).unflatten(dim, (outer, each)).narrow(dim + 1, start, length)
        kept.copy_(value.narrow(dim, at, outer * length).unflatten(dim, (outer, length)))
        at += outer * length
    return cache
