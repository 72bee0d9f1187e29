"""What one operation does to memory, forward and backward: the kernels autograd runs for it, by storages they touch.

    y = linear(x, w)        forward   addmm(x, w) -> y             reads operands 0 and 1, makes 2
                            backward  mm(gy, w) -> gx              reads the tangent 3 and 1, makes 4
                                      mm(gy, x) -> gw              reads 3 and 0, makes 5

The operation runs once for each distinct call on fake tensors, above a mode that notes kernels; at twice as many
samples too where it has a batch, so that bytes are lines. One sample has traces of its own: parts of it often lie in a
row that in several samples do not, and are not copied then.

Bytes and what autograd keeps: all that is known of one operation's memory is read off this one trace. Gradients' paths
are in its forward alone, which is all that a rank asks for whose plan is made.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.capture import private
from fxpipe.capture.reach import reached
from fxpipe.costs.calls import Call

Autocast = tuple[str, torch.dtype, bool] | None
Line = tuple[int, int]
"""Bytes: a constant, and as many per sample."""

aten = torch.ops.aten
_NOTHING = {aten.detach.default, aten.alias.default}  # what stage graphs drop


@dataclass(frozen=True, slots=True)
class Kernel:
    """Storages read and made, by number; whether it does nothing but cast."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    casts: bool = False


@dataclass(frozen=True)
class MadeGradient:
    """A gradient: its storage, whether it is a view of it, and whether its numbers lie in a row."""

    storage: int
    view: bool
    contiguous: bool


@dataclass(frozen=True)
class CallTrace:
    """One call. Storages count through operands, then all that is made; tangents are those in `tangents`.

    `outputs` has the storage of every tensor returned, `tangents` of its gradient (None where it has none), `gradients`
    those of operands, by number, that have one.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    num_operands: int
    made: tuple[Line, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int | None, ...]
    gradients: Mapping[int, MadeGradient]

    @property
    def kept(self) -> frozenset[int]:
        """What autograd keeps for the backward: all that it reads of what there is before."""
        there = {*range(self.num_operands), *(storage for kernel in self.forward for storage in kernel.makes)}
        return frozenset(storage for kernel in self.backward for storage in kernel.reads if storage in there)


class _Kernels(TorchDispatchMode):
    """Notes what every kernel reads and makes; views make nothing."""

    def __init__(self, operands: Mapping[int, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.bytes: list[int] = []
        self.views: dict[int, bool] = {}  # by tensor: whether the kernel that returned it may alias
        self.first = 1 + max(operands, default=-1)
        self._number = {tensor.untyped_storage()._cdata: index for index, tensor in operands.items()}
        self._alive: list[Any] = [*operands.values()]

    def number(self, tensor: torch.Tensor) -> int:
        """The storage of a tensor; a new one if nothing has shown it yet."""
        key = tensor.untyped_storage()._cdata
        if key not in self._number:
            self._number[key] = self.first + len(self.bytes)
            self.bytes.append(tensor.untyped_storage().nbytes())
            self._alive.append(tensor)
        return self._number[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return private.device_of(args[0])
        result = func(*args, **(kwargs or {}))
        reads = dict.fromkeys(self.number(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        makes = [number for number in dict.fromkeys(map(self.number, tensors)) if number not in reads]
        if func not in _NOTHING:
            for tensor in tensors:
                self.views[id(tensor)] = private.may_alias(func)
            self._alive += tensors
            both = func is aten.convolution_backward.default and len(makes) > 1 and args[-1][0]
            for part in [makes[:1], makes[1:]] if both else [makes] if makes else []:
                self.kernels.append(Kernel(tuple(reads), tuple(part), func is aten._to_copy.default))
        return result


@lru_cache(maxsize=1 << 14)
def call_trace(call: Call, autocast: Autocast, batch_size: int, device: torch.device) -> CallTrace:
    """The kernels of a call whose operands are differentiated where their gradient is not "none"."""
    found, num_bytes = _run(call, autocast, batch_size, device)
    operands = (*call.inputs, *call.outputs)
    if batch_size == 1 or not any(sympy.sympify(dim).free_symbols for operand in operands for dim in operand.sizes):
        return replace(found, made=tuple((size, 0) for size in num_bytes))
    _, twice = _run(call, autocast, 2 * batch_size, device)
    if len(twice) != len(num_bytes):
        return replace(found, made=tuple((0, -(-size // batch_size)) for size in num_bytes))
    slopes = [(b - a) // batch_size for a, b in zip(num_bytes, twice, strict=True)]
    return replace(found, made=tuple((a - m * batch_size, m) for a, m in zip(num_bytes, slopes, strict=True)))


@lru_cache(maxsize=1 << 14)
def gradient_paths(call: Call, autocast: Autocast, batch_size: int, device: torch.device) -> tuple[frozenset[int], ...]:
    """Of every tensor that a call returns, the operands that its gradient gets to, by number."""
    with private.fake_mode(), torch.enable_grad():
        tensors = {operand.index: operand.empty(batch_size, device) for operand in call.inputs}
        outputs = _outputs(call, autocast, tensors, batch_size, device)
        number = {id(tensor): index for index, tensor in tensors.items()}
        return tuple([frozenset([number[id(leaf)] for leaf in _leaves(output)]) for output in outputs])


def _outputs(
    call: Call, autocast: Autocast, tensors: Mapping[int, torch.Tensor], batch_size: int, device: torch.device
) -> list[torch.Tensor]:
    with torch.autocast(*(autocast or ("cpu", torch.bfloat16, False)), cache_enabled=False):
        return call.run(tensors, batch_size, device)


def _run(call: Call, autocast: Autocast, batch_size: int, device: torch.device) -> tuple[CallTrace, list[int]]:
    with ExitStack() as stack:
        stack.enter_context(private.fake_mode())
        stack.enter_context(torch.enable_grad())
        tensors = {operand.index: operand.empty(batch_size, device) for operand in call.inputs}
        kernels = stack.enter_context(_Kernels(tensors))
        outputs = _outputs(call, autocast, tensors, batch_size, device)
        shown = tuple([kernels.number(output) for output in outputs])
        forward, sources = len(kernels.kernels), [o for o in outputs if o.requires_grad]
        wanted = [(index, tensor) for index, tensor in tensors.items() if tensor.requires_grad]
        tangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in sources]
        start = len(kernels.kernels)
        numbers = iter([kernels.number(tangent) for tangent in tangents])
        of_outputs = tuple([next(numbers) if o.requires_grad else None for o in outputs])
        gradients: dict[int, MadeGradient] = {}
        if sources and wanted:
            found = torch.autograd.grad(sources, [t for _, t in wanted], tangents, allow_unused=True)
            for (index, _), gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    view = kernels.views.get(id(gradient), True)
                    gradients[index] = MadeGradient(kernels.number(gradient), view, gradient.is_contiguous())
    done = tuple(kernels.kernels)
    return CallTrace(done[:forward], done[start:], kernels.first, (), shown, of_outputs, gradients), kernels.bytes


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a result's gradient gets to: itself, where an operation returns its operand."""
    if tensor.requires_grad and tensor.grad_fn is None:
        return [tensor]
    first: list[Any] = [] if tensor.grad_fn is None else [tensor.grad_fn]
    functions = reached(first, lambda one: [following for following, _ in one.next_functions if following is not None])
    return [function.variable for function in functions if hasattr(function, "variable")]
