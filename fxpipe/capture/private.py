"""Every use of a private or unstable name of torch, in one place, but for those of symbolic sizes, in `private_sizes`.

Checked on torch 2.11, 2.12 and 2.13."""

import logging
import operator
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain, count, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._functorch import apis, eager_transforms
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.amp.grad_scaler import OptState
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.export import _trace
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from fxpipe.errors import CaptureError

# Raised where Python asks for a tensor's value, or for a size that depends on one.
VALUE_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)

_ASSERTIONS = (
    "_assert_async", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size",
)  # fmt: skip


_CHECKPOINT = "fxpipe.checkpoint"
"""The annotation of what runs inside `torch.utils.checkpoint`."""


def is_assertion(target: Any) -> bool:
    return target is torch._check or packet_name(target) in _ASSERTIONS


def fake_mode() -> FakeTensorMode:
    """Tensors without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def let_go(graph: fx.Graph) -> None:
    """What torch would keep of a trace for as long as the process lives: entries of its caches, and the sizes of the
    graph's inputs, which know these inputs, past Python's collector."""
    for method in vars(symbolic_shapes.ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
    for node in graph.find_nodes(op="placeholder"):
        env = getattr(getattr(node.meta.get("val"), "fake_mode", None), "shape_env", None)
        if env is not None and env.tracked_fakes:
            env.tracked_fakes.clear()


def device_of(fake: Any) -> torch.device:
    """That of a tensor without memory: what autograd asks for more often than for anything else."""
    device: torch.device = fake.fake_device
    return device


def export_mode() -> FakeTensorMode:
    """One in which a model and its inputs may be made, to be exported."""
    env = symbolic_shapes.ShapeEnv(tracked_fakes=[], trace_asserts=True)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)


def detached(fake: Any) -> torch.Tensor:
    """A tensor without memory, cut off from autograd's history, as `fake.detach()` makes it at length."""
    with in_kernel_invocation_manager(fake.fake_mode):
        return FakeTensor(fake.fake_mode, fake.detach(), fake.fake_device)


def is_mutable(target: Any) -> bool:
    """Whether an operation writes into an argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


@cache
def may_alias(target: Any) -> bool:
    """Whether an operation's result may share memory with an argument."""
    schema = getattr(target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns) or target is operator.getitem


def packet_name(target: Any) -> str:
    """An ATen operation's name without its overload; empty for anything else."""
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", ""))


def arguments(node: fx.Node) -> dict[str, Any]:
    """An ATen call's arguments by name, without those that are left out."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def argument(node: fx.Node, name: str) -> Any:
    """An ATen call's argument by name, None where it is left out."""
    return arguments(node).get(name)


def storages(node: fx.Node) -> set[int]:
    """Identities of the memory that a traced value shows."""
    tensor = first_tensor(node.meta.get("val"))
    try:
        return set() if tensor is None else {tensor.untyped_storage()._cdata}
    except NotImplementedError:  # inside vmap
        return set()


def first_tensor(value: Any) -> torch.Tensor | None:
    """A traced value, or the first of several; None where it is no tensor."""
    return next(iter(tensors_in(value)), None)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors inside nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def fake_result(target: Any, args: Any, kwargs: Any, like: torch.Tensor) -> Any:
    """What an operation gives on its arguments' fake values; `like` is any tensor of the trace."""
    mode: Any = like.fake_mode  # type: ignore[attr-defined]
    given, named = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    with mode, unguarded, enable_python_dispatcher(), torch.no_grad():  # torch 2.11's matmul in C++ makes sizes numbers
        return target(*given, **named)


