"""Operations of displaced forms: values of others that come from the step before. Each is one line of a program.

flat = pack([k, v, edge])                         one message of several values
k, v, edge = unpack(flat, shapes)                 a step later, on another rank
carried = done(flat)                              what has arrived already, as if it had been posted
k_now = advanced(k, k_earlier, alpha)             moved on by its own last change
m = corrected_moments(latest, before, [0], ...)   others' moments moved on as one's own have moved

rows = own_rows(x, 1, 2, sizes, ...)              patch 1 of an input; of patches on their way it alone is waited for
k = put(k, k_own, 2, ...)                         what a patch has of a value, over what it had in the step before
"""

from collections.abc import Sequence

import torch

from fxpipe.plan.row_ops import Stretch, cut_rows, merged_moments, shares
from fxpipe.plan.transport import Pending

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


def kept_going(now: torch.Tensor, last: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """How much of its last change a flat value has gone through again, in [0, 1]: by least squares; else 0."""
    wide = torch.promote_types(now.dtype, torch.float32)
    change, before = (now - last).to(wide), (last - earlier).to(wide)
    size = before.dot(before)
    return torch.where(size > 0, (change.dot(before) / size).clamp_(0, 1), 0)


def advanced(latest: torch.Tensor, earlier: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """A value moved on by this much of its last change."""
    return (latest - earlier).mul_(alpha.to(latest.dtype)).add_(latest)


def done(value: torch.Tensor) -> Pending[torch.Tensor]:
    """A receive that is over."""
    return Pending(lambda: value)


def corrected_moments(
    latest: Sequence[torch.Tensor], before: Sequence[torch.Tensor], fresh: Sequence[int], counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of all patches' entries where only the patches `fresh` have told those of this step.

    The others are taken to have moved as these did. Li et al., "DistriFusion" (CVPR 2024), eq. 2, in central moments,
    for any number of fresh patches; with one it is the paper's, with all it is exact. With dm the change of a mean and
    dq that of a mean of squares, a stale patch of mean m and variance v gets m + dm and

        v + dq - 2 m dm - dm^2,   dq - 2 m dm = change of variance + dm (mean now + mean before - 2 m)

    written as on the right, of differences of means, so that nothing cancels where means are large. Where patches move
    apart the variance may fall far below that of the latest moments, even below zero: these are then used as they are.

    Args:
        latest: of every patch, [2, samples, groups], its latest moments; those of `fresh` are of this step.
        before: of every patch in `fresh`, those of the step before.
        counts: entries of every patch in one group.

    Returns:
        The moments [2, samples, groups], and how many groups of samples fell back to the merged latest ones.
    """
    stale, told = torch.stack(list(latest)), torch.stack([latest[patch] for patch in fresh])
    weights = shares(tuple(counts[patch] for patch in fresh), told.dtype, told.device)
    mean_now, variance_now = told.unbind(1)
    mean_old, variance_old = torch.stack(list(before)).unbind(1)
    mean, variance = stale.unbind(1)
    moved = weights * (mean_now - mean_old)
    shift = moved.sum(0)
    apart = (mean_now - mean.unsqueeze(1)) + (mean_old - mean.unsqueeze(1))  # [patches, fresh, samples, groups]
    variance = variance + (weights * (variance_now - variance_old) + moved * apart).sum(1) - shift.square()
    as_fresh = torch.stack([mean + shift, variance], 1)
    parts = torch.stack([part if patch in fresh else as_fresh[patch] for patch, part in enumerate(latest)])
    merged, corrected = merged_moments(torch.stack([stale, parts]), counts)
    usable = corrected[1] > UNUSABLE * merged[1]
    return torch.where(usable, corrected, merged), (~usable).sum()


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
