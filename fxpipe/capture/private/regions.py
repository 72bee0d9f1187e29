"""Where gradients are off, autocast is on or values are recomputed: in a trace, marks on nodes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils import checkpoint

from fxpipe.capture.private.process import replaced
from fxpipe.capture.private.tracing import traced_inside
from fxpipe.errors import CaptureError

_CHECKPOINT = "fxpipe.checkpoint"
"""The annotation of what runs inside `torch.utils.checkpoint`."""


@contextmanager
def plain_regions() -> Iterator[None]:
    """`torch.export` leaves the switches of autograd and autocast in the graph.

    Wrapped into regions of their own, as it does otherwise, a no_grad inside an autocast is lost.
    """

    def as_they_are(module: Any, signature: Any) -> Any:
        return module, signature

    with (
        replaced(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", as_they_are),
        replaced(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", as_they_are),
    ):
        yield


def flatten_regions(module: fx.GraphModule) -> fx.Graph:
    """The graph of a `torch.export` graph module, its switches of autograd and autocast made marks on the nodes.

    Marks: `no_grad` True, `autocast` (device, type, whether enabled) of the innermost region, `checkpoint` the number
    of the call of `torch.utils.checkpoint` that it is in.
    """
    flat = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    no_grad, autocasts, checkpoints = False, dict[fx.Node, tuple[Any, ...]](), dict[int, int]()
    for node in module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            no_grad = not node.args[0]
        elif node.target is _enter_autocast:
            autocasts[node] = _autocast(node, list(autocasts.values()))
        elif node.target is _exit_autocast:
            autocasts.pop(node.args[0])
        elif node.op == "output":
            results = [env[result] for result in node.args[0]]
            flat.output(tuple(results) if len(results) > 1 else results[0]).meta = dict(node.meta)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(f"{where(node)}: {node.target.name()} cannot be compiled; write it as plain operations")
        elif node.op != "get_attr":  # only the submodules of higher order operations
            marks: dict[str, Any] = {"no_grad": True} if no_grad else {}
            if autocasts:
                marks["autocast"] = list(autocasts.values())[-1]
            if (checkpointed := (node.meta.get("custom") or {}).get(_CHECKPOINT)) is not None:
                marks["checkpoint"] = checkpoints.setdefault(checkpointed, len(checkpoints))
            env[node] = flat.node_copy(node, lambda n: env[n])
            env[node].meta = {"val": node.meta.get("val"), "path": _module_path(node), **marks}
    return flat


def _autocast(node: fx.Node, outer: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The state inside a new autocast region. One device at a time: what is off for another changes nothing."""
    device, dtype, enabled = node.args[:3]
    if not outer or outer[-1][0] == device:
        return device, dtype, enabled
    if enabled and outer[-1][2]:
        raise CaptureError(f"{where(node)}: autocast for {device} inside autocast for {outer[-1][0]}; use one of them")
    return (device, dtype, enabled) if enabled else outer[-1]


def where(node: fx.Node) -> str:
    """The module a node belongs to, for an error."""
    return f"module {node.meta.get('path') or _module_path(node) or '(the model itself)'}"


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    path = path.removeprefix("L['self'].").split("@")[0]
    return "" if path == "model" else path.removeprefix("model.")


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """`torch.utils.checkpoint` runs its function once and keeps everything, with the same result and gradient.

    Operations of each outermost call are annotated with a number of its own. With `use_reentrant` a function has no
    gradient where none of its arguments has one, whatever its weights are.
    """
    number, depth = count(), [0]

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        depth[0] += 1
        try:
            with traced_inside() as nodes:
                yield  # here the function runs; an error of its own passes through
        finally:
            depth[0] -= 1
        if nodes and not depth[0]:
            mark = {_CHECKPOINT: next(number)}
            for node in nodes:
                node.meta["custom"] = mark

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            checkpoint.check_backward_validity(args)
            given = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
            with nullcontext() if given else torch.no_grad():
                return checkpoint.checkpoint(function, *args, use_reentrant=False)

    with (
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", around),
        replaced(checkpoint, "CheckpointFunction", Reentrant),
    ):
        yield


@contextmanager
def inference_without_gradients() -> Iterator[None]:
    """`torch.inference_mode` entered inside is `no_grad`, which a trace records: of the mode itself it sees nothing."""
    kind = torch.autograd.grad_mode.inference_mode

    def enter(mode: Any) -> None:
        mode.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not mode.mode)

    def leave(mode: Any, *error: Any) -> None:
        torch._C._set_grad_enabled(mode.before)

    with replaced(kind, "__enter__", enter), replaced(kind, "__exit__", leave):
        yield


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Autocast inside casts every weight anew."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def on_autocast(check: Callable[[str, torch.dtype | None, bool], None]) -> AbstractContextManager[None]:
    """Calls `check` with the arguments of every autocast that is made: device type, type, whether enabled."""
    original = torch.amp.autocast_mode.autocast.__init__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        check(device_type, dtype, enabled)
        original(self, device_type, dtype, enabled, cache_enabled)

    return replaced(torch.amp.autocast_mode.autocast, "__init__", made)