def mode_of(value: Any) -> Any:
    """The fake mode of a traced value; None for a plain tensor, or one that a transform (vmap) wraps."""
    return getattr(value, "fake_mode", None)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its values, and the trace that is going on has not made it."""
    return mode_of(tensor) is None and not tensor.is_meta and not is_traced(tensor) and not under_transform()


def decomposition(target: Any) -> Callable[..., Any] | None:
    """How torch writes an operation as others, where it is a kernel of its own."""
    return None if is_composite(target) else decomposition_table.get(target)


def create_node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any = None, name: str | None = None
) -> fx.Node:
    """As `graph.create_node`, in half the time: it does not look for symbolic sizes among the arguments."""
    node = graph.create_node(op, target, name=name)
    node._update_args_kwargs(args, kwargs or {})
    return node


def rename(node: fx.Node, name: str) -> None:
    """Give a node a readable, unique name."""
    node._rename(name)
    if node.op == "placeholder":
        node.target = node.name


def uncompiled(part: Any) -> Any:
    """The module that `torch.compile` was given, where this is what it has made of it."""
    return getattr(part, "_orig_mod", part) if isinstance(part, nn.Module) else part


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """A module's attribute, another one inside."""
    original = vars(module)[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def added(kind: type, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes that a class does not have, inside."""
    names = [
        name for name in attributes if not hasattr(kind, name) or getattr(kind, name) is getattr(object, name, None)
    ]
    for name in names:
        setattr(kind, name, attributes[name])
    try:
        yield
    finally:
        for name in names:
            delattr(kind, name)


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """Of a tensor that the trace that is going on knows."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    slot = None if mode is None else get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the trace that is going on knows a tensor."""
    return traced_node(tensor) is not None


def trace_root() -> nn.Module:
    """What `get_attr` nodes of the trace that is going on read."""
    mode: Any = get_proxy_mode()
    root: nn.Module = mode.tracer.root
    return root


def moving_values(
    sources: Iterable[torch.Tensor], constants: Sequence[torch.Tensor]
) -> tuple[Callable[[torch.Tensor], bool], list[torch.Tensor]]:
    """Whether a value of the trace that is going on depends on any of `sources`, on random numbers, or on one of these
    constants; and which of these the trace has read."""
    mode = get_proxy_mode()
    if mode is None:
        return lambda tensor: False, []
    tracer: Any = mode.tracer
    moving, read = {traced_node(tensor) for tensor in sources}, list[torch.Tensor]()
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


# Functions that run a transform, and those that return a function which runs it later.
TRANSFORMS = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
)
TRANSFORMS_OF_LATER_CALLS = ((eager_transforms, "_vjp_with_argnums"), (eager_transforms, "linearize"))


def under_vmap() -> bool:
    """Whether one of the transforms under way is a vmap."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(one.key() == torch._C._functorch.TransformType.Vmap for one in stack)


def under_transform() -> bool:
    """Whether a transform of functions is under way."""
    return bool(torch._C._functorch.get_interpreter_stack())


def has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def listing(require: Callable[[torch.Tensor], None]) -> AbstractContextManager[None]:
    """Inside, what `require` does not refuse may be listed; torch asks for one entry after the other."""
    listed = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        require(tensor)
        return listed(tensor)

    return replaced(FakeTensor, "tolist", tolist)


def outside_fakes() -> AbstractContextManager[Any]:
    """Tensors made inside have memory."""
    return unset_fake_temporarily()


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


@contextmanager
def quiet() -> Iterator[None]:
    """Torch logs and prints nothing inside, unless TORCH_LOGS or TORCH_TRACE asks: a failed trial says why itself. Nor
    does it keep with every node the frames that made it, which nobody reads: a twelfth of a capture's calls."""
    if os.environ.get("TORCH_LOGS") or os.environ.get("TORCH_TRACE") or "print" in vars(_trace):  # is quiet
        yield
        return
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    for logger in loggers:
        logger.disabled = True
    vars(_trace)["print"] = lambda *args, **kwargs: None  # the graph as far as it came
    keeps, vars(fx.config)["do_not_emit_stack_traces"] = vars(fx.config).get("do_not_emit_stack_traces"), True
    try:
        yield
    finally:
        vars(fx.config)["do_not_emit_stack_traces"] = keeps
        del vars(_trace)["print"]
        for logger in loggers:
            logger.disabled = False


FRAMEWORK = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<eval_", "<string>")


class _Framework(set[str]):
    """The files of torch and of fxpipe, as `uninteresting_files` is asked for them."""

    def __contains__(self, file: object) -> bool:
        return str(file).startswith(FRAMEWORK)


def user_frames() -> AbstractContextManager[None]:
    """Guards that a trace meets name the line of the user's code, not torch's."""
    return replaced(symbolic_shapes, "uninteresting_files", _Framework)


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


def overflows(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[torch.device, torch.Tensor]:
    """What `scaler.unscale_(optimizer)` has found, by device: more than 0 where a gradient is not finite."""
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Whether `scaler.unscale_(optimizer)` was called since the last update."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


def is_node_of(node: Any, kind: Any) -> bool:
    """Whether a node of autograd's graph is that of an autograd function, and so the context of its backward."""
    return isinstance(node, kind._backward_cls)


_MATERIALIZED = "fxpipe.materialized"


def is_given_none(node: Any) -> bool:
    """Whether a backward gets None, rather than zeros, for results without gradient."""
    return not vars(node).get(_MATERIALIZED, True)


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory in the same way."""
    same = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return same and one.untyped_storage()._cdata == other.untyped_storage()._cdata


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


_AUTOGRAD_FUNCTIONS: list[Callable[..., Any]] = []
"""What is called instead of `apply`, the last of these."""


class _Applied:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # runs with torch's globals
        from fxpipe.capture import private

        return private._AUTOGRAD_FUNCTIONS[-1](__class__, cls, *args, **kwargs)  # type: ignore[name-defined]


@contextmanager
def on_autograd_function(instead: Callable[[Any, Callable[[], Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """What an autograd function of Python's returns is what `instead` makes of its class, what runs it, and what it
    was given; also where its `apply` has another name (`relu = ReLU.apply`), which is why its code is replaced."""
    function = torch.autograd.Function.__dict__["apply"].__func__
    code = function.__code__
    plain = types.FunctionType(code, function.__globals__, closure=function.__closure__)

    def apply(_: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(cls, partial(plain, cls, *args, **kwargs), (*args, *kwargs.values()))

    set_flag = FunctionCtx.set_materialize_grads

    def note_flag(context: Any, value: bool) -> None:
        set_flag(context, value)
        vars(context)[_MATERIALIZED] = value

    _AUTOGRAD_FUNCTIONS.append(apply)
    function.__code__ = _Applied.apply.__code__
    try:
        with replaced(FunctionCtx, "set_materialize_grads", note_flag):
            yield
    finally:
        function.__code__ = code
        _AUTOGRAD_FUNCTIONS.pop()


def on_clipping(check: Callable[[Iterable[torch.Tensor]], None]) -> None:
    """From now on calls `check` with the parameters whose gradients torch's own `clip_grad_norm_` is about to scale;
    `clip_grad_value_` takes parameters without any gradient, too."""
    module: Any = torch.nn.utils.clip_grad
    original, grouped = module._clip_grads_with_norm_, module._group_tensors_by_device_and_dtype

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        check([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        original(parameters, *args, **kwargs)

    module._clip_grads_with_norm_ = checked  # what torch.nn.utils offers by itself stays the original
    module._group_tensors_by_device_and_dtype = lambda lists, *rest: grouped(lists, *rest) if lists[0] else {}


def has_gradient_hooks(item: torch.Tensor | nn.Module) -> bool:
    """Whether someone changes gradients at a parameter or module."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(item, name, None) for name in names)


def have_gradient_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """The same of any of many tensors, in a tenth of the time."""
    return any(chain.from_iterable(map(attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), tensors)))


def require_no_modes(refuse: Callable[[str], Exception]) -> None:
    """Refuse what changes every call that a trace makes, and is no part of the model."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise refuse("a mode of torch functions or dispatch is active")
    if any(_global_hooks()):
        raise refuse("hooks of all modules are registered")


def _global_hooks() -> list[dict[int, Any]]:
    """Those of all modules, by kind."""
    module = vars(nn.modules.module)
    return [module[name] for name in module if name.startswith("_global_") and isinstance(module[name], dict)]


@contextmanager
def global_hooks_kept() -> Iterator[None]:
    """Hooks of all modules are afterwards those of before: torch 2.11 leaves one of every trace that fails."""
    before = [dict(hooks) for hooks in _global_hooks()]
    try:
        yield
    finally:
        for hooks, found in zip(_global_hooks(), before, strict=True):
            for key in hooks.keys() - found.keys():
                del hooks[key]


def switches() -> list[Any]:
    """What of torch's state a trace may depend on, beside the model."""
    cuda, backends = torch.backends.cuda, torch.backends
    asked = (
        torch.cuda.is_available, torch.xpu.is_available, backends.mps.is_available, backends.mkldnn.is_available,
        torch.get_default_dtype, torch.get_default_device, torch.get_float32_matmul_precision,
        torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
        cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled,
        backends.mha.get_fastpath_enabled, torch.is_inference_mode_enabled,
    )  # fmt: skip
    versions = torch.__version__, torch.version.git_version, str(torch.version.cuda)
    set_ones = backends.cudnn.enabled, backends.cudnn.deterministic, backends.mkldnn.enabled
    return [*versions, *set_ones, *(one() for one in asked)]


@cache
def is_composite(target: Any, device_type: str = "") -> bool:
    """Whether an operation is but a way to write others, for autograd too; on a device where it has no kernel there."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = known(target.name(), "CompositeImplicitAutograd")
    return composite and not (device_type and known(target.name(), torch._C._dispatch_key_for_device(device_type)))


def autograd_position() -> int:
    """What the next operation that autograd notes down comes after."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def position_in_backward() -> int | None:
    """The place of the operation whose backward runs, None outside of backwards."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def inductor(module: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """The module compiled for inputs like these; of an input that is a list, with `steal_arg`, the list is emptied."""
    from torch import _inductor

    found: Callable[..., Any] = _inductor.compile(module, given)
    return found
