"""A capture as JSON data, and back: names, numbers and lists, nothing that is run.

add = aten.add.Tensor(x, 2)     ["call_function", "add", "aten.add.Tensor", [{"node": "x"}, 2], {}, {"val": ..., ...}]
x.meta["val"]                   {"tensor": [[{"SymInt": "s0"}, 4], [4, 1], "float32", "cpu", false]}

Operations are looked up among ATen's by name; tensors without memory are made anew, their sizes functions of the same
symbols. A constant that is an attribute of the model is that attribute; others are kept by their bytes.
"""

import base64
import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture import Capture, private
from fxpipe.capture.expressions import Unwritable, expression_data, expression_of, symbol
from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.randomness import Draw
from fxpipe.capture.updates import Update

_MOST_CONSTANT_BYTES = 1 << 22  # of all constants that are not the model's own: a capture is some MB
_META = {"val", "path", "kind", "state", "input", "requires_grad", "no_grad", "autocast", "of"} | {
    "extra", "detaches", "output", "checkpoint",
}  # fmt: skip
_ON_NUMBERS: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge"),
        (math, "ceil floor trunc"),
        (torch, "sym_int sym_float sym_max sym_min sym_not"),
    )
    for name in names.split()
}
_NAMES = {function: name for name, function in _ON_NUMBERS.items()}
_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_SYMBOLIC = {"SymInt": int, "SymFloat": float, "SymBool": bool}


def to_data(captured: Capture, model: nn.Module) -> dict[str, Any]:
    """The capture of `model` as JSON data.

    Raises:
        Unwritable: it has operations, sizes, values or constants that the data cannot say.
    """
    if captured.read:
        raise Unwritable(f"forward reads {next(iter(captured.read))} as a number")
    if captured.guards:
        raise Unwritable(f"forward reads numbers of its input {captured.guards[0].inputs[0]}")
    graphs = captured.graph, *(update.graph for update in captured.updates)
    placeholders = [node for graph in graphs for node in graph.find_nodes(op="placeholder")]
    states = {node.name: node.meta["state"] for node in placeholders if node.meta["kind"] == "constant"}
    return {
        "symbols": private.sizes.size_symbols([n.meta.get("val") for n in captured.graph.nodes]),
        "nodes": [_node_data(node) for node in captured.graph.nodes],
        "batched": [leaf.batched for leaf in captured.inputs.leaves],
        "tensors": dict(captured.tensors),
        "constants": {n: _constant_data(t, states[n], model) for n, t in captured.constants.items()},
        "trainable": sorted(captured.trainable),
        "tied": dict(captured.tied),
        "draws": {name: [draw.index, draw.target, _recipe_data(draw)] for name, draw in captured.draws.items()},
        "batch": [one.name for one in captured.batch],
        "unused": list(captured.unused),
        "notes": list(captured.notes),
        "fewest": captured.fewest,
        "most": captured.most,
        "left_out": list(captured.left_out),
        "kept": list(captured.kept),
        "updates": [
            [one.name, [_node_data(node) for node in one.graph.nodes], one.is_first] for one in captured.updates
        ],
        "fingerprint": captured.fingerprint,
        "unchecked": list(captured.unchecked),
    }


@dataclass(frozen=True)
class _Traced:
    """What a trace knows of values: its mode, and one of every kind: many are alike, and to ask sizes takes long."""

    mode: Any
    tensors: dict[str, torch.Tensor]

    def tensor(self, said: list[Any]) -> torch.Tensor:
        key = repr(said)
        if key not in self.tensors:
            shape, stride, dtype, device, grad = _value(said, self, {})
            found = private.sizes.traced_tensor(self.mode, shape, stride, kind_named(dtype), torch.device(device), grad)
            self.tensors[key] = found
        found = self.tensors[key]
        return private.detached(found).requires_grad_(found.requires_grad)


def from_data(data: Mapping[str, Any], inputs: InputSpec, model: nn.Module) -> Capture:
    """The capture that `data` says, of a call described by `inputs`; any exception means that the data is none."""
    symbols = {symbol(name): bounds for name, bounds in data["symbols"].items()}
    traced = _Traced(private.sizes.traced_mode(symbols), {})
    flags = zip(inputs.leaves, data["batched"], strict=True)
    return Capture(
        graph=_graph(traced, data["nodes"]),
        inputs=replace(inputs, leaves=tuple(replace(leaf, batched=flag) for leaf, flag in flags)),
        tensors=data["tensors"],
        constants={name: _constant(one, model) for name, one in data["constants"].items()},
        trainable=frozenset(data["trainable"]),
        tied=data["tied"],
        draws={n: Draw(i, target, _graph(traced, nodes), {}) for n, (i, target, nodes) in data["draws"].items()},
        batch=tuple(symbol(name) for name in data["batch"]),
        unused=tuple(data["unused"]),
        notes=tuple(data["notes"]),
        fewest=int(data["fewest"]),
        most=data["most"],
        left_out=tuple(data["left_out"]),
        kept=tuple(data["kept"]),
        fingerprint=data["fingerprint"],
        unchecked=tuple(data["unchecked"]),
        updates=tuple(Update(name, _graph(traced, nodes), first) for name, nodes, first in data["updates"]),
    )


