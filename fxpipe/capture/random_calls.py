"""Random calls rewritten, while forward runs, into draws that depend on shapes alone.

    bernoulli(p)               ->   rand(shape) < p
    multinomial(p, 1)          ->   searchsorted(cumsum(p) / sum(p), rand(shape))
    x.random_(1, 9)            ->   x.copy_(randint(1, 9, shape)), as no graph's text can name that operation
    lstm(x, dropout=0.1)       ->   a layer at a time, with dropout between

A compiled program and the uncompiled model beside it (`program.verify`) both draw so, and draw the same numbers.
"""

import functools
from typing import Any

import torch
from torch.nn import functional as F

from fxpipe.capture.calls import Table

# Self-normalising networks' saturation, -scale * alpha of SELU (Klambauer et al., 2017, section 3).
_SELU_LIMIT = 1.7580993408473766


def _bernoulli(func: Any, input: torch.Tensor, p: float | None = None) -> torch.Tensor:
    if p is not None:
        return func(input, p)  # type: ignore[no-any-return]
    return (torch.rand_like(input) < input).to(input.dtype)


def _normal(func: Any, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> torch.Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if not tensors:
        return func(mean, std, *args, **kwargs)  # type: ignore[no-any-return]
    like = torch.broadcast_tensors(*tensors)[0]
    drawn: torch.Tensor = mean + std * torch.randn(like.shape, dtype=like.dtype, device=like.device)
    return drawn


def _multinomial(func: Any, input: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
    """With replacement by inverting the distribution; without, the largest of p / exponential (as torch does)."""
    if not replacement and not (isinstance(num_samples, int) and num_samples == 1):
        return (input / torch.empty_like(input).exponential_()).topk(num_samples, -1).indices
    sums = input.cumsum(-1)
    uniform = torch.rand((*input.shape[:-1], num_samples), dtype=input.dtype, device=input.device)
    return torch.searchsorted(sums / sums[..., -1:], uniform, right=True)


def _random(func: Any, input: torch.Tensor, *bounds: Any, **options: Any) -> torch.Tensor:
    named = {"from": None, "to": None, **dict(zip(("from", "to"), bounds, strict=False)), **options}
    first, to = named.pop("from"), named.pop("to")
    if first is None or to is None:
        return func(input, *bounds, **options)  # type: ignore[no-any-return]
    return input.copy_(torch.randint(first, to, input.shape, device=input.device, **named))


def _dirichlet(func: Any, concentration: torch.Tensor) -> torch.Tensor:
    """Gamma variates over their sum (a Beta distribution is one of two)."""
    gamma: torch.Tensor = torch._standard_gamma(concentration)
    return gamma / gamma.sum(-1, keepdim=True)


def _rrelu(
    func: Any,
    input: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slopes = torch.where(input > 0, 1.0, lower + (upper - lower) * torch.rand_like(input))
    return input.mul_(slopes) if inplace else input * slopes


def _alpha_dropout(
    func: Any, input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    """What is dropped takes the activation's lower limit, and all is scaled to keep mean and variance."""
    if not training or p == 0:
        return input
    if p == 1:
        return input.mul_(0.0) if inplace else input * 0.0
    whole_channels = func is F.feature_alpha_dropout
    shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if whole_channels else input.shape
    scale = ((_SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5
    kept = (torch.rand(shape, dtype=input.dtype, device=input.device) >= p).to(input.dtype)
    factor, shift = kept * scale, (kept - 1 + p) * (_SELU_LIMIT * scale)
    return input.mul_(factor).add_(shift) if inplace else input * factor + shift


def _recurrent(func: Any, input: torch.Tensor, *args: Any) -> Any:
    """A recurrent network with dropout between its layers, layer by layer."""
    if len(args) != 8 or not isinstance(args[2], bool):
        return func(input, *args)  # of packed sequences
    hx, weights, biases, num_layers, dropout, training, both, batch_first = args
    if not training or dropout == 0 or num_layers == 1:
        return func(input, *args)
    states, per_layer, directions = hx if isinstance(hx, list | tuple) else [hx], len(weights) // num_layers, 1 + both
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(num_layers):
        first = [state.narrow(0, layer * directions, directions) for state in states]
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        given = first if isinstance(hx, list | tuple) else first[0]
        input, *final = func(input, given, own, biases, 1, 0.0, training, both, batch_first)
        last.append(tuple(final))
        if layer < num_layers - 1:
            input = F.dropout(input, dropout)
    return input, *(torch.cat(parts) for parts in zip(*last, strict=True))


RANDOM_CALLS: Table = {
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.random_: _random,
    torch._sample_dirichlet: _dirichlet,
    F.rrelu: _rrelu,
    F.rrelu_: functools.partial(_rrelu, inplace=True),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _alpha_dropout),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
