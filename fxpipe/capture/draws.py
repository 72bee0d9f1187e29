"""How one random ATen operation of the graph becomes a `Draw`: the same call, on the whole batch, from shapes alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.randomness import DROPOUTS, Draw, is_random
from fxpipe.capture.sizes import concrete
from fxpipe.errors import CaptureError

# Random operations whose result depends on a tensor argument's shape and type only, not on its values.
_SHAPE_ONLY = (
    "randn_like", "rand_like", "randint_like", "normal", "normal_functional", "uniform", "exponential",
    "bernoulli", "log_normal", "geometric", "cauchy", "random",
)  # fmt: skip
_FACTORIES = ("randn", "rand", "randint", "randperm", "normal")


@dataclass(frozen=True)
class OnOnes:
    """A call whose result depends on a tensor's shape and type alone: made of ones."""

    target: Any
    shape: tuple[Any, ...]
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, batch_size: int, device: torch.device) -> torch.Tensor:
        ones = torch.ones(concrete(self.shape, batch_size), dtype=self.dtype, device=device)
        return self.target(ones, *self.args, **_on(self.kwargs, device))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Factory:
    """A call without tensors: sizes, and where to put the result."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, batch_size: int, device: torch.device) -> torch.Tensor:
        return self.target(*concrete(self.args, batch_size), **_on(self.kwargs, device))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A call whose arguments `graph` makes of sizes and of the capture's `constants`, by placeholder."""

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]

    def __call__(self, batch_size: int, device: torch.device) -> torch.Tensor:
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                known = self.constants.get(node.meta["of"])
                values[node] = concrete(node.meta["val"], batch_size) if known is None else known.to(device)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*concrete(args, batch_size), **_on(kwargs, device))
        return values[node]  # type: ignore[no-any-return]


def passes_through(node: fx.Node) -> bool:
    """A dropout that drops nothing: it returns its first argument."""
    name = private.packet_name(node.target)
    return name in DROPOUTS and name != "native_dropout" and (float(node.args[1]) == 0.0 or not node.args[2])  # type: ignore[arg-type]


def hoist_draws(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> dict[str, Draw]:
    """Make every random operation a placeholder `draw_<k>`; a dropout becomes a product with its drawn mask.

    Args:
        constants: the values of the graph's constants, by placeholder.
    """
    random = [n for n in graph.nodes if n.op == "call_function" and is_random(n.target, n.args)]
    first = next(iter(graph.nodes))
    draws = {}
    for index, node in enumerate(random):
        draw, masks, value_of_draw = _draw_of(node, index, constants)
        with graph.inserting_before(first):
            placeholder = graph.placeholder(f"draw_{index}")
        placeholder.meta = {"path": node.meta["path"], "kind": "draw", "val": value_of_draw}
        draws[placeholder.name] = draw
        value = placeholder
        if masks is not None:
            with graph.inserting_before(node):
                value = graph.call_function(torch.ops.aten.mul.Tensor, (masks, placeholder))
            value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return draws


def _draw_of(
    node: fx.Node, index: int, constants: Mapping[str, torch.Tensor]
) -> tuple[Draw, fx.Node | None, torch.Tensor]:
    """The draw; for a dropout the value that its mask multiplies; the draw's fake tensor."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target.overloadpacket.__name__
    if name in ("dropout", "feature_dropout"):
        value = node.args[0]
        assert isinstance(value, fx.Node)
        like = value.meta["val"]
        if name == "feature_dropout":  # drops whole channels
            like = like.new_empty((*like.shape[:2], *[1] * (like.ndim - 2)))
        return Draw(index, str(target), _on_ones(node, like)), value, like
    if name in DROPOUTS:
        raise _refusal(node, f"{name} is not supported; use nn.Dropout")
    tensors = [a for a in node.args if isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor)]
    if not tensors and name in _FACTORIES:
        return Draw(index, str(target), _factory(node)), None, node.meta["val"]
    if len(tensors) == 1 and tensors[0] is node.args[0] and name in _SHAPE_ONLY and "Tensor" not in str(target):
        if name == "bernoulli" and len(node.args) < 2:
            raise _refusal(node, "its result depends on a tensor's values; compare torch.rand with the probabilities")
        return Draw(index, str(target), _on_ones(node, tensors[0].meta["val"])), None, node.meta["val"]
    recipe = _recipe(node, constants)
    if recipe is None or not isinstance(node.meta["val"], torch.Tensor):
        raise _refusal(node, "its result depends on a tensor's values; draw with rand/randn/randint and transform")
    return Draw(index, str(target), Recipe(recipe, constants)), None, node.meta["val"]


def _recipe(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> fx.Graph | None:
    """How a random operation's result is made from constants and sizes; None where it takes anything else."""
    needed, pending = {node}, [node]
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument not in needed and not _is_size(argument):
                if argument.op == "placeholder" and argument.name not in constants:
                    return None
                pending.append(argument)
            needed.add(argument)
    recipe, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for one in node.graph.nodes:
        if one in needed:
            size = _is_size(one)
            copies[one] = recipe.placeholder(one.name) if size else recipe.node_copy(one, copies.__getitem__)
            copies[one].meta = {"val": one.meta["val"], "of": one.name}
    return recipe


def _is_size(node: fx.Node) -> bool:
    return private.first_tensor(node.meta["val"]) is None


def _refusal(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(f"{private.where(node)}: random operation {node.target}: {why}")


def _on_ones(node: fx.Node, like: torch.Tensor) -> OnOnes:
    return OnOnes(node.target, tuple(like.shape), like.dtype, node.args[1:], node.kwargs)


def _factory(node: fx.Node) -> Factory:
    return Factory(node.target, fx.map_arg(node.args, lambda n: n.meta["val"]), node.kwargs)


def _on(kwargs: Any, device: torch.device) -> dict[str, Any]:
    return {k: (device if k == "device" else v) for k, v in kwargs.items()}
