"""Sizes as functions of the batch: symbolic integers and shapes of the capture, evaluated at a number of samples."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch

from fxpipe.errors import CompileError

REMEMBERED = 1 << 16
"""Values that are remembered at a size: a training step of Stable Diffusion 2.1 has 833 distinct counts."""


class NoSuchSize(CompileError, ZeroDivisionError):
    """A size that so few samples do not have."""


def expression(size: Any) -> sympy.Expr:
    """The sympy expression of an int or SymInt."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


@lru_cache(maxsize=REMEMBERED)
def evaluate(expression: Any, num_samples: int) -> Any:
    """The number, or truth, that an expression is when every symbol is `num_samples`."""
    if expression.is_Integer:
        return int(expression)
    if isinstance(expression, sympy.Expr):
        coefficient, rest = expression.as_coeff_Mul()
        if rest.is_Symbol and coefficient.is_Integer:  # nearly every count; `subs` takes ten times as long
            return int(coefficient) * num_samples
    try:
        value = expression.subs(dict.fromkeys(expression.free_symbols, num_samples))
    except ZeroDivisionError:
        raise NoSuchSize(
            f"forward has a size of {expression}, which none of {num_samples} samples has: it puts rows of the batch "
            "into groups; give inputs in which these are a dimension of their own, [batch, rows, ...]"
        ) from None
    if isinstance(value, sympy.logic.boolalg.Boolean):
        return bool(value)
    return int(value) if value.is_integer else float(value)


def concrete(value: Any, num_samples: int) -> Any:
    """`value` (number, expression, SymInt, SymFloat, SymBool, or a nest of tuples and lists) at `num_samples`."""
    if type(value) is int:  # nearly all
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return evaluate(value.node.expr, num_samples)
    if isinstance(value, sympy.Basic):
        return evaluate(value, num_samples)
    if isinstance(value, tuple | list):
        items = [concrete(item, num_samples) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def alike_sizes(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return [*map(expression, some)] == [*map(expression, others)]


def is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)
