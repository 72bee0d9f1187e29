"""Every use of a private or unstable name of torch, in one place. Checked on torch 2.11, 2.12 and 2.13."""

import operator
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from fxpipe.errors import CaptureError

# Raised where Python asks for a tensor's value, or for a size that depends on one.
VALUE_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)

_ASSERTIONS = {
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch._check,
}


def is_assertion(target: Any) -> bool:
    return target in _ASSERTIONS


def fake_mode() -> FakeTensorMode:
    """Tensors without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def may_alias(target: Any) -> bool:
    """Whether an operation's result may share memory with an argument."""
    schema = getattr(target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns) or target is operator.getitem


def packet_name(target: Any) -> str:
    """An ATen operation's name without its overload; empty for anything else."""
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", ""))


def argument(node: fx.Node, name: str) -> Any:
    """An ATen call's argument by name, None where it is left out."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name)


def storages(node: fx.Node) -> set[int]:
    """Identities of the memory that a traced value shows."""
    tensor = first_tensor(node.meta.get("val"))
    return set() if tensor is None else {tensor.untyped_storage()._cdata}


def first_tensor(value: Any) -> torch.Tensor | None:
    """A traced value, or the first of several; None where it is no tensor."""
    items = value if isinstance(value, tuple | list) else [value]
    return next((item for item in items if isinstance(item, torch.Tensor)), None)


def fake_result(target: Any, args: Any, kwargs: Any, like: torch.Tensor) -> Any:
    """What an operation gives on its arguments' fake values; `like` is any tensor of the trace."""
    mode: Any = like.fake_mode  # type: ignore[attr-defined]
    given, named = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
    with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext(), torch.no_grad():
        return target(*given, **named)


def rename(node: fx.Node, name: str) -> None:
    """Give a node a readable, unique name."""
    node._rename(name)
    if node.op == "placeholder":
        node.target = node.name


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """One flat graph of a `torch.export` graph module: no_grad and autocast regions inlined, their marks on the nodes."""
    flat = fx.Graph()
    env: dict[fx.Node, Any] = {}
    outputs = _copy_into(flat, module, env, {})
    (output,) = module.graph.find_nodes(op="output")
    flat.output(outputs[0] if isinstance(outputs, tuple | list) else outputs).meta = dict(output.meta)
    return flat


def _copy_into(flat: fx.Graph, module: fx.GraphModule, env: dict[fx.Node, Any], marks: dict[str, Any]) -> Any:
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        if node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        elif node.op == "placeholder" and node in env:
            continue
        elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            env[node] = _inline_region(flat, node, env, marks)
        elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple | list):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            copy = flat.node_copy(node, lambda n: env[n])
            copy.meta = {"val": node.meta.get("val"), "path": _module_path(node), **marks}
            env[node] = copy
    raise AssertionError("a graph without output")


def _inline_region(flat: fx.Graph, node: fx.Node, env: dict[fx.Node, Any], marks: dict[str, Any]) -> Any:
    name = node.target.name()  # type: ignore[union-attr]
    values = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
    if name == "wrap_with_set_grad_enabled":
        enabled, inner, *operands = values
        marks = {**marks, "no_grad": not enabled}
    elif name == "wrap_with_autocast":
        device, dtype, enabled, _, inner, *operands = values
        outer = marks.get("autocast")
        if outer is None or outer[0] == device:
            marks = {**marks, "autocast": (device, dtype, enabled)}
        elif enabled:
            path = _module_path(node) or "(the model itself)"
            raise CaptureError(f"module {path}: autocast for {device} inside autocast for {outer[0]}; use one of them")
    else:
        path = _module_path(node) or "(the model itself)"
        raise CaptureError(f"module {path}: the construct {name} cannot be compiled; write it as plain operations")
    inner_env = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    return _copy_into(flat, inner, inner_env, marks)


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    path = path.removeprefix("L['self'].").split("@")[0]
    return "" if path == "model" else path.removeprefix("model.")


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """`torch.utils.checkpoint` runs its function once and keeps everything, with the same result and gradient."""
    name = "_checkpoint_without_reentrant_generator"
    original = getattr(checkpoint, name)
    setattr(checkpoint, name, lambda *args, **kwargs: iter((None,)))
    try:
        yield
    finally:
        setattr(checkpoint, name, original)


@contextmanager
def on_autograd_function(check: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    """Calls `check` with the class name and the tensor arguments of every custom autograd function that runs."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        check(cls.__name__, [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)])
        return original.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def has_gradient_hooks(item: torch.Tensor | nn.Module) -> bool:
    """Whether someone changes gradients at a parameter or module."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(item, name, None) for name in names)


def depends_on_values(value: Any) -> bool:
    """Whether a traced value's size, or the number it is, depends on what tensors hold."""
    return bool(free_unbacked_symbols(value)) if value is not None else False


def dynamic_fault(exported: torch.export.ExportedProgram, values: Sequence[torch.Tensor], batch_size: int) -> str | None:
    """Why a trace with a dynamic batch is not what the model does at `batch_size`; None where it is.

    Args:
        values: the traced inputs that have the batch as dimension 0.
    """
    env: Any = values[0].fake_mode.shape_env  # type: ignore[attr-defined]
    fixed = any(isinstance(value.shape[0], int) for value in values)
    symbols = {symbol for value in values for symbol in _symbols(value.shape[0])}
    for guard in env.guards:
        free = guard.expr.free_symbols
        if fixed and isinstance(guard.expr, sympy.Eq) and len(free) == 1:
            return f"forward makes it a number, {_place(guard)}"
        if not fixed and free and free <= symbols:
            if guard.expr.xreplace(dict.fromkeys(free, sympy.Integer(batch_size))) == sympy.false:
                return f"forward has another form where {sympy.Not(guard.expr)}, {_place(guard)}"
    bounds = [env.var_to_range[symbol] for symbol in symbols if symbol in env.var_to_range]
    if any(batch_size < bound.lower or batch_size > bound.upper for bound in bounds):
        return f"forward has another form at {batch_size} samples"
    return "forward makes it a number" if fixed else None


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _place(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    return f"at {frame.filename}:{frame.lineno}" if isinstance(frame, traceback.FrameSummary) else "somewhere"
