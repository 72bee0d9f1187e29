"""Operators without a formula: run on meta tensors at a few batch sizes under torch's own FLOP counter.

    einsum at 2, 3, 4, 5 samples  ->  1536, 2304, 3072, 3840 FLOPs  ->  768 * s

No values are computed, so this takes about a millisecond per operator and batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fxpipe.capture import private
from fxpipe.costs.calls import Call, Dim, Gradient

BATCHES = (2, 3, 4, 5)

# Words in the names of single kernels that multiply matrices (reviewed over all of torch 2.13's 755 such operators).
MATRIX_WORDS = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot matmul linear conv convolution attention mha rnn lstm gru linalg "
    "cholesky cdist pdist trilinear ormqr geqrf hspmm conv2d conv3d depthwise euclidean triangular".split()
)
NO_MATRICES = frozenset({"linalg_vector_norm", "linalg_cross", "linalg__powsum", "_linalg_check_errors"})


class Uncounted(Exception):
    """The FLOPs of an operator cannot be known: its kernel's are not counted, or it does not run on meta tensors."""


def require_counted(op: torch._ops.OpOverload[..., Any]) -> None:
    """Raise Uncounted for a single kernel that may multiply matrices and whose FLOPs nobody counts.

    `torch.utils.flop_counter.register_flop_formula` makes a kernel known.
    """
    namespace, _, name = op._schema.name.partition("::")
    if op._overloadpacket in flop_registry or op._overloadpacket in EXTRA or private.is_composite(op):
        return
    if namespace in ("aten", "prim", "prims") and (not MATRIX_WORDS & set(name.split("_")) or name in NO_MATRICES):
        return
    raise Uncounted(str(op))


class _RequireCounted(TorchDispatchMode):
    """Stops at what the FLOP counter would silently count as nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require_counted(func)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Counted:
    """FLOPs of a call; `copies` is False where every output lives in an input's memory.

    `complete` is False where some of the three cannot be known: there it is 0.
    """

    forward: Dim
    backward_input: Dim
    backward_weight: Dim
    copies: bool
    complete: bool = True


UNKNOWN = Counted(0, 0, 0, copies=True, complete=False)


def count_flops(call: Call) -> Counted:
    """Count a call by running it."""
    try:
        first, copies = _count(call, BATCHES[0], None)
        forward = _fit(call, lambda batch: first if batch == BATCHES[0] else _count(call, batch, None)[0])
    except Uncounted:
        return UNKNOWN
    if forward == 0:
        return Counted(0, 0, 0, copies)
    parts: dict[Gradient, Dim] = {"input": 0, "weight": 0}
    complete = True
    for part in parts:
        if any(operand.gradient == part for operand in call.inputs):
            try:
                parts[part] = _fit(call, lambda batch, part=part: _count(call, batch, part)[0])  # type: ignore[misc]
            except Uncounted:
                complete = False
    return Counted(forward, parts["input"], parts["weight"], copies, complete)


def _count(call: Call, batch: int, part: Gradient | None) -> tuple[int, bool]:
    """FLOPs of the forward (`part` None) or of the gradients of one kind; whether the forward copied."""
    tensors = {operand.index: operand.empty(batch, "meta") for operand in call.inputs}
    for operand in call.inputs:
        tensors[operand.index].requires_grad_(part is not None and operand.gradient == part)
    try:
        with torch.enable_grad(), _counting() as counter:
            outputs = call.run(tensors, batch, "meta")
        if part is not None:
            differentiable = [output for output in outputs if output.requires_grad]
            if not differentiable:
                return 0, True
            sources = [tensor for tensor in tensors.values() if tensor.requires_grad]
            gradients = [torch.empty_like(output) for output in differentiable]
            with _counting() as counter:
                torch.autograd.grad(differentiable, sources, gradients, allow_unused=True)
    except Uncounted:
        raise
    except Exception as error:
        raise Uncounted(f"{call.target} does not run on meta tensors: {error}") from error
    memory = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    return counter.get_total_flops(), any(output.untyped_storage()._cdata not in memory for output in outputs)


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    with _RequireCounted(), FlopCounterMode(display=False, custom_mapping=EXTRA) as counter:  # type: ignore[no-untyped-call]
        yield counter


def _fit(call: Call, count: Callable[[int], int]) -> Dim:
    """The quadratic through the first three counts; the last batch size must lie on it."""
    symbols: set[sympy.Symbol] = set()
    for operand in (*call.inputs, *call.outputs):
        symbols |= sympy.Tuple(*operand.sizes).free_symbols
    values = [count(BATCHES[0])]
    if values == [0] or not symbols:
        return values[0]
    values += [count(batch) for batch in BATCHES[1:]]
    samples = min(symbols, key=str)
    polynomial = sympy.interpolate(list(zip(BATCHES[:3], values[:3], strict=True)), samples)
    if polynomial.subs(samples, BATCHES[3]) != values[3]:
        raise Uncounted(f"{call.target}: {values} at {BATCHES} samples are no polynomial of the batch size")
    return int(polynomial) if polynomial.is_Integer else polynomial


def _vector_product(*shapes: torch.Size, **_: Any) -> int:
    """Of the last two, whatever is added."""
    return 2 * shapes[-2].numel()


aten = torch.ops.aten
EXTRA = dict.fromkeys((aten.mv, aten.dot, aten.vdot, aten.addmv), _vector_product)  # torch's counter leaves these out
