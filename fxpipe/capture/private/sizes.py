"""Symbolic sizes: what a trace decides by them, and how they are made again.

trace with a free batch  ->  guards, bounds  ->  `dynamic_fault`, `fewest_samples`, `most_samples`, `conditions`
stored expressions       ->  `traced_mode`   ->  `traced_number`, `traced_tensor`
"""

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false, statically_known_true
from torch.utils._sympy import functions as size_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fxpipe.capture.private.nodes import first_tensor

_NUMBER = (
    "forward makes it a number (take x.shape[0], not int() of it, no loop over samples, and transforms of "
    "torch.func of one sample, under torch.vmap)"
)


_SLICE = torch.ops.aten.slice.Tensor
_MANY = 64
"""So many more samples than a call has are looked at, where forward decides by their number."""
_decided = WeakKeyDictionary[Any, list[Any]]()  # of a trace's sizes, by forward itself: expressions that were true


@contextmanager
def general_sizes() -> Iterator[None]:
    """Torch's own operations decide nothing by sizes that are symbols, but take the way that is right for all.

    What forward itself decides is guarded as ever.
    """
    rules: dict[Any, Any] = fake_impls.op_implementations_dict
    slices = rules[_SLICE]
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        rules[_SLICE] = partial(_slice, slices)
        try:
            yield
        finally:
            rules[_SLICE] = slices


