"""Results of calls on tensors without data, made again where the same was called before.

linear([4, 8], [8, 8])    runs: a new [4, 8]            then: empty_strided([4, 8])
transpose([4, 8], 0, 1)   runs: a view of argument 0    then: argument 0 as_strided
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class MadeTensor:
    """A tensor of a result: a view of one of the tensors given, or a new one."""

    source: int | None
    size: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def again(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.source is None:
            return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device="meta")
        return given[self.source].as_strided(self.size, self.strides, self.offset)


@dataclass(frozen=True)
class CallResult:
    """What a call gave, and the most bytes that it had at once meanwhile."""

    made: Sequence[MadeTensor]
    form: pytree.TreeSpec
    most_bytes: int

    def again(self, given: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten([one.again(given) for one in self.made], self.form)


def call_key(target: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """What the result of a call without effects depends on, and the tensors that it is given."""
    given = list[torch.Tensor]()

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        given.append(leaf)
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype

    return (target, fx.node.map_aggregate((args, kwargs), described)), given


def result_of(value: Any, given: Sequence[torch.Tensor], left_bytes: int, most_bytes: int) -> CallResult | None:
    """How to make a call's value again; None where only the call can, or where it left more than its value behind."""
    leaves, form = pytree.tree_flatten(value)
    places, made = [_place(tensor) for tensor in given], list[MadeTensor]()
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            return None
        sources = [index for index, place in enumerate(places) if place == _place(leaf)]
        one = MadeTensor(
            sources[0] if sources else None, leaf.shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype
        )
        same = one.again(given)
        if len(sources) > 1 or same.dtype != leaf.dtype or _num_bytes(same) != _num_bytes(leaf):
            return None
        made.append(one)
    own = {_place(leaf): _num_bytes(leaf) for leaf, one in zip(leaves, made, strict=True) if one.source is None}
    is_all = len(own) == sum(one.source is None for one in made) and sum(own.values()) == left_bytes
    return CallResult(made, form, most_bytes) if is_all else None


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
