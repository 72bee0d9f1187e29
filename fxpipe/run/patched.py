"""A tensor whose patches of rows come one by one: element-wise work on it is done per patch, when one asks for that.

prediction = Patched(patch 0: there, patch 1: on its way)
latents = latents - sigma * prediction        Patched: patch 0 is computed when asked for, patch 1 when it has come
latents.quantile(0.995)                       waits for all patches; a dense tensor, as if nothing were patched

So a user's own loop and scheduler run unchanged while patches are on their way: the next step begins with patch 0. What
is not element-wise along the rows waits, and is exact; random draws are made whole, as on one device. Before anything
is written in place, all that was put off is done, and whatever shares memory with it in eager torch does so here.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.utils import _pytree as pytree

from fxpipe.errors import RunError

_EACH_ROW = {"clone", "_to_copy", "detach", "alias", "expand", "permute", "transpose", "t"}
_BY_DIM = {
    "cat": 0, "stack": 0, "split": 0, "split_with_sizes": 0, "unsafe_split": 0, "chunk": 0, "unbind": 0, "slice": 0,
    "select": None, "unsqueeze": None,
}  # fmt: skip
"""Operations along a dimension, and which where none is named: they act on every row alone if it is not the rows'."""
_DRAWS = {"rand_like", "randn_like", "randint_like"}


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
    source: "tuple[Patched, Callable[[torch.Tensor], torch.Tensor]] | None"
    """Of a view: what it is a view of, and how it is made of that."""
    views: "list[ref[Patched]]"
    dense: torch.Tensor | None
    """All of it, where something shares its memory."""

    @staticmethod
    def of(
        parts: Sequence[Lazy], like: torch.Tensor, along: int, sizes: Sequence[int], device: torch.device
    ) -> "Patched":
        """Args: like: of all parts together the shape, strides and type."""
        layout: dict[str, Any] = {"strides": like.stride(), "dtype": like.dtype, "device": device}
        made: Any = torch.Tensor._make_wrapper_subclass(Patched, like.shape, **layout)
        made.along, made.sizes, made.parts = along, tuple(sizes), list(parts)
        made.source, made.views, made.dense = None, [], None
        found: Patched = made
        return found

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise _changed_as_a_whole(self, "by its .data")

    def part(self, index: int) -> torch.Tensor:
        """One patch; waits for it alone."""
        return self.parts[index].get()

    def part_of(self, index: int, along: int, sizes: Sequence[int]) -> torch.Tensor | None:
        """One patch, of patches of these sizes; None where they are others."""
        return self.part(index) if (self.along, self.sizes) == (along, tuple(sizes)) else None

    def settle(self) -> torch.Tensor:
        """All patches, as a dense tensor."""
        if self.dense is not None:
            return self.dense
        dense = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        for part, piece in zip(self.parts, dense.split(list(self.sizes), self.along), strict=True):
            piece.copy_(part.get())
        return dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        there = sum(part.is_there for part in self.parts)
        return f"Patched({list(self.shape)}, {there} of {len(self.parts)} patches there)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.settle().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settle().__reduce_ex__(protocol)

    def solid(self) -> torch.Tensor:
        """All patches as one tensor whose memory this one, what it is a view of, and all views share from now on."""
        if self.source is not None:
            base = self.source[0].solid()
            if self.dense is None:
                self._become(self.source[1](base))
        elif self.dense is None:
            self._become(self.settle())
        assert self.dense is not None
        return self.dense

    def _become(self, dense: torch.Tensor) -> None:
        self.dense = dense
        self.parts = [Lazy.there(piece) for piece in dense.split(list(self.sizes), self.along)]
        for one in self.views:
            view = one()
            if view is not None and view.source is not None:
                view._become(view.source[1](dense))

    def shared(self) -> torch.Tensor:
        """`solid`, after all that was put off: what reads its memory may write there."""
        _settle_all()
        return self.solid()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach_.default:  # in inference mode, where it does nothing
            return args[0]
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], Patched):
            raise _changed_as_a_whole(args[0], f"by {func.overloadpacket.__name__}")
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        call = _Call(func, leaves, spec)
        if func.overloadpacket.__name__ in _DRAWS:
            return call.on([_like(leaf) if isinstance(leaf, Patched) else leaf for leaf in leaves])
        return call.by_patch() if call.is_local else call.settled()


def _changed_as_a_whole(value: Patched, how: str) -> RunError:
    return RunError(
        f"a tensor {list(value.shape)} whose patches are on their way is given another shape or memory {how}; make a "
        "new one: `x = x.squeeze(0)` instead of `x.squeeze_(0)`"
    )