def _recipe_data(draw: Draw) -> list[Any]:
    nodes = draw.graph.nodes
    if any(node.meta.get("of") in draw.constants for node in nodes):
        raise Unwritable(f"the draw {draw.target} of constants")  # the model's own are known by its placeholders alone
    return [_node_data(node) for node in nodes]


def _node_data(node: fx.Node) -> list[Any]:
    if unknown := node.meta.keys() - _META:
        raise Unwritable(f"{node.name} is marked with {sorted(unknown)}")
    target = _target_data(node.target) if node.op == "call_function" else node.target
    return [node.op, node.name, target, *map(_value_data, (list(node.args), dict(node.kwargs), node.meta))]


def _graph(traced: _Traced, nodes: list[Any]) -> fx.Graph:
    graph, made = fx.Graph(), dict[str, fx.Node]()
    for op, name, target, *values in nodes:
        if op not in ("placeholder", "call_function", "output"):
            raise ValueError(op)
        args, kwargs, meta = (_value(one, traced, made) for one in values)
        made[name] = graph.create_node(
            op, _target(target) if op == "call_function" else target, tuple(args), kwargs, name
        )
        made[name].meta = meta
        if made[name].name != name:
            raise ValueError(name)
    graph.lint()
    return graph


def _target_data(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target)
    if target in _NAMES:
        return _NAMES[target]
    raise Unwritable(f"the operation {target} is not one of ATen's")


@functools.cache
def _target(name: str) -> Any:
    if name in _ON_NUMBERS:
        return _ON_NUMBERS[name]
    namespace, packet, overload = name.split(".")
    if namespace != "aten":
        raise ValueError(name)
    return getattr(getattr(torch.ops.aten, packet), overload)


def _value_data(value: Any) -> Any:
    """A value of a node's arguments or marks: plain as it is, lists, and one-word mappings for the rest."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_value_data(one) for one in value]
    return dict([_worded(value)])


def _worded(value: Any) -> tuple[str, Any]:
    if isinstance(value, dict):
        return "dict", [[key, _value_data(one)] for key, one in value.items()]
    if isinstance(value, tuple):
        return "tuple", [_value_data(one) for one in value]
    if isinstance(value, slice):
        return "slice", [_value_data(one) for one in (value.start, value.stop, value.step)]
    if isinstance(value, fx.Node):
        return "node", value.name
    if isinstance(value, torch.Tensor):
        return "tensor", _tensor_data(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value).__name__, expression_data(value.node.expr)
    if isinstance(value, _KINDS):
        return "torch", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    raise Unwritable(f"a {type(value).__name__} among arguments")


def _value(data: Any, traced: _Traced, made: Mapping[str, fx.Node]) -> Any:
    if isinstance(data, list):
        return [_value(one, traced, made) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, said),) = data.items()
    if kind == "dict":
        return {key: _value(one, traced, made) for key, one in said}
    if kind == "tuple":
        return tuple(_value(one, traced, made) for one in said)
    if kind == "slice":
        return slice(*(_value(one, traced, made) for one in said))
    if kind == "node":
        return made[said]
    if kind == "tensor":
        return traced.tensor(said)
    if kind == "torch":
        return kind_named(said)
    if kind == "device":
        return torch.device(said)
    return private.sizes.traced_number(traced.mode, expression_of(said), _SYMBOLIC[kind])


def _tensor_data(value: torch.Tensor) -> list[Any]:
    if private.mode_of(value) is None or value.layout != torch.strided or value.is_quantized:
        raise Unwritable("a traced value that is no plain tensor")
    sizes = _value_data([list(value.shape), list(value.stride())])
    return [*sizes, str(value.dtype).removeprefix("torch."), str(value.device), value.requires_grad]


def kind_named(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _KINDS):
        raise ValueError(name)
    return found


def _constant_data(tensor: torch.Tensor, state: str, model: nn.Module) -> dict[str, Any]:
    if _attribute(model, state) is tensor:
        return {"of": state}
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel()
    if not plain or tensor.requires_grad or tensor.nbytes > _MOST_CONSTANT_BYTES:
        raise Unwritable(f"the constant {state} of {tensor.nbytes} bytes")
    content = tensor.reshape(-1)[:, None].view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": kind, "bytes": base64.b64encode(content).decode()}


def _constant(data: Mapping[str, Any], model: nn.Module) -> torch.Tensor:
    if "of" not in data:
        content = bytearray(base64.b64decode(data["bytes"], validate=True))
        return torch.frombuffer(content, dtype=kind_named(data["dtype"])).reshape(data["shape"])
    found = _attribute(model, data["of"])
    if not isinstance(found, torch.Tensor):
        raise ValueError(data["of"])
    return found


def _attribute(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