def _slice(
    rule: Any, mode: Any, func: Any, value: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """A slice with a size written with its ends: by torch's own rule it may be one that depends on values."""
    size, stride = list(value.shape), list(value.stride())
    first = 0 if start is None else _slice_end(size[dim], start)
    last = size[dim] if end is None or statically_known_true(end == sys.maxsize) else _slice_end(size[dim], end)
    if first is None or last is None:
        return rule(mode, func, value, dim, start, end, step)
    length = last - first
    if not guard_or_false(length >= 0):
        length = torch.sym_max(length, 0)
    offset = value.storage_offset() + first * stride[dim]
    size[dim], stride[dim] = (length + step - 1) // step, stride[dim] * step
    return value.as_strided(size, stride, offset)


def _slice_end(size: Any, index: Any) -> Any:
    """From the front, and inside; None where a value says from which end it counts. What sizes say is decided by them,
    as forward's own decisions are."""
    known = fake_impls._compute_slice_index(size, index)
    if known is not None or depends_on_values(index) or depends_on_values(size):
        return known
    return torch.sym_min(index, size) if index >= 0 else torch.sym_max(index + size, 0)


def depends_on_values(value: Any) -> bool:
    """Whether a traced value's size, or the number it is, depends on what tensors hold."""
    return bool(free_unbacked_symbols(value)) if value is not None else False


def is_traced_number(value: Any) -> bool:
    """Whether a size, or a number made of sizes, is none yet."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def size_symbols(values: Sequence[Any]) -> dict[str, list[int | None]]:
    """The symbols in traced values' sizes by name, with the size they were traced at and bounds (None is infinity)."""
    found: dict[str, list[int | None]] = {}
    for tensor in (t for value in values if (t := first_tensor(value)) is not None):
        env: Any = tensor.fake_mode.shape_env  # type: ignore[attr-defined]
        for symbol in {s for size in (*tensor.shape, *tensor.stride()) for s in _symbols(size)}:
            if symbol.name not in found:
                bounds = env.var_to_range[symbol]
                upper = int(bounds.upper) if bounds.upper.is_Integer else None
                found[symbol.name] = [int(_hints(env)[symbol]), int(bounds.lower), upper]
    return found


def divisors(size: int | torch.SymInt) -> set[int]:
    """The numbers by which a size divides what depends on the batch, rounded down."""
    if not isinstance(size, torch.SymInt):
        return set()
    found = size.node.expr.atoms(size_functions.FloorDiv)
    return {int(one.args[1]) for one in found if one.args[0].free_symbols and one.args[1].is_Integer}


def size_function(name: str) -> Any:
    """A function that sizes are written with, torch's or sympy's; None where there is none."""
    found = getattr(size_functions, name, None) or getattr(sympy, name, None)
    return found if isinstance(found, type) and issubclass(found, sympy.Basic) else None


def dynamic_fault(values: Sequence[torch.Tensor], batch_size: int) -> str | None:
    """Why a trace with a dynamic batch is not what the model does at `batch_size`; None where it is.

    Args:
        values: the traced inputs that have the batch as dimension 0.
    """
    env: Any = values[0].fake_mode.shape_env  # type: ignore[attr-defined]
    fixed = not all(_symbols(value.shape[0]) for value in values)
    symbols = {symbol for value in values for symbol in _symbols(value.shape[0])}
    for guard in env.guards:
        free = guard.expr.free_symbols
        if fixed and isinstance(guard.expr, sympy.Eq) and len(free) == 1:
            return f"{_NUMBER}, {_place(guard)}"
        if not fixed and free and free <= symbols:
            if guard.expr.xreplace(dict.fromkeys(free, sympy.Integer(batch_size))) == sympy.false:
                return f"forward has another form where {sympy.Not(guard.expr)}, {_place(guard)}"
    bounds = [env.var_to_range[symbol] for symbol in symbols if symbol in env.var_to_range]
    if any(batch_size < bound.lower or batch_size > bound.upper for bound in bounds):
        return f"forward has another form at {batch_size} samples"
    return _NUMBER if fixed else None


def expression_of(value: Any) -> Any:
    """Of a size, or a truth about sizes; None where it is no symbol."""
    expr = value.node.expr if isinstance(value.node, SymNode) else None
    return expr if expr is not None and expr.free_symbols else None


def is_as_computed(found: torch.SymFloat, *operands: Any) -> bool:
    """Whether a sum, difference or product is written as that of its operands: sympy may take others of the same value,
    but not of the same rounding."""
    parts = {
        sign * torch.sym_float(one).node.expr if is_traced_number(one) else sympy.Float(sign * one)
        for one in operands
        for sign in (1, -1)
    }
    return len(found.node.expr.args) == 2 and parts.issuperset(found.node.expr.args)


def note(value: Any, expr: Any, found: Any) -> None:
    """Forward has decided by this, which was found."""
    true = sympy.Eq(expr, found) if isinstance(value, torch.SymInt) else expr if found else sympy.Not(expr)
    _decided.setdefault(value.node.shape_env, []).append(true)


def fewest_samples(values: Sequence[torch.Tensor], batch_size: int) -> int:
    """From how many samples on, up to `batch_size`, forward decides by their number as it did in a trace.

    For what torch decides, one sample counts as two, as which it was traced. `values` as in `dynamic_fault`.
    """
    env: Any = values[0].fake_mode.shape_env  # type: ignore[attr-defined]
    symbols = _batch_symbols(values)
    decided = _decisions(env, symbols, [guard.expr for guard in env.guards])
    lowest = max((int(env.var_to_range[symbol].lower) for symbol in symbols if symbol in env.var_to_range), default=2)
    for number in range(batch_size - 1, 0, -1):
        if max(number, 2) < lowest or not _hold(decided, symbols, max(number, 2)):
            return number + 1
        if number == 1 and not _hold(_decisions(env, symbols, _decided.get(env, [])), symbols, 1):
            return 2
    return 1


def most_samples(values: Sequence[torch.Tensor], batch_size: int) -> int | None:
    """Up to how many samples, from `batch_size` on, forward decides by their number as it did in a trace; None where it
    does not decide by it."""
    env: Any = values[0].fake_mode.shape_env  # type: ignore[attr-defined]
    symbols = _batch_symbols(values)
    decided = _decisions(env, symbols, [guard.expr for guard in env.guards])
    ranges = [env.var_to_range[symbol].upper for symbol in symbols if symbol in env.var_to_range]
    highest = min((int(upper) for upper in ranges if upper.is_Integer), default=None)
    if not decided:
        return highest
    last = batch_size + _MANY if highest is None else min(highest, batch_size + _MANY)
    fails = (number for number in range(batch_size + 1, last + 1) if not _hold(decided, symbols, number))
    return next(fails, last + 1) - 1


def _batch_symbols(values: Sequence[torch.Tensor]) -> set[Any]:
    return {symbol for value in values for symbol in _symbols(value.shape[0])}


def _decisions(env: Any, symbols: set[Any], found: Sequence[Any]) -> list[Any]:
    """Those that depend on these symbols alone."""
    guards = dict.fromkeys(env.replace(expr) for expr in found)
    return [guard for guard in guards if guard.free_symbols and guard.free_symbols <= symbols]


def _hold(decided: Sequence[Any], symbols: set[Any], number: int) -> bool:
    counted = dict.fromkeys(symbols, sympy.Integer(number))
    return not any(guard.xreplace(counted) == sympy.false for guard in decided)


def conditions(
    values: Sequence[torch.Tensor],
) -> tuple[tuple[Any, ...], dict[sympy.Symbol, tuple[int, int | None]]]:
    """What has been decided by the sizes of traced inputs, as expressions that were true; and the bounds of symbols.
    A size of one is another trace: it is no symbol, and spreads where it meets others."""
    env: Any = values[0].fake_mode.shape_env  # type: ignore[attr-defined]
    decided = [*env.guards, *(one for several in env.deferred_runtime_asserts.values() for one in several)]
    guards = dict.fromkeys(env.replace(one.expr) for one in decided)
    free = {symbol for value in values for size in value.shape for symbol in _symbols(size)}
    ranges = {symbol: env.var_to_range[symbol] for symbol in free}
    bounds = {s: (max(2, int(r.lower)), int(r.upper) if r.upper.is_Integer else None) for s, r in ranges.items()}
    return tuple(guard for guard in guards if guard != sympy.true), bounds


def place_of_number(value: torch.Tensor, dim: int) -> str:
    """Where a free size of a traced input has become a number."""
    size, env = value.shape[dim], value.fake_mode.shape_env  # type: ignore[attr-defined]
    own: set[Any] = {size.node._expr} if isinstance(size, torch.SymInt) else set()
    fixed = [guard for guard in env.guards if isinstance(guard.expr, sympy.Eq) and guard.expr.free_symbols == own]
    return _place(fixed[0]) if fixed else "somewhere"


def still_guarded(values: Sequence[torch.Tensor]) -> None:
    """From here on, too, what is decided by traced values' sizes is noted down."""
    for value in values:
        value.fake_mode.shape_env.frozen = False  # type: ignore[attr-defined]


def traced_mode(symbols: Mapping[sympy.Symbol, Sequence[Any]]) -> FakeTensorMode:
    """A mode as a trace leaves it, whose sizes have these symbols: size traced at, bounds."""
    env: Any = symbolic_shapes.ShapeEnv()
    for symbol, (hint, lower, upper) in symbols.items():
        _hints(env)[symbol] = sympy.Integer(hint)
        env.var_to_range[symbol] = ValueRanges(lower, int_oo if upper is None else upper)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def traced_number(mode: FakeTensorMode, expr: Any, kind: type) -> Any:
    """A symbolic size, factor or truth."""
    env: Any = mode.shape_env
    wrap = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[kind]
    hint = expr.xreplace(dict(_hints(env)))
    return wrap(SymNode(expr, env, kind, bool(hint) if kind is bool else kind(hint)))  # type: ignore[no-untyped-call]


def traced_tensor(
    mode: FakeTensorMode, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> torch.Tensor:
    """A tensor without memory, as `torch.empty_strided` makes it at length in that mode."""
    with mode.shape_env.suppress_guards():  # type: ignore[union-attr]
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
    return FakeTensor(mode, like, device)


def _hints(env: Any) -> Any:
    """By symbol, under its name of torch 2.13 or the one before."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _place(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    return f"at {frame.filename}:{frame.lineno}" if isinstance(frame, traceback.FrameSummary) else "somewhere"
