"""The trace that is going on: what it knows, what it does not see, what it is told."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from fxpipe.capture.private.functions import under_transform
from fxpipe.capture.private.nodes import mode_of, tensors_in, writers
from fxpipe.capture.private.process import replaced
from fxpipe.errors import CaptureError


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """Of a tensor that the trace that is going on knows."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    slot = None if mode is None else get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the trace that is going on knows a tensor."""
    return traced_node(tensor) is not None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its values, and the trace that is going on has not made it."""
    return mode_of(tensor) is None and not tensor.is_meta and not is_traced(tensor) and not under_transform()


def trace_root() -> nn.Module:
    """What `get_attr` nodes of the trace that is going on read."""
    mode: Any = get_proxy_mode()
    root: nn.Module = mode.tracer.root
    return root


@contextmanager
def traced_inside() -> Iterator[list[fx.Node]]:
    """A list that has the nodes that a trace made inside, once that is left."""
    mode, found = get_proxy_mode(), list[fx.Node]()
    nodes: Any = [] if mode is None else mode.tracer.graph.nodes
    before = len(nodes)
    yield found
    found += islice(reversed(nodes), len(nodes) - before)


def traced_call(target: Any, args: tuple[Any, ...], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A call noted down in the trace that is going on, not made; its results are as `like`, and require grad as these
    do.

    Raises:
        CaptureError: the trace does not know a tensor among the arguments.
    """
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    if not all(map(is_traced, tensors_in(args))):
        raise CaptureError(
            "an autograd function computes its gradient of tensors from elsewhere; give them as arguments"
        )
    with outside_trace():
        results = [one.clone() for one in like]
    given = pytree.tree_map_only(torch.Tensor, lambda one: get_proxy_slot(one, tracer).proxy, args)
    found = tracer.create_proxy("call_function", target, given, {})
    track_tensor_tree(results, found, constant=None, tracer=tracer)
    return results


@contextmanager
def noted_without_gradients() -> Iterator[None]:
    """In the trace that is going on, what runs inside is under no_grad, as forwards of autograd functions are."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None or not torch.is_grad_enabled() else mode.tracer
    if tracer is not None:
        tracer.create_node("call_function", torch._C._set_grad_enabled, (False,), {}).meta["val"] = None
    try:
        yield
    finally:
        if tracer is not None:
            tracer.create_node("call_function", torch._C._set_grad_enabled, (True,), {}).meta["val"] = None


def moving_values(
    sources: Iterable[torch.Tensor], constants: Sequence[torch.Tensor]
) -> tuple[Callable[[torch.Tensor], bool], list[torch.Tensor]]:
    """Whether a value of the trace that is going on depends on any of `sources`, on random numbers, on what the trace
    writes to, or on one of these constants; and which of these the trace has read."""
    mode = get_proxy_mode()
    if mode is None:
        return lambda tensor: False, []
    tracer: Any = mode.tracer
    moving, read = {traced_node(tensor) for tensor in sources}, list[torch.Tensor]()
    moving |= {node for node in tracer.graph.find_nodes(op="placeholder") if writers(node)}
    for node in tracer.graph.nodes:
        held = getattr(tracer.root, node.target) if node.op == "get_attr" and node.users else None
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        read += [one for one in constants if one is held]
        if drawn or any(held is one for one in constants) or any(one in moving for one in node.all_input_nodes):
            moving.add(node)
    return lambda tensor: traced_node(tensor) in moving, read


@contextmanager
def same_values_kept() -> Iterator[None]:
    """Inside, what gives back its operand itself under no_grad, as `x.float()` of float32 does, makes no new value.

    A trace takes the operand for that operation's result from then on, and with it its gradient away.
    """
    original: Any = proxy_tensor.set_proxy_slot

    def put(value: Any, tracer: Any, proxy: Any) -> None:
        if isinstance(value, torch.Tensor) and value.requires_grad and not torch.is_grad_enabled():
            known, made = get_proxy_slot(value, tracer, None), proxy.proxy.node
            if known is not None and known.proxy.node in made.all_input_nodes and not _writes(made.target):
                return
        original(value, tracer, proxy)

    with replaced(proxy_tensor, "set_proxy_slot", put):
        yield


def _writes(target: Any) -> bool:
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable


@contextmanager
def outside_trace() -> Iterator[None]:
    """The trace that is going on sees nothing of what runs inside."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with disable_proxy_modes_tracing():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def outside_fakes() -> AbstractContextManager[Any]:
    """Tensors made inside have memory."""
    return unset_fake_temporarily()


def listing(require: Callable[[torch.Tensor], None]) -> AbstractContextManager[None]:
    """Inside, what `require` does not refuse may be listed; torch asks for one entry after the other."""
    listed = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        require(tensor)
        return listed(tensor)

    return replaced(FakeTensor, "tolist", tolist)


FRAMEWORK = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<eval_", "<string>")


class _Framework(set[str]):
    """The files of torch and of fxpipe, as `uninteresting_files` is asked for them."""

    def __contains__(self, file: object) -> bool:
        return str(file).startswith(FRAMEWORK)


def user_frames() -> AbstractContextManager[None]:
    """Guards that a trace meets name the line of the user's code, not torch's."""
    return replaced(symbolic_shapes, "uninteresting_files", _Framework)


def code_when_run() -> AbstractContextManager[None]:
    """Graphs traced inside are written as code when they run; export would write its own three times, for nobody."""
    return _use_lazy_graph_module(True)


@contextmanager
def quiet() -> Iterator[None]:
    """Torch logs and prints nothing inside, unless TORCH_LOGS or TORCH_TRACE asks: a failed trial says why itself. Nor
    does it keep with every node the frames that made it, which nobody reads: a twelfth of a capture's calls."""
    from torch.export import _trace  # two thirds of what fxpipe imports, of use to who traces alone

    if os.environ.get("TORCH_LOGS") or os.environ.get("TORCH_TRACE") or "print" in vars(_trace):  # is quiet
        yield
        return
    known = [one for name, one in logging.root.manager.loggerDict.items() if f"{name}.".startswith("torch.")]
    loggers = [one for one in known if isinstance(one, logging.Logger) and not one.disabled]
    for logger in loggers:
        logger.disabled = True
    vars(_trace)["print"] = lambda *args, **kwargs: None  # the graph as far as it came
    traces = logging.getLogger("torch.__trace")  # whose records are written for its handlers, though it is disabled
    handlers, traces.handlers = traces.handlers, []
    keeps, vars(fx.config)["do_not_emit_stack_traces"] = vars(fx.config).get("do_not_emit_stack_traces"), True
    try:
        yield
    finally:
        vars(fx.config)["do_not_emit_stack_traces"] = keeps
        traces.handlers = handlers
        del vars(_trace)["print"]
        for logger in loggers:
            logger.disabled = False
