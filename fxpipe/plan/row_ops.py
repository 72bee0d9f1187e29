"""Operations on the rows of an image that a rank program calls beside ATen's and the messages. Each is one line of it.

x[rows 8:20]  = cut_rows(x, 2, ...)              a patch's rows of a value that is the same on all ranks
edge          = edge_rows(h, 2, -1, 1)           the last row, for the patch below
wider         = with_halo(h, up, None, ...)      the patch between its neighbours' rows, zeros at the border
whole         = join_rows([k0, k1], k, 1, ...)   all patches' rows, and what belongs to no row
o, s          = attend(q, k, v, None)            attention to some of the keys; `join_chunks` with that to others
m             = moments(h, 4)                    mean and variance of a patch's groups; `merge_moments` of all
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

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
    borders = (value.new_empty([*value.shape[:dim], n, *value.shape[dim + 1 :]]) for n in (above, below))
    top, bottom = borders
    wider = torch.cat([part for part in (top, *up, value, *down, bottom) if part.shape[dim]], dim)
    return set_border(wider, dim, above, below, fill)


def set_border(value: torch.Tensor, dim: int, above: int, below: int, fill: float | str) -> torch.Tensor:
    """A value of this rank alone, its first `above` and last `below` rows made what the image's border is: in place."""
    last = value.shape[dim] - 1 - below
    for row in (*range(above), *range(last + 1, last + 1 + below)):
        if isinstance(fill, str):
            border = above if row < above else last
            value.select(dim, row).copy_(value.select(dim, border if fill == "replicate" else 2 * border - row))
        else:
            value.select(dim, row).fill_(fill)
    return value


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


def join_patches(patches: Sequence[torch.Tensor], dim: int, parts: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """A dimension whole again, of what every patch has of it; `parts` as for `join_rows`, but of what belongs to no
    row the entries that each patch has, the first one's of which count."""
    at, joined = [0] * len(patches), list[torch.Tensor]()
    for outer, sizes in parts:
        taken = []
        for patch, (value, size) in enumerate(zip(patches, sizes, strict=True)):
            length = (outer or 1) * size
            taken.append(value.narrow(dim, at[patch], length).unflatten(dim, (outer or 1, size)))
            at[patch] += length
        joined.append(torch.cat(taken if outer else taken[:1], dim + 1).flatten(dim, dim + 1))
    return torch.cat(joined, dim)


def moments(value: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[2, samples, groups]: mean and biased variance of every group of channels, in float32 or wider."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32)).contiguous()
    samples, channels, size = wide.shape[0], wide.shape[1], wide[0, 0].numel()
    # the kernel of whole maps, for what it tells beside the normalised map; var_mean takes a CPU core ten times as long
    _, mean, scale = torch.native_group_norm(wide, None, None, samples, channels, size, num_groups, 0.0)
    return torch.stack([mean, scale.pow(-2)])


def merge_moments(parts: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """The moments of all patches' entries from each patch's own, `counts` entries each.

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), eq. 2.1;
    in central moments, so that nothing cancels: the variance is never negative.
    """
    means, variances = torch.stack(list(parts), 1)
    weights = shares(tuple(counts), means.dtype, means.device)
    mean = torch.tensordot(weights, means, 1)
    apart = means - mean
    return torch.stack([mean, torch.tensordot(weights, torch.addcmul(variances, apart, apart), 1)])


@cache
def shares(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of patches in the entries of all; kept, for a new one would make a GPU wait."""
    return torch.tensor([count / sum(counts) for count in counts], dtype=dtype, device=device)


def normalise(
    value: torch.Tensor, merged: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Group normalisation by these moments [2, samples, groups]; `weight` and `bias` by channel."""
    mean, variance = merged.repeat_interleave(value.shape[1] // merged.shape[2], 2)  # of every sample's channels
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias.to(scale.dtype), mean, scale, value=-1)
    each = *scale.shape, *(1 for _ in value.shape[2:])
    return (value * scale.view(each)).add_(shift.view(each)).to(value.dtype)


def is_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool = False) -> bool:
    """Whether kernels of torch compute this attention at once, and hold no scores; `grouped`: heads may be fewer."""
    operands = query, key, value
    is_plain = all(tensor.dim() == 4 and tensor.stride(-1) == 1 for tensor in operands)
    return is_plain and len({tensor.shape[: 1 if grouped else 2] for tensor in operands}) == 1


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the keys, and for every query the logarithm of the sum of its scores' exponentials.

    Args:
        query: [..., heads, queries, width]; of key and value there may be fewer heads, of which each serves as many.
    """
    q, k, v = (tensor.reshape(-1, *tensor.shape[-3:]) for tensor in (query, key, value))
    result, log_sum = _attended(q, k, v, scale)
    return result.reshape(*query.shape[:-1], value.shape[-1]), log_sum.reshape(query.shape[:-1])


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel that torch's own attention would take, where that tells its sums."""
    shared, device = q.shape[1] != k.shape[1], q.device.type
    way = SDPBackend(torch._fused_sdp_choice(q, k, v, scale=scale, enable_gqa=shared))
    if device == "cpu" and way == SDPBackend.FLASH_ATTENTION:
        result, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        return result, log_sum
    half = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0
    if device == "cuda" and half and way in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        result, log_sum, *_ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return result, log_sum
    if device == "cuda" and not shared and way == SDPBackend.EFFICIENT_ATTENTION:
        result, log_sum, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
        return result, log_sum[..., : q.shape[2]]  # its rows are padded
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q.to(wide) @ k.to(wide).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype), scores.logsumexp(-1)


def join_chunks(
    result: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, more_log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of two chunks, from that to each, in float32 or wider.

    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), section 3; by
    differences of logarithms, so that nothing overflows.
    """
    wide = torch.promote_types(result.dtype, torch.float32)
    share = torch.sigmoid(more_log_sum - log_sum).to(wide).unsqueeze(-1)
    return torch.lerp(result.to(wide), more.to(wide), share), torch.logaddexp(log_sum, more_log_sum)


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
