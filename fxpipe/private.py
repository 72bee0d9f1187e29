"""Every use of a private or unstable name of torch, in one place. Checked on torch 2.11, 2.12 and 2.13."""

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpipe.errors import CaptureError

_ASSERTIONS = {
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
        marks = {**marks, "autocast": (device, dtype, enabled)}
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
