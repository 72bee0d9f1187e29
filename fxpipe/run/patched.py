"""A tensor whose patches of rows come one by one: element-wise work on it is done per patch, when one asks for that.

prediction = Patched(patch 0: there, patch 1: on its way)
latents = latents - sigma * prediction        Patched: patch 0 is computed when it is asked for, patch 1 when it has come
latents.quantile(0.995)                       waits for all patches; a dense tensor, as if nothing were patched

So a user's own loop and scheduler run unchanged while patches are on their way: the next step begins with patch 0. What
is not element-wise along the rows waits, and is exact; random draws are made whole, as on one device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_STRUCTURAL = {
    "cat", "split", "split_with_sizes", "chunk", "expand", "unsqueeze", "slice", "select", "clone", "_to_copy",
    "detach", "alias", "squeeze", "unbind", "stack", "permute", "transpose", "unsafe_split", "where",
}  # fmt: skip
"""Beside element-wise operations: those that act on every row alone where their result has the rows in one dimension."""


class Lazy:
    """A tensor that is made when it is first asked for."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], torch.Tensor] | None, value: torch.Tensor | None = None) -> None:
        self._make, self._value = make, value

    @staticmethod
    def there(value: torch.Tensor) -> "Lazy":
        return Lazy(None, value)

    @property
    def is_there(self) -> bool:
        return self._make is None

    def get(self) -> torch.Tensor:
        if self._make is not None:
            self._value, self._make = self._make(), None
        assert self._value is not None
        return self._value


class Patched(torch.Tensor):
    """`parts` one after the other along dimension `along`, `sizes` entries each."""

    along: int
    sizes: tuple[int, ...]
    parts: list[Lazy]

    @staticmethod
    def of(
        parts: Sequence[Lazy], shape: Sequence[int], along: int, sizes: Sequence[int], dtype: torch.dtype,
        device: torch.device,
    ) -> "Patched":  # fmt: skip
        """Args: shape: of all parts together."""
        made = torch.Tensor._make_wrapper_subclass(Patched, tuple(shape), dtype=dtype, device=device)  # type: ignore[attr-defined]
        made.along, made.sizes, made.parts = along, tuple(sizes), list(parts)
        found: Patched = made
        return found

    def part(self, index: int) -> torch.Tensor:
        """One patch; waits for it alone."""
        return self.parts[index].get()

    def settle(self) -> torch.Tensor:
        """All patches, as a dense tensor."""
        return torch.cat([part.get() for part in self.parts], self.along)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        there = sum(part.is_there for part in self.parts)
        return f"Patched({list(self.shape)}, {there} of {len(self.parts)} patches there)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.settle().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settle().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        call = _Call(func, leaves, spec)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return call.on([_like(leaf) if isinstance(leaf, Patched) else leaf for leaf in leaves])
        return call.by_patch() if call.is_local else call.settled()


def _like(value: Patched) -> torch.Tensor:
    """What a random draw reads of a tensor: shape, type and device."""
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


class _Call:
    """One operation on tensors of which some are patched."""

    def __init__(self, func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.func, self.leaves, self.spec = func, leaves, spec
        self.patched = [leaf for leaf in leaves if isinstance(leaf, Patched)]
        self.first = self.patched[0]
        self.pointwise = torch.Tag.pointwise in func.tags

    @property
    def is_local(self) -> bool:
        """Whether every patch may be computed alone: their rows meet, and nothing is written in place."""
        known = self.pointwise or self.func.overloadpacket.__name__ in _STRUCTURAL
        meet = all(p.sizes == self.first.sizes and self._from_end(p) == self._from_end(self.first) for p in self.patched)
        return known and meet and not self.func._schema.is_mutable

    def _from_end(self, value: Patched) -> int:
        return value.dim() - value.along

    def on(self, leaves: list[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    def by_patch(self) -> Any:
        """Patches of the results; dense where these do not have the rows in one dimension as the operands have them."""
        try:
            whole, spec = pytree.tree_flatten(self._sized(None))
            each = [pytree.tree_leaves(self._sized(index)) for index in range(len(self.first.sizes))]
        except (RuntimeError, ValueError, IndexError):  # of a patch alone it is another operation
            return self.settled()
        places = [self._place(value, [of[i] for of in each]) for i, value in enumerate(whole)]
        if any(place is None for place in places):
            return self.settled()
        once = [_Shared(self, index) for index in range(len(self.first.sizes))]
        results = []
        for i, (value, place) in enumerate(zip(whole, places, strict=True)):
            assert place is not None
            parts = [Lazy(lambda shared=shared, i=i: shared.get(i)) for shared in once]  # type: ignore[misc]
            results.append(Patched.of(parts, value.shape, *place, value.dtype, self._device()))
        return pytree.tree_unflatten(results, spec)

    def _device(self) -> torch.device:
        _, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return torch.device(kwargs.get("device") or self.first.device)

    def _place(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[int, list[int]] | None:
        """The dimension of a result that has the rows, and every patch's entries; None where that cannot be told."""
        dims = {dim for part in parts for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]}
        if len(dims) != 1:
            return None
        (dim,) = dims
        sizes = [part.shape[dim] for part in parts]
        same = not self.pointwise or whole.dim() - dim == self._from_end(self.first)
        return (dim, sizes) if sum(sizes) == whole.shape[dim] and same else None

    def _sized(self, index: int | None) -> Any:
        """The operation without data, of one patch or of all."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Patched):
                shape = list(leaf.shape)
                shape[leaf.along] = shape[leaf.along] if index is None else leaf.sizes[index]
                leaf = torch.empty(shape, dtype=leaf.dtype, device="meta")
            elif isinstance(leaf, torch.Tensor):
                leaf = self._rows_of(leaf, index)
                leaf = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            leaves.append(torch.device("meta") if isinstance(leaf, torch.device) else leaf)
        return self.on(leaves)

    def of_patch(self, index: int) -> list[torch.Tensor]:
        """The results of one patch."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Patched):
                leaf = leaf.part(index)
            elif isinstance(leaf, torch.Tensor):
                leaf = self._rows_of(leaf, index)
            leaves.append(leaf)
        return pytree.tree_leaves(self.on(leaves))

    def _rows_of(self, value: torch.Tensor, index: int | None) -> torch.Tensor:
        """Of a dense operand the rows that meet a patch's; all of it where it has one row for all."""
        dim = value.dim() - self._from_end(self.first)
        if index is None or dim < 0 or value.shape[dim] == 1 or value.shape[dim] != self.first.shape[self.first.along]:
            return value
        return value.narrow(dim, sum(self.first.sizes[:index]), self.first.sizes[index])

    def settled(self) -> Any:
        """All patches are waited for."""
        dense = {id(patched): patched.settle() for patched in self.patched}
        result = self.on([dense.get(id(leaf), leaf) for leaf in self.leaves])
        if self.func._schema.is_mutable:
            for patched in self.patched:  # what was written in place is seen
                pieces = dense[id(patched)].split(list(patched.sizes), patched.along)
                patched.parts = [Lazy.there(piece) for piece in pieces]
            written = {id(tensor): patched for patched in self.patched for tensor in [dense[id(patched)]]}
            result = pytree.tree_map(lambda value: written.get(id(value), value), result)
        return result


class _Shared:
    """The results of one patch, computed once for all of them."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call: _Call | None = call
        self._index, self._results = index, list[torch.Tensor]()

    def get(self, result: int) -> torch.Tensor:
        if self._call is not None:
            self._results, self._call = self._call.of_patch(self._index), None
        return self._results[result]


def patches_in(value: Any) -> Iterator[Patched]:
    """The patched tensors in arguments."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Patched))
