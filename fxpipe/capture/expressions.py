"""Sizes as plain data: a sympy expression as nested lists of names and numbers, and back without evaluating text.

s0*FloorDiv(s0 + 1, 2)     <->     ["Mul", "s0", ["FloorDiv", ["Add", "s0", 1], 2]]
"""

from typing import Any

import sympy

from fxpipe.capture import private
from fxpipe.errors import FxpipeError


class Unwritable(FxpipeError):
    """A capture holds what the stored form has no word for; says what."""


def symbol(name: str) -> sympy.Symbol:
    """A size's symbol, as a trace makes it."""
    return sympy.Symbol(name, positive=True, integer=True)


def expression_data(expr: Any) -> Any:
    """The expression as lists, names and integers; refuses what would come back as another one."""
    data = _data(expr)
    if expression_of(data) != expr:
        raise Unwritable(f"the size {expr}")
    return data


def _data(expr: Any) -> Any:
    if expr.is_Integer:
        return int(expr)
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    if expr.is_Symbol:
        return expr.name
    if expr.is_Float:
        return float(expr)
    if expr.is_Rational:
        return ["Rational", int(expr.p), int(expr.q)]
    name: str = expr.func.__name__
    if private.sizes.size_function(name) is not expr.func:
        raise Unwritable(f"the size {expr}, of {name}")
    return [name, *map(_data, expr.args)]


def expression_of(data: Any) -> Any:
    """The expression that `data` says."""
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if isinstance(data, int):
        return sympy.Integer(data)
    if isinstance(data, float):
        return sympy.Float(data)
    if isinstance(data, str):
        return symbol(data)
    name, *args = data
    function = private.sizes.size_function(name)
    if function is None:
        raise ValueError(name)
    return function(*map(expression_of, args))
