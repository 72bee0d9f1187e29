"""Operations on the rows of an image that a rank program calls beside ATen's and the messages. Each is one line of it.

x[rows 8:20]  = cut_rows(x, 2, ...)              a patch's rows of a value that is the same on all ranks
edge          = edge_rows(h, 2, -1, 1)           the last row, for the patch below
wider         = with_halo(h, up, None, ...)      the patch between its neighbours' rows, zeros at the border
whole         = join_rows([k0, k1], k, 1, ...)   all patches' rows, and what belongs to no row
m             = moments(h, 4)                    mean and variance of a patch's groups; `merge_moments` of all
"""

from collections.abc import Sequence
from functools import cache

import torch

Stretch = tuple[int, int, int, int, int]
"""Entries [at, at + outer*each) of a dimension, seen as outer x each; of each copy `length` from `start` on:
(at, outer, each, start, length)."""


def cut_rows(value: torch.Tensor, dim: int, stretches: Sequence[Stretch]) -> torch.Tensor:
    """A patch's entries of a dimension, one stretch after the other."""
    taken = [_taken(value, dim, *stretch) for stretch in stretches]
    return taken[0] if len(taken) == 1 else torch.cat(taken, dim)


def _taken(value: torch.Tensor, dim: int, at: int, outer: int, each: int, start: int, length: int) -> torch.Tensor:
    if outer == 1:
        return value.narrow(dim, at + start, length)
    copies: torch.Tensor = value.narrow(dim, at, outer * each).unflatten(dim, (outer, each))
    return copies.narrow(dim + 1, start, length).flatten(dim, dim + 1)


def edge_rows(value: torch.Tensor, dim: int, start: int, count: int) -> torch.Tensor:
    """`count` rows from `start` on, for another patch."""
    return value.narrow(dim, start, count)


def with_halo(
    value: torch.Tensor, up: Sequence[torch.Tensor], down: Sequence[torch.Tensor], dim: int, above: int, below: int,
    fill: float | str,
) -> torch.Tensor:  # fmt: skip
    """A patch between rows of others; outside of these, at the image's border, `above` and `below` rows more.

    `fill`: a number, or how these are made of the rows that are here: "reflect" or "replicate".
    """
    rows = [*up, value, *down]
    if isinstance(fill, str) and (above or below):
        rows = [torch.cat(rows, dim)]
        last = rows[0].shape[dim] - 1
        top = [0] * above if fill == "replicate" else list(range(above, 0, -1))
        bottom = [last] * below if fill == "replicate" else list(range(last - 1, last - 1 - below, -1))
        borders = [rows[0].index_select(dim, torch.tensor(at, device=value.device).long()) for at in (top, bottom)]
    else:
        number = 0.0 if isinstance(fill, str) else fill
        shapes = ([*value.shape[:dim], count, *value.shape[dim + 1 :]] for count in (above, below))
        borders = [value.new_full(shape, number) for shape in shapes]
    return torch.cat([part for part in (borders[0], *rows, borders[1]) if part.shape[dim]], dim)


def join_rows(
    rows: Sequence[torch.Tensor], own: torch.Tensor, dim: int, parts: Sequence[tuple[int, Sequence[int]]]
) -> torch.Tensor:
    """A dimension whole again.

    Args:
        rows: of every patch, in order, its entries that belong to rows.
        own: this patch's entries that belong to no row, in order.
        parts: of the dimension, in order: (outer, entries of one copy in every patch), or (0, [entries]) for those
            that belong to no row.
    """
    at, own_at, joined = [0] * len(rows), 0, []
    for outer, sizes in parts:
        if outer == 0:
            joined.append(own.narrow(dim, own_at, sizes[0]))
            own_at += sizes[0]
            continue
        taken = []
        for patch, (value, size) in enumerate(zip(rows, sizes, strict=True)):
            taken.append(value.narrow(dim, at[patch], outer * size).unflatten(dim, (outer, size)))
            at[patch] += outer * size
        joined.append(torch.cat(taken, dim + 1).flatten(dim, dim + 1))
    return torch.cat(joined, dim)


def moments(value: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[2, samples, groups]: mean and biased variance of every group of channels, in float32 or wider."""
    wide = torch.promote_types(value.dtype, torch.float32)
    groups = value.reshape(value.shape[0], num_groups, -1).to(wide)
    mean = groups.mean(-1, keepdim=True)
    left = groups - mean  # two passes and a correction: var_mean takes a CPU core ten times as long
    correction = left.mean(-1)
    variance = (left.square_().mean(-1) - correction.square()).clamp_(min=0)
    return torch.stack([mean.squeeze(-1) + correction, variance])


def merge_moments(parts: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """The moments of all patches' entries from each patch's own, `counts` entries each.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), eq. 2.1;
    in central moments, so that nothing cancels: the variance is never negative.
    """
    return merged_moments(torch.stack(list(parts)), counts)


def merged_moments(parts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """As `merge_moments`, of parts [..., patches, 2, samples, groups] in one."""
    weights = shares(tuple(counts), parts.dtype, parts.device)
    means, variances = parts.unbind(-3)
    mean = (weights * means).sum(-3, keepdim=True)
    spread = (means - mean).square_()
    return torch.cat([mean, (weights * spread.add_(variances)).sum(-3, keepdim=True)], -3)


@cache
def shares(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of patches in the entries of all, [patches, 1, 1]; kept, for a new one would make a GPU wait."""
    return torch.tensor([count / sum(counts) for count in counts], dtype=dtype, device=device).view(-1, 1, 1)


def normalise(
    value: torch.Tensor, merged: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Group normalisation by these moments [2, samples, groups]; `weight` and `bias` by channel."""
    channels = value.shape[1]
    mean, variance = merged.repeat_interleave(channels // merged.shape[2], 2).unsqueeze(-1)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight.unsqueeze(-1)
    normal = (value.reshape(value.shape[0], channels, -1).to(merged.dtype) - mean).mul_(scale)
    if bias is not None:
        normal.add_(bias.unsqueeze(-1))
    result: torch.Tensor = normal.reshape(value.shape).to(value.dtype)
    return result


def add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all patches' parts, in their order: equal to the last bit on every rank."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def power(value: torch.Tensor, exponent: float) -> torch.Tensor:
    """In float32 or wider, where squares of half precision have room."""
    return value.to(torch.promote_types(value.dtype, torch.float32)).pow(exponent)


def root(value: torch.Tensor, exponent: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm whose power a sum over patches is."""
    return value.pow(1 / exponent).to(dtype)
