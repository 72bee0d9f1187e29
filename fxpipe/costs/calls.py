"""A graph node's call as hashable data: what costs depend on, and nothing else.

    %y = aten.linear.default(%x, %w)   ->   Call(aten.linear.default, (Operand(0, (s, 64), ...), Operand(1, ...)), ...)

Nodes of equal calls have equal costs, so repeated layers are counted once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

from fxpipe.capture.private import tensors_in
from fxpipe.capture.sizes import concrete

Dim: TypeAlias = int | sympy.Expr
Gradient = Literal["none", "input", "weight"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call reads or returns; `index` tells a call's distinct tensors apart.

    `gradient` says what its gradient is: none is needed, that of an activation, or that of something computed from
    parameters alone.
    """

    index: int
    sizes: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    gradient: Gradient

    @property
    def num_bytes(self) -> Dim:
        """Bytes of the distinct elements: an expanded dimension (stride 0) is stored once."""
        stored = (size for size, stride in zip(self.sizes, self.strides, strict=True) if stride != 0)
        return product(stored) * self.dtype.itemsize

    def empty(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        """Such a tensor at one batch size; requires grad where the operand does."""
        sizes, strides = concrete(self.sizes, num_samples), concrete(self.strides, num_samples)
        tensor = torch.empty_strided(sizes, strides, dtype=self.dtype, device=device)
        return tensor.requires_grad_(self.gradient != "none")


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with its arguments, where tensors are `Operand`s and symbolic integers are expressions."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Operand, ...]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The distinct tensors that are read."""
        found = operands((self.args, tuple(value for _, value in self.kwargs)))
        return tuple({operand.index: operand for operand in found}.values())

    def run(
        self, tensors: Mapping[int, torch.Tensor], num_samples: int, device: torch.device | str
    ) -> list[torch.Tensor]:
        """The tensors that the operator returns at one batch size, of `tensors` by the operands' index."""

        def given(value: Any) -> Any:
            if isinstance(value, Operand):
                return tensors[value.index]
            if isinstance(value, tuple):
                return [given(item) for item in value]
            return torch.device(device) if isinstance(value, torch.device) else concrete(value, num_samples)

        return tensors_in(self.target(*given(self.args), **{name: given(value) for name, value in self.kwargs}))


def product(factors: Iterable[Dim]) -> Dim:
    """Product of integers and expressions, the integers first: sympy multiplies slowly."""
    all_factors = list(factors)
    symbolic = [factor for factor in all_factors if not isinstance(factor, int)]
    number = prod(factor for factor in all_factors if isinstance(factor, int))
    return sympy.Mul(number, *symbolic) if symbolic else number


def operands(value: Any) -> list[Operand]:
    """All operands inside nested tuples."""
    if isinstance(value, Operand):
        return [value]
    return [found for item in value for found in operands(item)] if isinstance(value, tuple) else []


def call_of(node: fx.Node, gradients: dict[fx.Node, Gradient]) -> Call:
    """Describe a `call_function` node; `gradients` classifies its inputs, numbered as by `operand_nodes`."""
    first: dict[fx.Node, int] = {}
    for index, (argument, _) in enumerate(operand_nodes(node)):
        first.setdefault(argument, index)

    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _value(value.meta.get("val"), itertools.count(first.get(value, 0)), gradients[value])
        if isinstance(value, (list, tuple)):
            return tuple(convert(item) for item in value)
        return _dim(value)

    outputs = tuple(operands(_value(node.meta.get("val"), itertools.count(len(first)), "none")))
    return Call(node.target, convert(node.args), tuple((k, convert(v)) for k, v in node.kwargs.items()), outputs)


def in_a_row(call: Call, indices: Collection[int]) -> Call:
    """The call with these operands contiguous, whatever their strides."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if isinstance(value, Operand) and value.index in indices:
            return replace(value, strides=tuple(product(value.sizes[i + 1 :]) for i in range(len(value.sizes))))
        return value

    kwargs = tuple((name, convert(value)) for name, value in call.kwargs)
    return replace(call, args=convert(call.args), kwargs=kwargs) if indices else call


def operand_nodes(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The node that gives each operand of a call, and which of that node's tensors it is."""
    return [(n, i) for n in node.all_input_nodes for i in range(len(tensors_in(n.meta.get("val"))))]


def _value(value: Any, indices: Iterator[int], gradient: Gradient) -> Any:
    if isinstance(value, torch.Tensor):
        sizes, strides = tuple(map(_dim, value.shape)), tuple(map(_dim, value.stride()))
        return Operand(next(indices), sizes, strides, value.dtype, value.device, gradient)
    if isinstance(value, (list, tuple)):
        return tuple(_value(item, indices, gradient) for item in value)
    return _dim(value)


def _dim(value: Any) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_Integer else expression
