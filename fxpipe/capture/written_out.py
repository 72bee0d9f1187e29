"""Calls that torch.export fixes to one batch size, that cut rows by numbers in tensors, or that no rule follows as they
are, written with others.

    take_along_dim(x, i, 1)        ->   gather(x, 1, i)
    tensor([[0, 1]] * batch)       ->   tensor([0, 1]).repeat(batch, 1)
    tensor(height)                 ->   scalar_tensor(height)
    linspace(0, 1, batch + 1)      ->   where(i < half, i * step, 1 - (batch - i) * step), of i = arange(batch + 1)
    kron(a, b)                     ->   (a[:, None, :, None] * b[None, :, None]).reshape(...)
    pad_sequence([a, b])           ->   stack([a, pad(b, ...)], 1)
    bincount(x, minlength=10)      ->   zeros(10).index_add(0, x, ones), which raises where there are more
    _foreach_lerp_([a, b], c, 0.1) ->   a.lerp_(c[0], 0.1), b.lerp_(c[1], 0.1)
    gaussian_nll_loss(x, y, var)   ->   without its look at variances, which only raises errors

Only the trace does so: `program.verify` compares what is written here with torch's own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fxpipe.capture import private
from fxpipe.capture.calls import Table
from fxpipe.capture.size_reads import Repeated
from fxpipe.capture.sizes import is_symbolic


def _take_along_dim(func: Any, input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    if dim is None or input.ndim != indices.ndim:
        return func(input, indices, dim)  # type: ignore[no-any-return]
    dim %= input.ndim
    pairs = zip(input.shape, indices.shape, strict=True)
    shape = [a if isinstance(b, int) and b == 1 else b for a, b in pairs]
    table = input.expand(*shape[:dim], -1, *shape[dim + 1 :])
    return table.gather(dim, indices.expand(*shape[:dim], -1, *shape[dim + 1 :]))


def _kron(func: Any, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    ndim = max(input.ndim, other.ndim)
    a, b = (t.reshape((1,) * (ndim - t.ndim) + t.shape) for t in (input, other))
    shape = [m * n for m, n in zip(a.shape, b.shape, strict=True)]
    for dim in range(ndim):
        a, b = a.unsqueeze(2 * dim + 1), b.unsqueeze(2 * dim)
    return (a * b).reshape(shape)


def _pad_sequence(
    func: Any,
    sequences: Sequence[torch.Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    """Each padded to the longest."""
    longest = functools.reduce(torch.sym_max, [one.shape[0] for one in sequences])
    missing = [longest - one.shape[0] for one in sequences]
    padded = [
        F.pad(one, _ends(one, number, padding_side), value=padding_value) if is_symbolic(number) or number else one
        for one, number in zip(sequences, missing, strict=True)
    ]
    return torch.stack(padded, 0 if batch_first else 1)


def _ends(one: torch.Tensor, number: int, side: str) -> list[int]:
    return [0] * (2 * one.ndim - 2) + ([0, number] if side == "right" else [number, 0])


def _tensor(func: Any, data: Any, **options: Any) -> torch.Tensor:
    if is_symbolic(data):
        return torch.scalar_tensor(data, **{"dtype": torch.int64, **options})
    if type(data) is Repeated and data.is_made:
        data = data.made
    if type(data) is not Repeated:
        return func(data, **options)  # type: ignore[no-any-return]
    row = func(data.row, **options)
    return row.repeat(data.count, *[1] * row.ndim)  # type: ignore[no-any-return]


def _linspace(func: Any, start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
    """From both ends to the middle, as torch's own: a step of the kind, times and plus which is rounded once."""
    kind = options.get("dtype") or torch.get_default_dtype()
    if not is_symbolic(steps) or not kind.is_floating_point or options.get("out") is not None:
        return func(start, end, steps, **options)  # type: ignore[no-any-return]
    places = torch.arange(steps, **{**options, "dtype": torch.float64})
    first, last = (torch.as_tensor(one, dtype=kind, device=places.device) for one in (start, end))
    step = ((last - first) / torch.sym_max(steps - 1, 1)).double()
    upwards, downwards = first.double() + step * places, last.double() - step * (steps - 1 - places)
    return torch.where(places < torch.sym_max(steps // 2, 1), upwards, downwards).to(kind)


def _each(func: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """A tensor at a time, by its own of what are lists."""
    tensors, *args = (options.pop("self"), *args) if "self" in options else args  # type: ignore[assignment]
    args = (*args, *(options.pop(key) for key in ("scalar", "scalars", "other") if key in options))
    name = func.__name__.removeprefix("_foreach_").replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    if name.startswith("addc") and len(args) > 2:
        *args, options["value"] = args  # type: ignore[assignment]
    if isinstance(options.get("value"), torch.Tensor):  # of a number for each
        numbers = options.pop("value").detach().unbind()
        args = ([one * number for one, number in zip(args[0], numbers, strict=True)], *args[1:])

    def own(place: int) -> Any:
        values = [one[place] if isinstance(one, list | tuple) else one for one in (*args, *options.values())]
        return getattr(torch.Tensor, name)(
            tensors[place], *values[: len(args)], **dict(zip(options, values[len(args) :], strict=True))
        )

    return tuple([own(place) for place in range(len(tensors))])


def _bincount(func: Any, input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if minlength <= 0:
        return func(input, weights, minlength)  # type: ignore[no-any-return]
    if weights is None:
        added = torch.ones_like(input, dtype=torch.int64)
    else:
        added = weights if weights.dtype == torch.float32 else weights.double()
    return added.new_zeros(minlength).index_add(0, input.long(), added)


def _gaussian_nll_loss(func: Any, *args: Any, **options: Any) -> torch.Tensor:
    with private.replaced(torch, "any", lambda found: False):
        return func(*args, **options)  # type: ignore[no-any-return]


_FOREACH = {name for name in dir(torch) if name.startswith("_foreach_")} - {"_foreach_pow", "_foreach_powsum"}

WRITTEN_OUT: Table = {
    **{getattr(torch, name): _each for name in _FOREACH},
    torch.linspace: _linspace,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    torch.kron: _kron,
    torch.Tensor.kron: _kron,
    **dict.fromkeys((torch.bincount, torch.Tensor.bincount), _bincount),
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.linalg.multi_dot: lambda func, tensors: functools.reduce(torch.matmul, tensors),
    torch._C._nn.pad_sequence: _pad_sequence,
}
