"""FLOPs of LAPACK's factorisations and solvers, which torch's counter leaves out.

Leading terms of Golub and Van Loan, Matrix Computations, 4th ed.: LU 2n^3/3 (3.2), Cholesky n^3/3 (4.2), a triangular
solve n^2 a right side (3.1), an inverse 2n^3, QR 2mn^2 - 2n^3/3 (5.2), symmetric eigenvectors 9n^3 (8.3), singular
vectors 14mn^2 + 8n^3 (8.6), an exponential by scaling and squaring some 24n^3 (9.3). Where iterations depend on the
values these are estimates. Each takes shapes, as `torch.utils.flop_counter` passes them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

aten = torch.ops.aten
Flops = Callable[..., int]


def _square(times: int, over: int) -> Flops:
    """times / over of n^3 for every n by n matrix."""
    return lambda matrix, *rest, **options: prod(matrix[:-2]) * (times * matrix[-1] ** 3 // over)


def _qr(matrix: torch.Size, *rest: Any, **options: Any) -> int:
    large, small = max(matrix[-2:]), min(matrix[-2:])
    return prod(matrix[:-2]) * (2 * large * small**2 - 2 * small**3 // 3)


def _svd(matrix: torch.Size, *rest: Any, **options: Any) -> int:
    large, small = max(matrix[-2:]), min(matrix[-2:])
    return prod(matrix[:-2]) * (14 * large * small**2 + 8 * small**3)


def _solve(matrix: torch.Size, right: torch.Size, *rest: Any, **options: Any) -> int:
    """A factorisation, and two triangular solves for every right side."""
    return _square(2, 3)(matrix) + 2 * prod(right) * matrix[-1]


def _substitute(matrix: torch.Size, right: torch.Size, *rest: Any, **options: Any) -> int:
    return prod(right) * matrix[-1]


def _by_lu(matrix: torch.Size, pivots: torch.Size, right: torch.Size, *rest: Any, **options: Any) -> int:
    return 2 * prod(right) * matrix[-1]


def _by_cholesky(right: torch.Size, matrix: torch.Size, *rest: Any, **options: Any) -> int:
    return 2 * prod(right) * matrix[-1]


_LU, _INVERSE = _square(2, 3), _square(2, 1)

FACTORISATIONS: dict[Any, Flops] = {
    **dict.fromkeys((aten._linalg_det, aten._linalg_slogdet, aten.linalg_lu_factor_ex, aten.linalg_lu), _LU),
    **dict.fromkeys((aten.linalg_inv_ex, aten.cholesky_inverse), _INVERSE),
    aten.linalg_cholesky_ex: _square(1, 3),
    aten._linalg_eigh: _square(9, 1),
    aten.linalg_matrix_exp: _square(24, 1),
    aten.linalg_qr: _qr,
    **dict.fromkeys((aten._linalg_svd, aten.linalg_pinv), _svd),
    aten._linalg_solve_ex: _solve,
    aten.linalg_solve_triangular: _substitute,
    aten.linalg_lu_solve: _by_lu,
    aten.cholesky_solve: _by_cholesky,
}
