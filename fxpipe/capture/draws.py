"""How one random ATen operation of the graph becomes a `Draw`: the same call, on the whole batch, from shapes alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.capture import private
from fxpipe.capture.randomness import DROPOUTS, Draw, is_random
from fxpipe.errors import CaptureError

aten = torch.ops.aten
# Random operations whose result depends on a tensor argument's shape and type only, not on its values.
_SHAPE_ONLY = (
    "randn_like", "rand_like", "randint_like", "normal", "normal_functional", "uniform", "exponential",
    "bernoulli", "log_normal", "geometric", "cauchy", "random",
)  # fmt: skip


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
                value = graph.call_function(aten.mul.Tensor, (masks, placeholder))
            value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return draws


def _draw_of(
    node: fx.Node, index: int, constants: Mapping[str, torch.Tensor]
) -> tuple[Draw, fx.Node | None, torch.Tensor]:
    """The draw; for a dropout the value that its mask multiplies; the draw's fake tensor."""
    name, value, masks, like = private.packet_name(node.target), node.meta["val"], None, None
    tensors = [argument for argument in node.all_input_nodes if not _is_size(argument)]
    if name in ("dropout", "feature_dropout"):
        (masks,) = tensors
        like = value = masks.meta["val"]
        if name == "feature_dropout":  # drops whole channels
            like = value = like.new_empty((*like.shape[:2], *[1] * (like.ndim - 2)))
    elif name in DROPOUTS:
        raise _refusal(node, f"{name} is not supported; use nn.Dropout")
    elif name in _SHAPE_ONLY and tensors == [node.args[0]] and "Tensor" not in str(node.target):
        if name == "bernoulli" and len(node.args) < 2:
            raise _refusal(node, "its result depends on a tensor's values; compare torch.rand with the probabilities")
        like = tensors[0].meta["val"]
    recipe = _recipe(node, constants, like)
    if recipe is None or not isinstance(value, torch.Tensor):
        raise _refusal(node, "its result depends on a tensor's values; draw with rand/randn/randint and transform")
    return Draw(index, str(node.target), recipe, constants), masks, value


def _recipe(node: fx.Node, constants: Mapping[str, torch.Tensor], like: torch.Tensor | None) -> fx.Graph | None:
    """How a random operation's result is made from constants and sizes; None where it takes anything else.

    Args:
        like: what the operation's first argument need only be like, None where its values count.
    """
    recipe, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    if like is not None:
        shape = [size if isinstance(size, int) else _size(recipe, size) for size in like.shape]
        given: Any = {"dtype": like.dtype, "device": like.device}
        copies[node.args[0]] = recipe.call_function(aten.ones.default, (shape,), given)  # type: ignore[index]
    needed, pending = {node}, [node]
    while pending:
        for argument in set(pending.pop().all_input_nodes) - needed - copies.keys():
            if not _is_size(argument):
                if argument.op == "placeholder" and argument.name not in constants:
                    return None
                pending.append(argument)
            needed.add(argument)
    for one in node.graph.nodes:
        if one in needed:
            if _is_size(one):
                copies[one] = _size(recipe, one.meta["val"])
                continue
            copies[one] = recipe.node_copy(one, copies.__getitem__)
            copies[one].meta = {"val": one.meta["val"], "of": one.name}
    return recipe


def _size(recipe: fx.Graph, value: Any) -> fx.Node:
    placeholder = recipe.placeholder("size")
    placeholder.meta = {"val": value, "of": ""}
    return placeholder


def _is_size(node: fx.Node) -> bool:
    return private.first_tensor(node.meta["val"]) is None


def _refusal(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(f"{private.where(node)}: random operation {node.target}: {why}")
