"""The uncompiled model's own step, with the random draws that a program makes: what a compiled step is compared with.

one_device         as the model computes, under the autocast that was asked for
one_device_wider   every operation in float32, or in float64, that would be in a lower precision, of the same draws
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.capture import loss_of, private
from fxpipe.capture.calls import Calls, own_generators
from fxpipe.capture.outputs import outputs_of
from fxpipe.capture.random_calls import RANDOM_CALLS
from fxpipe.capture.randomness import SeededDraws, is_random
from fxpipe.capture.state import state_kept
from fxpipe.capture.surroundings import LOW, Surroundings
from fxpipe.capture.transforms import exact_transforms


@dataclass(frozen=True)
class StepResult:
    """One step, of all ranks or of one device: the whole batch's loss, the gradient of every trainable parameter that
    has one, by its (first) name, what forward returns beside the loss, and what it has written into the model's own
    tensors, which are as they were."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    written: Mapping[str, torch.Tensor] = field(default_factory=dict)


def one_device(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    draws: SeededDraws,
    autocast: torch.dtype | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> StepResult:
    """One device's own step.

    Args:
        draws: the source of random numbers; it has noted the draws then.
        autocast: the type of an autocast around forward.
        state: tensors in the places of the model's own, by name.
    """
    state, device = state or {}, draws.device
    parameters = {n: state.get(n, p) for n, p in model.named_parameters() if p.requires_grad}
    # Autocast's cache of weights loses the gradient of a weight that was first read under no_grad.
    with (
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        private.plain_checkpoints(),
        exact_transforms(),
        torch.random.fork_rng(),
        private.no_autocast_cache(),
        state_kept(model),
    ):
        with own_generators(model), Calls(RANDOM_CALLS, _ATTENTION), draws, Surroundings(device, autocast).autocast():
            output = (
                torch.func.functional_call(model, dict(state), args, dict(kwargs)) if state else model(*args, **kwargs)
            )
        loss = loss_of(output)
        beside = {name: value.detach().clone() for name, value in outputs_of(output)[0].items()}  # some are the model's
        if not loss.requires_grad:
            return StepResult(loss, {}, beside)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    given = {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}
    return StepResult(loss.detach(), given, beside)


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    with _kernels(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)):
        return func(*args, **kwargs)


def _multi_head_attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Of `nn.MultiheadAttention`, whose own calls go unseen."""
    given = signature(func).bind(*args, **kwargs).arguments
    with _kernels(given["dropout_p"] if given.get("training", True) else 0.0):
        return func(*args, **kwargs)


def _kernels(dropout_p: float) -> AbstractContextManager[None]:
    """With dropout as it is captured, which kernels of GPUs do in their own way."""
    return sdpa_kernel([SDPBackend.MATH]) if dropout_p > 0 else nullcontext()


_ATTENTION = {F.scaled_dot_product_attention: _attention, F.multi_head_attention_forward: _multi_head_attention}


Wider = Mapping[torch.dtype, torch.dtype]
IN_FLOAT32: Wider = dict.fromkeys(LOW, torch.float32)
IN_FLOAT64: Wider = {**dict.fromkeys((*LOW, torch.float32), torch.float64), torch.complex64: torch.complex128}


def one_device_wider(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: SeededDraws, wider: Wider
) -> StepResult:
    """The same in `wider` types; `draws` are those of the step as it is, whose random numbers are drawn again."""
    again = SeededDraws(draws.seed, draws.step, draws.device)
    args, kwargs = pytree.tree_map(lambda value: _widened(value, wider), (args, dict(kwargs)))
    with _Wider(draws.types, wider):
        return one_device(model, args, kwargs, again, None, _wide_state(model, wider))


class _Wider(TorchDispatchMode):
    """Every operation that would compute in a lower precision computes in a wider type; what it draws is as it was.

    Args:
        drawn: the type of every random draw in the step as it is, by its place.
    """

    def __init__(self, drawn: Sequence[torch.dtype | None], wider: Wider) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._wider = iter(drawn), wider

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args):
            args, kwargs = self._widened((args, kwargs))
            return self._widened(func(*args, **kwargs))  # as zeros of no given type
        dtype = next(self._drawn, None)
        is_of_tensor = dtype in self._wider and isinstance(args[0], torch.Tensor)
        given = (args[0].to(dtype), *args[1:]) if is_of_tensor else args
        found = self._widened(func(*given, **(kwargs | {"dtype": dtype} if "dtype" in kwargs else kwargs)))
        if isinstance(found, tuple):  # of a dropout: its result, and what it has not dropped
            return args[0] * found[1] / (1.0 - float(args[1])), found[1]
        return args[0].copy_(found) if func._schema.is_mutable else found

    def _widened(self, values: Any) -> Any:
        return pytree.tree_map(lambda value: _widened(value, self._wider), values)


def _widened(value: Any, wider: Wider) -> Any:
    """A tensor or type, wider where it is of a lower precision."""
    if isinstance(value, torch.Tensor):
        return value.to(wider[value.dtype]) if value.dtype in wider else value
    return wider.get(value, value) if isinstance(value, torch.dtype) else value


def _wide_state(model: nn.Module, wider: Wider) -> dict[str, torch.Tensor]:
    """A model's tensors of lower precision in wider types, trained where the model's are."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    low = ((name, tensor) for name, tensor in named.items() if tensor.dtype in wider)
    return {name: t.detach().to(wider[t.dtype]).requires_grad_(t.requires_grad) for name, t in low}
