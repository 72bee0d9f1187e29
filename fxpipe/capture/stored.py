"""A capture as JSON data, and back: names, numbers and lists, nothing that is run.

add = aten.add.Tensor(x, 2)     ["call_function", "add", "aten.add.Tensor", [{"node": "x"}, 2], {}, {"val": ..., ...}]
x.meta["val"]                   {"tensor": [["s0", 4], [4, 1], "float32", "cpu", false]}

Operations are looked up among ATen's by name; tensors without memory are made anew, their sizes functions of the same
symbols. A constant that is an attribute of the model is that attribute; others are kept by their bytes.
"""

import base64
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture import Capture, private
from fxpipe.capture.draws import Factory, OnOnes, Recipe
from fxpipe.capture.expressions import Unwritable, expression_data, expression_of, symbol
from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.randomness import Draw

_MOST_CONSTANT_BYTES = 1 << 22  # of all constants that are not the model's own: a capture is some MB
_META = ("val", "path", "kind", "state", "input", "requires_grad", "no_grad", "autocast", "of")
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    **{f"operator.{n}": getattr(operator, n) for n in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod")},
    **{f"operator.{n}": getattr(operator, n) for n in ("pow", "neg", "eq", "ne", "lt", "le", "gt", "ge")},
    **{f"math.{n}": getattr(math, n) for n in ("ceil", "floor", "trunc")},
    **{f"torch.{n}": getattr(torch, n) for n in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not")},
}
_NAMES = {function: name for name, function in _ON_NUMBERS.items()}
_KINDS = (torch.dtype, torch.layout, torch.memory_format)


def to_data(captured: Capture, model: nn.Module) -> dict[str, Any]:
    """The capture of `model` as JSON data.

    Raises:
        Unwritable: it has operations, sizes, values or constants that the data cannot say.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    states = {node.name: node.meta["state"] for node in placeholders if node.meta["kind"] == "constant"}
    return {
        "symbols": private.size_symbols([n.meta.get("val") for n in captured.graph.nodes]),
        "nodes": _graph_data(captured.graph),
        "batched": [leaf.batched for leaf in captured.inputs.leaves],
        "tensors": dict(captured.tensors),
        "constants": {n: _constant_data(t, states[n], model) for n, t in captured.constants.items()},
        "trainable": sorted(captured.trainable),
        "tied": dict(captured.tied),
        "draws": {name: _draw_data(draw) for name, draw in captured.draws.items()},
        "batch": [one.name for one in captured.batch],
        "unused": list(captured.unused),
        "notes": list(captured.notes),
    }


def from_data(data: Mapping[str, Any], inputs: InputSpec, model: nn.Module) -> Capture:
    """The capture that `data` says, of a call described by `inputs`; any exception means that the data is none."""
    reader = Reader(data["symbols"])
    flags = zip(inputs.leaves, data["batched"], strict=True)
    draws = {name: reader.draw(one) for name, one in data["draws"].items()}
    return Capture(
        graph=reader.graph(data["nodes"]),
        inputs=replace(inputs, leaves=tuple(replace(leaf, batched=flag) for leaf, flag in flags)),
        tensors=data["tensors"],
        constants={name: _constant(one, model) for name, one in data["constants"].items()},
        trainable=frozenset(data["trainable"]),
        tied=data["tied"],
        draws=draws,
        batch=tuple(symbol(name) for name in data["batch"]),
        unused=tuple(data["unused"]),
        notes=tuple(data["notes"]),
    )


def _graph_data(graph: fx.Graph) -> list[Any]:
    return [_node_data(node) for node in graph.nodes]


def _node_data(node: fx.Node) -> list[Any]:
    if unknown := node.meta.keys() - set(_META):
        raise Unwritable(f"{node.name} is marked with {sorted(unknown)}")
    meta = {key: _value_data(value) for key, value in node.meta.items()}
    kwargs = {key: _value_data(value) for key, value in node.kwargs.items()}
    target = _target_data(node.target) if node.op == "call_function" else node.target
    return [node.op, node.name, target, [_value_data(one) for one in node.args], kwargs, meta]


def _target_data(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target)
    if target in _NAMES:
        return _NAMES[target]
    raise Unwritable(f"the operation {target} is not one of ATen's")


@cache
def _target(name: str) -> Any:
    if name in _ON_NUMBERS:
        return _ON_NUMBERS[name]
    namespace, packet, overload = name.split(".")
    if namespace != "aten":
        raise ValueError(name)
    return getattr(getattr(torch.ops.aten, packet), overload)


def _value_data(value: Any) -> Any:
    """A value of a node's arguments or marks."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.Tensor):
        return {"tensor": _tensor_data(value)}
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return {type(value).__name__: expression_data(value.node.expr)}
    if isinstance(value, _KINDS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": [_value_data(one) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_value_data(one) for one in value]}
    raise Unwritable(f"a {type(value).__name__} among arguments")


def _tensor_data(value: torch.Tensor) -> list[Any]:
    if private.mode_of(value) is None or value.layout != torch.strided or value.is_quantized:
        raise Unwritable("a traced value that is no plain tensor")
    sizes = [[s if isinstance(s, int) else expression_data(s.node.expr) for s in of] for of in _sizes(value)]
    return [*sizes, str(value.dtype).removeprefix("torch."), str(value.device), value.requires_grad]


def _sizes(value: torch.Tensor) -> tuple[Any, Any]:
    return tuple(value.shape), value.stride()


def _constant_data(tensor: torch.Tensor, state: str, model: nn.Module) -> dict[str, Any]:
    if _attribute(model, state) is tensor:
        return {"of": state}
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    if not plain or tensor.requires_grad or tensor.nbytes > _MOST_CONSTANT_BYTES:
        raise Unwritable(f"the constant {state} of {tensor.nbytes} bytes")
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": kind, "bytes": base64.b64encode(content).decode()}


def _constant(data: Mapping[str, Any], model: nn.Module) -> torch.Tensor:
    if "of" in data:
        found = _attribute(model, data["of"])
        if not isinstance(found, torch.Tensor):
            raise ValueError(data["of"])
        return found
    content = bytearray(base64.b64decode(data["bytes"], validate=True))
    flat = torch.frombuffer(content, dtype=torch.uint8).clone() if content else torch.empty(0, dtype=torch.uint8)
    return flat.view(_kind(data["dtype"])).reshape(data["shape"])


def _attribute(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _kind(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _KINDS):
        raise ValueError(name)
    return found


def _draw_data(draw: Draw) -> dict[str, Any]:
    made = draw.make
    if isinstance(made, Recipe):
        names = {node.meta["of"] for node in made.graph.nodes}
        constants = {name: tensor for name, tensor in made.constants.items() if name in names}
        if constants:  # the model's own are known by the graph's placeholders alone
            raise Unwritable(f"the draw {draw.target} of constants")
        return {"index": draw.index, "target": draw.target, "recipe": _graph_data(made.graph)}
    if not isinstance(made, OnOnes | Factory):
        raise Unwritable(f"the draw {draw.target}")
    call = [_target_data(made.target), [_value_data(v) for v in made.args]]
    kwargs = {key: _value_data(value) for key, value in made.kwargs.items()}
    like = [_value_data(tuple(made.shape)), _value_data(made.dtype)] if isinstance(made, OnOnes) else None
    return {"index": draw.index, "target": draw.target, "call": [*call, kwargs], "like": like}


class Reader:
    """Reads nodes and values; `symbols` are the sizes' names with hint and bounds."""

    def __init__(self, symbols: Mapping[str, Any]) -> None:
        self._symbols = {name: symbol(name) for name in symbols}
        self._mode = private.traced_mode({self._symbols[name]: bounds for name, bounds in symbols.items()})
        self._nodes: dict[str, fx.Node] = {}

    def graph(self, nodes: list[Any]) -> fx.Graph:
        graph, self._nodes = fx.Graph(), {}
        for op, name, target, args, kwargs, meta in nodes:
            if op not in ("placeholder", "call_function", "output"):
                raise ValueError(op)
            found = _target(target) if op == "call_function" else target
            given = tuple(self.value(one) for one in args), {key: self.value(one) for key, one in kwargs.items()}
            node = graph.create_node(op, found, *given, name=name)
            if node.name != name:
                raise ValueError(name)
            node.meta = {key: self.value(value) for key, value in meta.items()}
            self._nodes[name] = node
        graph.lint()
        return graph

    def draw(self, data: Mapping[str, Any]) -> Draw:
        make: Any
        if "recipe" in data:
            make = Recipe(self.graph(data["recipe"]), {})
        else:
            target, args, kwargs = data["call"]
            call = tuple(map(self.value, args)), {key: self.value(value) for key, value in kwargs.items()}
            if data["like"] is None:
                make = Factory(_target(target), *call)
            else:
                shape, dtype = map(self.value, data["like"])
                make = OnOnes(_target(target), shape, dtype, *call)
        return Draw(data["index"], data["target"], make)

    def value(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, said),) = data.items()
        return _READ[kind](self, said)

    def _tensor(self, said: list[Any]) -> torch.Tensor:
        shape, stride, kind, device, requires_grad = said
        sizes, strides = ([self._size(one) for one in of] for of in (shape, stride))
        place = torch.device(device)
        return private.traced_tensor(self._mode, sizes, strides, _kind(kind), place, requires_grad)

    def _size(self, data: Any) -> Any:
        return data if isinstance(data, int) else self._symbolic(data, int)

    def _symbolic(self, data: Any, kind: type) -> Any:
        return private.traced_number(self._mode, expression_of(data, self._symbols), kind)


_READ: dict[str, Callable[[Reader, Any], Any]] = {
    "float": lambda reader, said: float.fromhex(said),
    "node": lambda reader, said: reader._nodes[said],
    "tensor": Reader._tensor,
    "SymInt": lambda reader, said: reader._symbolic(said, int),
    "SymFloat": lambda reader, said: reader._symbolic(said, float),
    "SymBool": lambda reader, said: reader._symbolic(said, bool),
    "torch": lambda reader, said: _kind(said),
    "device": lambda reader, said: torch.device(said),
    "slice": lambda reader, said: slice(*map(reader.value, said)),
    "tuple": lambda reader, said: tuple(map(reader.value, said)),
    "list": lambda reader, said: list(map(reader.value, said)),
}
