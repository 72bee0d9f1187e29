"""Of training: scalers, clipping, gradient hooks and torch's compiler."""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch.amp.grad_scaler import OptState


def uncompiled(part: Any) -> Any:
    """The module or function that `torch.compile` was given, where this is what it has made of it."""
    return getattr(part, "_orig_mod" if isinstance(part, nn.Module) else "_torchdynamo_orig_callable", part)


def inductor(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """The module compiled for inputs like these; of an input that is a list, with `steal_arg`, the list is emptied."""
    from torch import _inductor

    found: Callable[..., Any] = _inductor.compile(module, given)
    return found


def needs_host(graph: fx.Graph) -> str | None:
    """The first operation that no CUDA graph can have: it waits for the device, or is one of the CPU's."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    module: Any = SimpleNamespace(graph=graph)  # which a graph with weights would need a holder of these to be
    unsafe = get_first_incompatible_cudagraph_node(module)
    values = ((node, node.meta.get("val")) for node in graph.nodes)
    of_cpu = (node for node, value in values if isinstance(value, torch.Tensor) and value.device.type == "cpu")
    found = next(of_cpu, unsafe)
    return None if found is None else str(found)


def recorded(
    run: Callable[[list[Any]], Any], given: list[Any], static: Sequence[int], num_outputs: int
) -> Callable[[list[Any]], Any]:
    """A function of a list of tensors, which it empties, on the device of those `given`: it runs when it is called
    first, is recorded as a CUDA graph when it is called again, and replayed from then on. The inputs of `static` stay
    where they are; others are copied to where they were, unless functions before it in a step have made them."""
    from torch._inductor import cudagraph_trees
    from torch._inductor.cudagraph_utils import get_placeholder_info

    graph, device = fx.Graph(), next((tensor.device for tensor in given if tensor.is_cuda), None)
    if device is None:
        raise ValueError("none of its inputs is on a GPU")
    for index in range(len(given)):
        graph.placeholder(f"input_{index}")
    found: Callable[[list[Any]], Any] = cudagraph_trees.cudagraphify_impl(
        run, given, static, device_index=device.index, is_backward=False, is_inference=True,
        stack_traces=[None] * num_outputs, placeholders=get_placeholder_info(graph),
    )  # fmt: skip
    return found


def overflows(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[torch.device, torch.Tensor]:
    """What `scaler.unscale_(optimizer)` has found, by device: more than 0 where a gradient is not finite."""
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Whether `scaler.unscale_(optimizer)` was called since the last update."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


def on_clipping(
    check: Callable[[Iterable[torch.Tensor]], None], check_norm: Callable[[Iterable[torch.Tensor]], None]
) -> None:
    """From now on calls `check` with the parameters whose gradients torch's own `clip_grad_norm_` is about to scale,
    and `check_norm` with tensors whose norm it, or `get_total_norm`, is to take; `clip_grad_value_` takes parameters
    without any gradient, too."""
    module: Any = torch.nn.utils.clip_grad
    original, grouped = module._clip_grads_with_norm_, module._group_tensors_by_device_and_dtype

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        check([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        original(parameters, *args, **kwargs)

    def grouping(lists: Any, *rest: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_get_total_norm":
            check_norm(lists[0])
        return grouped(lists, *rest) if lists[0] else {}

    module._clip_grads_with_norm_ = checked  # what torch.nn.utils offers by itself stays the original
    module._group_tensors_by_device_and_dtype = grouping


def has_gradient_hooks(item: torch.Tensor | nn.Module) -> bool:
    """Whether someone changes gradients at a parameter or module."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(item, name, None) for name in names)


def all_modules_have_gradient_hooks() -> bool:
    """Whether someone changes gradients at every module."""
    module = nn.modules.module
    return bool(module._global_backward_hooks or module._global_backward_pre_hooks)


def have_gradient_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """The same of any of many tensors, in a tenth of the time."""
    return any(chain.from_iterable(map(attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), tensors)))
