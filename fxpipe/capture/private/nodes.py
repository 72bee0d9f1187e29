"""Operations of ATen, nodes of graphs, and tensors without memory."""

import operator
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.capture.private.process import replaced
from fxpipe.capture.reach import reached

# Raised where Python asks for a tensor's value, or for a size that depends on one.
VALUE_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


def is_of_traces(error: Exception) -> bool:
    """Whether torch raises it of tensors without values alone."""
    if isinstance(error, RuntimeError) and type(error) is RuntimeError:
        return any(text in str(error) for text in ("data pointer", "data is not allocated", "FakeTensor"))
    return isinstance(error, (*VALUE_ERRORS, UnsupportedOperatorException))


_ASSERTIONS = (
    "_assert_async", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size",
)  # fmt: skip


def is_assertion(target: Any) -> bool:
    return target is torch._check or packet_name(target) in _ASSERTIONS


@cache
def is_composite(target: Any, device_type: str = "") -> bool:
    """Whether an operation is but a way to write others, for autograd too; on a device where it has no kernel there."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = known(target.name(), "CompositeImplicitAutograd")
    return composite and not (device_type and known(target.name(), torch._C._dispatch_key_for_device(device_type)))


def is_mutable(target: Any) -> bool:
    """Whether an operation writes into an argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def writes(node: fx.Node) -> bool:
    """Whether an operation changes what an operand holds."""
    return is_mutable(node.target) and packet_name(node.target) != "detach_"


@cache
def may_alias(target: Any) -> bool:
    """Whether an operation's result may share memory with an argument."""
    schema = getattr(target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns) or target is operator.getitem


def shares_memory(node: fx.Node, operand: fx.Node) -> bool:
    """Whether an operation's result may share memory with one of its operands, or it writes there."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    given = arguments(node)
    shared = [given.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
    return any(operand is one or (isinstance(one, list | tuple) and operand in one) for one in shared)


def writers(node: fx.Node) -> list[fx.Node]:
    """The operations that change what a value holds, directly or through what shows its memory."""
    shown = reached([node], lambda of: [user for user in of.users if shares_memory(user, of)])
    return [one for one in shown if writes(one)]


def packet_name(target: Any) -> str:
    """An ATen operation's name without its overload; empty for anything else."""
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", ""))


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


def spelled(name: str) -> str:
    """As graphs spell the name of a placeholder."""
    return name if name.islower() else fx.Graph().placeholder(name).name


def rename(node: fx.Node, name: str) -> None:
    """Give a node a readable, unique name, as graphs spell those of their placeholders: a copy of it has the same."""
    node._rename(spelled(name))
    if node.op == "placeholder":
        node.target = node.name


def arguments(node: fx.Node) -> dict[str, Any]:
    """An ATen call's arguments by name, without those that are left out."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def argument(node: fx.Node, name: str) -> Any:
    """An ATen call's argument by name, None where it is left out."""
    return arguments(node).get(name)


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def storages(node: fx.Node, of_all: bool = False) -> set[int]:
    """Identities of the memory that a traced value shows, or the first of several, if not `of_all`."""
    tensors = tensors_in(node.meta.get("val"))
    try:
        return {memory_of(tensor) for tensor in (tensors if of_all else tensors[:1])}
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


class _NoFrames:
    """`traceback` where a mode notes who made it: half a millisecond, and as many modes as operations are traced."""

    extract_stack: Any = staticmethod(list)
    format_list = staticmethod(traceback.format_list)


def fake_mode() -> FakeTensorMode:
    """Tensors without memory."""
    with replaced(fake_tensor, "traceback", _NoFrames):
        return FakeTensorMode(allow_non_fake_inputs=True)


def export_mode() -> FakeTensorMode:
    """One in which a model and its inputs may be made, to be exported."""
    env = symbolic_shapes.ShapeEnv(tracked_fakes=[], trace_asserts=True)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)


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


def mode_of(value: Any) -> Any:
    """The fake mode of a traced value; None for a plain tensor, or one that a transform (vmap) wraps."""
    return getattr(value, "fake_mode", None)


def device_of(fake: Any) -> torch.device:
    """That of a tensor without memory: what autograd asks for more often than for anything else."""
    device: torch.device = fake.fake_device
    return device


def detached(fake: Any) -> torch.Tensor:
    """A tensor without memory, cut off from autograd's history, as `fake.detach()` makes it at length."""
    with in_kernel_invocation_manager(fake.fake_mode):
        return FakeTensor(fake.fake_mode, fake.detach(), fake.fake_device)


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory in the same way."""
    same = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return same and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def fake_result(target: Any, args: Any, kwargs: Any, like: torch.Tensor) -> Any:
    """What an operation gives on its arguments' fake values; `like` is any tensor of the trace."""
    mode: Any = like.fake_mode  # type: ignore[attr-defined]
    given, named = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    with mode, unguarded, enable_python_dispatcher(), torch.no_grad():  # torch 2.11's matmul in C++ makes sizes numbers
        return target(*given, **named)


def kept_for_gradient(node: fx.Node) -> set[int]:
    """The identities of the memory that an ATen operation's gradient needs; its arguments know if they require grad."""
    found = set[int]()
    if not isinstance(node.target, torch._ops.OpOverload):
        return found

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.add(memory_of(tensor))
        return tensor

    def given(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        is_tensor = isinstance(value, torch.Tensor)
        return value.detach().requires_grad_(argument.meta["requires_grad"]) if is_tensor else value

    args, named = fx.map_arg((node.args, dict(node.kwargs)), given)
    like = next(tensor for one in node.all_input_nodes for tensor in tensors_in(one.meta["val"]))
    mode: Any = like.fake_mode  # type: ignore[attr-defined]
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    kept = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with mode, unguarded, enable_python_dispatcher(), torch.enable_grad(), kept:
        node.target(*args, **named)
    return found
