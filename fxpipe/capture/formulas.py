"""Formulas of operations inside a transform of functions (`torch.func.jvp`, `grad`, `vmap`), in place of their kernels.

EXACT        kernels that give a wrong derivative of a derivative, or none: on one device and in a trace
IN_A_TRACE   kernels whose derivatives take sizes for numbers, or ask for strides: in a trace alone
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fxpipe.capture import private
from fxpipe.capture.calls import Table


def _cat(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    if private.under_vmap() or len(set(map(private.has_tangent, tensors))) > 1:
        return _joined(tensors, dim)
    return func(tensors, dim)  # type: ignore[no-any-return]


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`cat` as a sum of padded parts: under vmap, or of what has a tangent with what has none, it fixes sizes."""
    dim, total, before = dim % tensors[0].ndim, sum(t.shape[dim] for t in tensors), 0
    parts = []
    for tensor in tensors:
        after = total - before - tensor.shape[dim]
        parts.append(F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [before, after]))
        before += tensor.shape[dim]
    return functools.reduce(torch.add, parts)


def _linear(func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """On rows alone: of more dimensions torch's own takes the sizes of a wrapped tensor for numbers."""
    if input.ndim <= 2:
        return func(input, weight, bias)  # type: ignore[no-any-return]
    rows: torch.Tensor = func(input.flatten(0, -2), weight, bias)
    return rows.reshape(*input.shape[:-1], -1)


def _gelu(func: Any, input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Its formula under vmap, where torch takes the sizes that its derivative asks for as numbers."""
    if not private.under_vmap():
        return func(input, approximate=approximate)  # type: ignore[no-any-return]
    if approximate == "tanh":
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * input**3)))
    return 0.5 * input * (1.0 + torch.erf(input * math.sqrt(0.5)))


def _glu(func: Any, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _dropout(
    func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or inplace or not 0.0 < p < 1.0:
        return func(input, p, training, inplace)  # type: ignore[no-any-return]
    return torch.where(torch.rand_like(input) < p, 0.0, input / (1.0 - p))


def _pad(
    func: Any, input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> torch.Tensor:
    """Rows of the input in another order, where none is a constant: the derivatives of the kernels write in place."""
    if mode == "constant" or _is_refused(input, pad, mode):
        return func(input, pad, mode, value)  # type: ignore[no-any-return]
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        last = input.shape[-1 - place] - 1
        rows = torch.arange(-before, last + 1 + after, device=input.device)
        if mode == "reflect":
            rows = last - (last - rows.abs()).abs()
        rows = rows % (last + 1) if mode == "circular" else rows.clamp(0, last)
        input = _index_select(torch.index_select, input, -1 - place, rows)
    return input


def _index_select(func: Any, input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Its kernel's own derivative takes sizes for numbers (2.11, 2.12)."""
    if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64) or not -input.ndim <= dim < input.ndim:
        return func(input, dim, index)  # type: ignore[no-any-return]
    return input[(slice(None),) * (dim % input.ndim) + (index,)]


def _embedding(
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of a table that may be another for each sample, whose number its kernel's own derivative fixes."""
    if not private.under_vmap() or padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)  # type: ignore[no-any-return]
    return weight[input]


def _is_refused(input: torch.Tensor, pad: Sequence[int], mode: str) -> bool:
    """Whether torch pads other dimensions, or repeats rows at most once; a size that is a symbol is not checked."""
    if input.ndim - len(pad) // 2 not in (1, 2):
        return True
    most = {"reflect": -1, "circular": 0}.get(mode, math.inf)
    sizes = zip(reversed(input.shape), pad[::2], pad[1::2], strict=False)
    return any(isinstance(size, int) and max(both) > size + most for size, *both in sizes)


def _layer_norm(
    func: Any,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    return _affine(_normalised(input, tuple(range(-len(normalized_shape), 0)), eps), weight, bias, input.dtype)


def _group_norm(
    func: Any,
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Its kernel's own derivative asks for sizes as numbers, and for strides."""
    groups = _normalised(input.unflatten(1, (num_groups, -1)), tuple(range(2, input.ndim + 1)), eps).flatten(1, 2)
    scale, shift = (p if p is None else p.view(-1, *[1] * (input.ndim - 2)) for p in (weight, bias))
    return _affine(groups, scale, shift, input.dtype)


def _instance_norm(
    func: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if running_mean is not None or running_var is not None or not use_input_stats:
        return func(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)  # type: ignore[no-any-return]
    return _group_norm(func, input, input.shape[1], weight, bias, eps)


def _normalised(input: torch.Tensor, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    """In float32 at least, as kernels take moments of a lower precision."""
    wide = _of_type(input, torch.promote_types(input.dtype, torch.float32))
    centred = wide - wide.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(
    value: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    scaled = value if weight is None else value * weight
    return _of_type(scaled if bias is None else scaled + bias, dtype)


def _of_type(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype == dtype else value.to(dtype)


def _attention(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused kernels have no derivative of a derivative, and none forward; where nothing is transformed they stay."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
    if is_causal:
        earlier = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is None:
            attn_mask = earlier
        else:  # of torch's kernels that of CPUs takes both
            attn_mask = torch.where(earlier, attn_mask, False if attn_mask.dtype == torch.bool else -math.inf)
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:  # a row that sees nothing has weight on nothing
        is_bool = attn_mask.dtype == torch.bool
        seen, scores = (attn_mask, scores) if is_bool else (attn_mask != -math.inf, scores + attn_mask)
        weights = torch.where(seen, torch.where(seen, scores, -math.inf).softmax(-1), 0.0)
    return _dropout(F.dropout, weights, dropout_p) @ value


# Of layer and instance norms torch takes mean and deviation for constants where a jvp is differentiated (2.13).
EXACT: Table = {
    F.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
    F.scaled_dot_product_attention: _attention,
    F.glu: _glu,
    F.dropout: _dropout,
}
IN_A_TRACE: Table = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.gelu: _gelu,
    F.group_norm: _group_norm,
    F.pad: _pad,
    torch.index_select: _index_select,
    torch.Tensor.index_select: _index_select,
    torch.cat: _cat,
    torch.concat: _cat,
}
