"""Where the samples of a batch lie in one value, and one graph node seen with the layouts of its operands.

x            [B, C, H, W]     BatchLayout(dim=0, outer=1, inner=1)
cat([x, x])  [2B, C, H, W]    BatchLayout(dim=0, outer=2, inner=1)
tokens       [B*T, D]         BatchLayout(dim=0, outer=1, inner=T)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sympy
import torch
from torch import fx

from fxpipe.capture.sizes import expression
from passes.operations import BoundCall

_BATCH = sympy.Symbol("B", integer=True, positive=True)


@dataclass(frozen=True)
class BatchLayout:
    """Dimension `dim` has size outer*B*inner; sample `s` is at the indices (o*B + s)*inner + i."""

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> "BatchLayout":
        return BatchLayout(dim, self.outer, self.inner)

    @property
    def factor(self) -> int:
        return self.outer * self.inner


@dataclass(frozen=True)
class State:
    """What a micro-batch's value of a node says about the whole batch's value.

    value    the samples lie as in `layout`; without one, the value is the same for every micro-batch
    partial  the whole batch's value is a sum over micro-batches
    whole    only the whole batch's value exists: no dimension of it can be cut into samples
    position the number of each sample, counted within the batch at hand (arange)
    row      a number of one of its sample's `rows`, counted within the batch at hand; `most` above that of the first

    With b of B samples in the micro-batch, the whole batch's value is (b/B)**power times what `form` says.
    """

    layout: BatchLayout | None = None
    form: Literal["value", "partial", "whole", "position", "row"] = "value"
    power: int = 0
    rows: int = 0
    most: int = 0

    @property
    def plain(self) -> bool:
        return self.form == "value" and self.power == 0

    @property
    def counts(self) -> bool:
        """Whether these are numbers of samples, or of their rows."""
        return self.form in ("position", "row")


Result = State | tuple[State, ...]


_REMEDY = "compute it within each sample, or from tensors that depend on no parameter, frozen or not"


class Mixed(Exception):
    """A node's result for one sample is not a function of that sample alone, as far as the rules can tell."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.remedy = remedy or _REMEDY


@dataclass(frozen=True)
class RuleCall(BoundCall):
    """A call, and the state of each operand."""

    states: Mapping[fx.Node, Result]

    @property
    def operands(self) -> list[fx.Node]:
        """The tensor operands, in order, each as often as it is used."""
        return list(self.tensors(*self.arguments))

    def tensors(self, *names: str) -> Iterator[fx.Node]:
        """The tensor nodes in the named arguments."""
        for name in names:
            value = self.arguments.get(name)
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, fx.Node) and isinstance(item.meta["val"], torch.Tensor):
                    yield item

    def layout(self, node: fx.Node) -> BatchLayout | None:
        state = self.states[node]
        assert isinstance(state, State)
        return state.layout

    def batched(self, nodes: Sequence[fx.Node] | None = None) -> list[fx.Node]:
        return [n for n in (self.operands if nodes is None else nodes) if self.layout(n) is not None]

    def number(self, name: str) -> Any:
        """The value of an argument, SymInt nodes as their SymInt."""
        return _values(self.arguments.get(name))

    def batch_numbers(self, allowed: Sequence[str] = ()) -> list[str]:
        """The arguments that are numbers which depend on the batch size."""
        return [name for name in self.arguments if name not in allowed and _depends(self.number(name))]


Rule = Callable[[RuleCall], list[Result]]


def _values(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value.meta["val"]
    if isinstance(value, list | tuple):
        return [_values(item) for item in value]
    return value


def _depends(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_depends(item) for item in value)
    symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and bool(value.node.expr.free_symbols)


@cache
def _factor(expr: sympy.Expr) -> int | None:
    ratio = sympy.simplify(expr.subs({symbol: _BATCH for symbol in expr.free_symbols}) / _BATCH)
    return int(ratio) if ratio.is_integer and ratio.is_number else None


def factor(size: Any) -> int | None:
    """k of a size k*B; 0 for a size without the batch; None for any other function of the batch."""
    expr = expression(size)
    if not expr.free_symbols:
        return 0
    backed = all(str(symbol).startswith("s") for symbol in expr.free_symbols)  # others depend on tensors' values
    return _factor(expr) if backed else None


def power_of(value: Any) -> int | None:
    """The state's `power` of a number c * B**-power; None when it is no such number."""
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return 0
    expr = value.node.expr.subs({symbol: _BATCH for symbol in value.node.expr.free_symbols})
    expr = expr.replace(_is_division, lambda e: e.args[0] / e.args[1]).replace(_is_cast, lambda e: e.args[0])
    exponent = sympy.simplify(_BATCH * sympy.diff(expr, _BATCH) / expr)
    return -int(exponent) if exponent.is_number and float(exponent).is_integer() else None


def _is_division(expr: sympy.Expr) -> bool:
    return type(expr).__name__ in ("IntTrueDiv", "FloatTrueDiv")


def _is_cast(expr: sympy.Expr) -> bool:
    return type(expr).__name__ == "ToFloat"


def batch_dims(value: torch.Tensor) -> list[tuple[int, int]]:
    """(dimension, k) for the dimensions of size k*B."""
    found = []
    for dim, size in enumerate(value.shape):
        k = factor(size)
        if k is None:
            raise Mixed(f"dimension {dim} of its result has size {size}, no multiple of the batch size")
        if k:
            found.append((dim, k))
    return found


def splits(dim: int, k: int) -> list[BatchLayout]:
    """Every layout of a dimension of size k*B, the likely ones first."""
    divisors = [n for n in range(1, k + 1) if k % n == 0]
    ends = sorted(divisors, key=lambda n: (n not in (1, k), n))
    return [BatchLayout(dim, outer, k // outer) for outer in ends]
