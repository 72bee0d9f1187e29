"""Refuse inputs no partition exists for, before a solver sees them."""

from collections.abc import Sequence
from math import isfinite

from fxpipe.errors import CompileError


def require_positive(**counts: int) -> None:
    """Every count is at least one."""
    for name, count in counts.items():
        if count < 1:
            raise CompileError(f"{name}={count}; it must be at least 1")


def require_amounts(name: str, amounts: Sequence[float], size: int | None = None) -> None:
    """`amounts` are finite, not negative, and `size` of them."""
    if size is not None and len(amounts) != size:
        raise CompileError(f"{name} has {len(amounts)} entries, not {size}")
    for index, amount in enumerate(amounts):
        if not (isfinite(amount) and amount >= 0):
            raise CompileError(f"{name}[{index}] is {amount}; it must be a finite number, zero or more")


def require_skips(skips: Sequence[tuple[int, int]], num_blocks: int) -> None:
    """Both ends of every skip are blocks."""
    for index, ends in enumerate(skips):
        if not all(0 <= block < num_blocks for block in ends):
            raise CompileError(f"skips[{index}] is {tuple(ends)}, but the blocks are 0 to {num_blocks - 1}")
