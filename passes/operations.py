"""What analyses of a captured graph ask of ATen's operations: their names, their arguments by name, kinds of them.

aten.conv2d.default(x, w, None, [2, 2])   ->   conv2d   {input: x, weight: w, bias: None, stride: [2, 2], ...}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

# Elementwise operations that ATen does not tag as such.
ELEMENTWISE = frozenset(
    """
    contiguous clone detach alias alias_copy lift lift_fresh lift_fresh_copy zeros_like ones_like full_like empty_like
    fill masked_fill where rsub absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide multiply subtract
    negative fix floor_divide greater greater_equal less less_equal not_equal hardswish log_sigmoid complex polar real
    imag conj _conj _conj_physical resolve_conj _neg_view resolve_neg float_power square copy isclose isreal
    special_expit
    """.split()
)
# Operations along the dimensions that their arguments dim, dims, dimension, dim1 and dim2 name; all without these.
ALONG = frozenset(
    """
    softmax log_softmax _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk argsort kthvalue
    median nanmedian mode glu flip roll amax amin aminmax max min argmax argmin prod var std var_mean std_mean norm
    linalg_vector_norm frobenius_norm linalg_norm logsumexp all any count_nonzero nansum nanmean select unbind scatter
    scatter_add scatter_reduce diff unfold linalg_cross diagonal cosine_similarity
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift
    """.split()
)
CASTS = frozenset(("to", "_to_copy", "type_as"))
VIEWS = frozenset("reshape view _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel".split())
PERMUTATIONS = frozenset("permute transpose t numpy_T mT mH adjoint movedim moveaxis swapaxes swapdims".split())
FACTORIES = frozenset("zeros ones full empty new_zeros new_ones new_full new_empty".split())
EXPANSIONS = frozenset(("expand", "expand_as", "broadcast_to"))
PIECES = frozenset("split split_with_sizes chunk tensor_split".split())
UNSAFE_PIECES = frozenset("unsafe_split unsafe_split_with_sizes unsafe_chunk".split())
PRODUCTS = frozenset("matmul mm bmm mv dot addmm baddbmm addmv".split())


@cache
def operation_name(target: Any) -> str:
    """An operation's name without its overload; in-place ones as their functional form."""
    packet = getattr(target, "overloadpacket", target)
    name = str(getattr(packet, "__name__", packet))
    return name if name.startswith("__") else name.removesuffix("_")


def is_pointwise(target: Any) -> bool:
    """Whether ATen itself says that every entry of the result is made of the entries at its place."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments under their schema names, defaults included; by number where there is no schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {str(i): a for i, a in enumerate(node.args)}
    args, kwargs = node.args, node.kwargs
    return {
        p.name: args[index] if index < len(args) else kwargs.get(p.name, p.default)
        for index, p in enumerate(_parameters(target))
    }


@dataclass(frozen=True)
class BoundCall:
    """One call_function node."""

    node: fx.Node

    @cached_property
    def name(self) -> str:
        return operation_name(self.node.target)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        return bound_arguments(self.node)


def call_arguments(target: Any, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of a call with these arguments by schema name, without those that have their defaults."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    in_place = True  # no argument has been left out so far
    for parameter in _parameters(target):
        value = named.get(parameter.name, parameter.default)
        if parameter.has_default and _same(value, parameter.default):
            in_place = False
        elif in_place and not parameter.kwarg_only:
            args.append(value)
        else:
            kwargs[parameter.name] = value
    return tuple(args), kwargs


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


class _Parameter(NamedTuple):
    name: str
    has_default: bool
    default: Any
    kwarg_only: bool


@cache
def _parameters(target: Any) -> tuple[_Parameter, ...]:
    """Of a schema, whose own are made anew whenever they are asked for."""
    of_schema = ((a, a.has_default_value()) for a in target._schema.arguments)
    return tuple(_Parameter(a.name, has, a.default_value if has else None, a.kwarg_only) for a, has in of_schema)


def dimension(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim + ndim if dim < 0 else dim


def acted_dims(arguments: Mapping[str, Any], ndim: int) -> set[int]:
    """The dimensions that a call names; all where it names none."""
    given = [arguments.get(name) for name in ("dim", "dims", "dimension", "dim1", "dim2")]
    named = [d for dims in given if dims is not None for d in (dims if isinstance(dims, list | tuple) else [dims])]
    return {dimension(d, ndim) for d in named} or set(range(ndim))


def matrix_labels(a: int, b: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Labels of the dimensions of a matrix product: of its factors with `a` and `b` dimensions, and of the result."""
    lead_a: list[Any] = [("lead", j) for j in range(a - 2, 0, -1)]
    lead_b: list[Any] = [("lead", j) for j in range(b - 2, 0, -1)]
    first = [*lead_a, "n", "k"] if a > 1 else ["k"]
    second = [*lead_b, "k", "m"] if b > 1 else ["k"]
    out = max(lead_a, lead_b, key=len) + (["n"] if a > 1 else []) + (["m"] if b > 1 else [])
    return first, second, out


def einsum_labels(equation: str, ndims: list[int]) -> tuple[list[list[Any]], list[Any]]:
    """Labels of the dimensions of an einsum's factors, which have `ndims` dimensions, and of its result."""
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = sorted(c for c in set(inputs) - set(",.") if inputs.count(c) == 1)
        output = ("..." if "..." in inputs else "") + "".join(letters)
    dots = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    labels = [_term_labels(term, count) for term, count in zip(terms, dots, strict=True)]
    most = max((sum(isinstance(x, tuple) for x in one) for one in labels), default=0)
    return labels, _term_labels(output, most)


def _term_labels(term: str, dots: int) -> list[Any]:
    head, found, tail = term.partition("...")
    middle: list[Any] = [("lead", j) for j in range(dots, 0, -1)] if found else []
    return [*head, *middle, *tail]
