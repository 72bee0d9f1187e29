"""An operation of a rank's program as hashable data: what it takes, where it is timed or its kernels are counted.

%y = aten.conv2d(%x, %w, padding=1)    ->    Operation(aten.conv2d, (Like([2, 64, 8, 8], ...), Like(...), 1), ...)

Nodes of equal operations take equally long, so repeated layers are timed once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree


class Like(NamedTuple):
    """Shape, strides and type of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> "Like":
        return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def made_up(self, device: torch.device) -> torch.Tensor:
        """Such a tensor of small positive numbers: no infinities, integers that are valid as indices, masks that let
        all through."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        if device.type == "meta":
            return made
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return made.uniform_(0.01, 0.11)
        return made.fill_(self.dtype == torch.bool)


class Operation(NamedTuple):
    """A function and its arguments, flat, with a `Like` for every tensor."""

    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> "Operation":
        """With these arguments, tensors on any device."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        likes = (Like.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return Operation(target, tuple(likes), spec)

    @staticmethod
    def of_node(node: fx.Node) -> "Operation | None":
        """By the values in `meta["val"]`; None where one of its operands has none there, or is no tensor."""
        values = {operand: operand.meta.get("val") for operand in node.all_input_nodes}
        if not callable(node.target) or not all(isinstance(value, torch.Tensor) for value in values.values()):
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda operand: values[operand])
        return Operation.of(node.target, *args, **kwargs)

    def bound(self, device: torch.device) -> Callable[[], Any]:
        """Ready to be run on made-up tensors."""
        placed = [device if isinstance(leaf, torch.device) else leaf for leaf in self.leaves]
        leaves = [leaf.made_up(device) if isinstance(leaf, Like) else leaf for leaf in placed]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return lambda: self.target(*args, **kwargs)
