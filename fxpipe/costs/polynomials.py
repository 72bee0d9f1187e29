"""Many counts as functions of the batch, evaluated together: arrays of coefficients, not one expression at a time.

[12*s, 3, s**2 + 5*s, floor(s/2)]   at 4   ->   [48, 3, 36, 2]
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import sympy
from numpy.typing import NDArray

from fxpipe.capture.sizes import REMEMBERED, evaluate

Floats = NDArray[np.float64]


class Polynomials:
    """Expressions in which every free symbol is the number of samples.

    Values are whole numbers in float64: exact up to 2**53, to 16 digits above.
    """

    def __init__(self, expressions: Iterable[sympy.Expr]) -> None:
        given = list(expressions)
        found = [_coefficients(expression) for expression in given]
        self._coefficients = np.array([c or (0, 0, 0) for c in found], dtype=np.float64).reshape(-1, 3)
        self._others = [(i, given[i]) for i, c in enumerate(found) if c is None]

    def at(self, num_samples: int) -> Floats:
        """The value of every expression."""
        values: Floats = self._coefficients @ np.array([1.0, num_samples, float(num_samples) ** 2])
        for position, expression in self._others:
            values[position] = _count(expression, num_samples)
        return values


def _count(expression: sympy.Expr, num_samples: int) -> float:
    """Its value; nothing where it divides by the rows of a part of the batch, and so few samples have no such part."""
    try:
        return float(evaluate(expression, num_samples))
    except ZeroDivisionError:
        return 0.0


@lru_cache(maxsize=REMEMBERED)
def _coefficients(expression: sympy.Expr) -> tuple[int, int, int] | None:
    """Of 1, s and s**2; None for what is no polynomial of degree two with whole coefficients."""
    if expression.is_Integer:
        return int(expression), 0, 0
    coefficient, rest = expression.as_coeff_Mul()
    if rest.is_Symbol and coefficient.is_Integer:
        return 0, int(coefficient), 0
    samples = sympy.Symbol("samples")
    expression = expression.subs(dict.fromkeys(expression.free_symbols, samples))
    if not expression.is_polynomial(samples):
        return None
    polynomial = sympy.Poly(expression, samples)
    if polynomial.degree() > 2 or not all(c.is_Integer for c in polynomial.all_coeffs()):
        return None
    constant, linear, square = (int(polynomial.coeff_monomial(samples**power)) for power in range(3))
    return constant, linear, square