def _of_memory(name: str) -> Callable[..., Any]:
    """A method that reads a tensor's memory, past all dispatch: of the tensor that has some."""

    def read(self: Patched, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.shared(), name)(*args, **kwargs)

    return read


for _name in ("numpy", "tolist", "data_ptr", "untyped_storage", "__dlpack__"):
    setattr(Patched, _name, _of_memory(_name))


def _like(value: Patched) -> torch.Tensor:
    """What a random draw reads of a tensor: shape, type and device."""
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


_put_off: "WeakSet[_OfPatch]" = WeakSet()


def _settle_all() -> None:
    for one in list(_put_off):
        one.get(0)


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
        meet = all(
            p.sizes == self.first.sizes and self._from_end(p) == self._from_end(self.first) for p in self.patched
        )
        return meet and not self.func._schema.is_mutable and (self.pointwise or self._is_by_row())

    def _is_by_row(self) -> bool:
        name = self.func.overloadpacket.__name__
        if name not in _BY_DIM:
            return name in _EACH_ROW
        arguments = [argument.name for argument in self.func._schema.arguments]
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        dim, along = given.get("dim", _BY_DIM[name]), self.first.along
        if name in ("unsqueeze", "stack"):  # it makes a dimension, and takes none
            return True
        return dim is not None and dim % self.first.dim() != along

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
            places = [self._place(value, [of[i] for of in each]) for i, value in enumerate(whole)]
        except (RuntimeError, ValueError, IndexError):  # of a patch alone it is another operation
            return self.settled()
        once = [_OfPatch(self, index) for index in range(len(self.first.sizes))]
        results = []
        for i, (value, place) in enumerate(zip(whole, places, strict=True)):
            if place is None:
                return self.settled()
            parts = [Lazy(lambda one=one, i=i: one.get(i)) for one in once]  # type: ignore[misc]
            results.append(Patched.of(parts, value, *place, self._device()))
        for i, result in enumerate(results if self.func.is_view else ()):
            result.source = self.first, lambda dense, i=i: pytree.tree_leaves(self._again(dense))[i]
            self.first.views.append(ref(result))
        if all(part.is_there for patched in self.patched for part in patched.parts):
            for one in once:
                one.get(0)
        elif not self.func.is_view:
            self.leaves = [*map(_as_now, self.leaves)]
        _put_off.update(once)
        return pytree.tree_unflatten(results, spec)

    def _again(self, dense: torch.Tensor) -> Any:
        """A view, of another tensor."""
        return self.on([dense if leaf is self.first else leaf for leaf in self.leaves])

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
                leaf = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta").narrow(
                    leaf.along, 0, leaf.shape[leaf.along] if index is None else leaf.sizes[index]
                )
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
        """All patches are waited for. What shares memory with the result, or is written, shares it."""
        shares = self.func.is_view or self.func._schema.is_mutable
        if shares:
            _settle_all()
        dense = {id(patched): patched.solid() if shares else patched.settle() for patched in self.patched}
        result = self.on([dense.get(id(leaf), leaf) for leaf in self.leaves])
        written = {id(dense[id(patched)]): patched for patched in self.patched}
        return pytree.tree_map(lambda value: written.get(id(value), value), result)


def _as_now(value: Any) -> Any:
    """An operand whose memory others may write before it is read."""
    if isinstance(value, Patched):
        if value.dense is None:
            return value
        parts = map(Lazy.there, value.dense.clone().split(list(value.sizes), value.along))
        return Patched.of([*parts], value, value.along, value.sizes, value.device)
    return value.clone() if isinstance(value, torch.Tensor) else value


class _OfPatch:
    """What an operation makes of one patch, computed once for all its results."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call: _Call | None = call
        self._index, self._results = index, list[torch.Tensor]()

    def get(self, result: int) -> torch.Tensor:
        if self._call is not None:
            self._results, self._call = self._call.of_patch(self._index), None
        return self._results[result]


def finished(result: Any) -> Any:
    """What a pipeline returns, its patched tensors dense: a tensor, a tuple, or an object whose fields are set."""
    if isinstance(result, tuple):
        return tuple(map(settled, result))
    for field in fields(result) if is_dataclass(result) else ():
        value = getattr(result, field.name)
        if isinstance(value, Patched):
            setattr(result, field.name, value.settle())
    return result.settle() if isinstance(result, Patched) else result


def settled(value: Any) -> Any:
    """The same, its patched tensors dense."""
    return pytree.tree_map(lambda leaf: leaf.settle() if isinstance(leaf, Patched) else leaf, value)
