"""Sizes as functions of the batch: symbolic integers and shapes of the capture, evaluated at a number of samples."""

from functools import cache
from typing import Any

import sympy
import torch


def expression(size: Any) -> sympy.Expr:
    """The sympy expression of an int or SymInt."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


@cache
def _at(expr: sympy.Expr, batch_size: int) -> Any:
    value = expr.subs({symbol: batch_size for symbol in expr.free_symbols})
    return int(value) if value.is_integer else float(value)


def concrete(value: Any, batch_size: int) -> Any:
    """`value` (number, SymInt, SymFloat, SymBool, or a nest of tuples and lists) with the batch set to `batch_size`."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return _at(value.node.expr, batch_size)
    if isinstance(value, torch.SymBool):
        return bool(value.node.expr.subs({s: batch_size for s in value.node.expr.free_symbols}))
    if isinstance(value, tuple | list | torch.Size):
        items = [concrete(item, batch_size) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)
