"""What autograd keeps of one operation for its backward, and where its results lie.

    silu(y)              made: 128*s bytes             results: [made 0]     kept: {operand 0}
    view(y, -1)          made: nothing                 results: [operand 0]  kept: {}
    attention(q, k, v)   made: out, and sums of exponentials that only the backward sees; kept: both, q, k, v

The operation runs on fake tensors under autograd's hooks for saved tensors: once, and at more batch sizes where it
makes what its results do not show.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from fxpipe.capture import private
from fxpipe.costs import evaluate
from fxpipe.costs.calls import Call, Operand, concrete, concrete_argument, product, tensors_in

Autocast = tuple[str, torch.dtype, bool] | None
"""Device, type and whether enabled, where a region of the model sets them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The memory of one call: `results` tells where its tensors lie, `kept` what its backward needs.

    Memory is a number: that of operand i is i, the i-th that the call makes is -1 - i, of `made_bytes[i]` bytes.
    """

    made_bytes: tuple[sympy.Expr, ...]
    results: tuple[int, ...]
    kept: frozenset[int]


@lru_cache(maxsize=1 << 14)
def kept_by(call: Call, autocast: Autocast, batch_size: int, device: torch.device) -> Kept:
    """The memory of a call that is differentiated where some operand's gradient is not "none".

    Args:
        batch_size: a size that the graph holds for; twice and three times as many samples may be tried too.
    """
    shown = [sympy.sympify(product(result.sizes) * result.dtype.itemsize) for result in call.outputs]
    if not private.may_alias(call.target) and all(operand.gradient == "none" for operand in call.inputs):
        return Kept(tuple(shown), tuple(-1 - i for i in range(len(shown))), frozenset())
    made, results, kept = _run(call, autocast, batch_size, device)
    symbols = sorted({symbol for size in _dims(call) for symbol in sympy.sympify(size).free_symbols}, key=str)
    if not symbols:
        return Kept(tuple(map(sympy.Integer, made)), results, kept)
    dense = {-1 - memory: size for memory, size in zip(results, shown, strict=True) if memory < 0}
    if all(i in dense and evaluate(dense[i], batch_size) == size for i, size in enumerate(made)):
        return Kept(tuple(dense[i] for i in range(len(made))), results, kept)
    sizes = [batch_size, 2 * batch_size, 3 * batch_size]
    runs = [(made, results, kept), *(_run(call, autocast, size, device) for size in sizes[1:])]
    assert all(run[1:] == runs[0][1:] for run in runs), f"{call.target} keeps other tensors at other batch sizes"
    points = zip(*(run[0] for run in runs), strict=True)
    return Kept(tuple(_through(tuple(sizes), values, symbols[0]) for values in points), results, kept)


def _dims(call: Call) -> list[Any]:
    return [size for operand in (*call.inputs, *call.outputs) for size in operand.sizes]


@lru_cache(maxsize=1 << 12)
def _through(batch_sizes: tuple[int, ...], values: tuple[int, ...], symbol: sympy.Symbol) -> sympy.Expr:
    """The polynomial of the batch through some values: a line, where they lie on one."""
    return sympy.expand(sympy.interpolate(list(zip(batch_sizes, values, strict=True)), symbol))


def _run(
    call: Call, autocast: Autocast, batch_size: int, device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    """Bytes of what the call makes, where its results lie, and what is kept."""
    packed: list[torch.Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(private.fake_mode())
        tensors = {operand.index: _fake(operand, batch_size, device) for operand in call.inputs}
        args = [concrete_argument(value, tensors, batch_size, device) for value in call.args]
        kwargs = {name: concrete_argument(value, tensors, batch_size, device) for name, value in call.kwargs}
        stack.enter_context(torch.enable_grad())
        if autocast is not None:
            where, dtype, enabled = autocast
            stack.enter_context(torch.autocast(where, dtype, enabled, cache_enabled=False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(packed.append, _never))
        outputs = tensors_in(call.target(*args, **kwargs))
    known = {tensor.untyped_storage()._cdata: index for index, tensor in tensors.items()}
    made: list[int] = []

    def memory(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known[storage._cdata] = -1 - len(made)
            made.append(storage.nbytes())
        return known[storage._cdata]

    results = tuple([memory(output) for output in outputs])
    kept = frozenset([memory(tensor) for tensor in packed])
    return tuple(made), results, kept


def _fake(operand: Operand, batch_size: int, device: torch.device) -> torch.Tensor:
    sizes, strides = ([concrete(dim, batch_size) for dim in dims] for dims in (operand.sizes, operand.strides))
    tensor = torch.empty_strided(sizes, strides, dtype=operand.dtype, device=device)
    return tensor.requires_grad_(operand.gradient != "none")


def _never(saved: Any) -> torch.Tensor:
    raise AssertionError("no backward runs here")
