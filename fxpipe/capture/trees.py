"""Trees of arguments: a call's leaves by name, and the call again from them.

    forward(batch, scale=2.0)         ->   batch.x, batch.text.ids, scale
    {"text": {"ids": i}, "x": x}           in the order of the compiled call, whatever the order of a dict's keys

Dataclasses, mappings and objects that are all that their attributes say are nodes of the tree; torch's own registry of
such classes, which is the process's, is left as it is.
"""

import enum
import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpipe.errors import CompileError


@dataclass(frozen=True)
class _Fields:
    """A dataclass, a mapping that is no dict (of tokenizers, say), or an object (a cache, say), taken apart."""

    kind: type
    values: Mapping[str, Any]

    def build(self) -> Any:
        values = {name: together(value) for name, value in self.values.items()}
        make: Any = self.kind
        if not is_dataclass(self.kind):
            if issubclass(self.kind, Mapping):
                return make(values)
            made = object.__new__(self.kind)
            vars(made).update(values)
            return made
        given = {f.name for f in fields(self.kind) if f.init}
        made = make(**{name: value for name, value in values.items() if name in given})
        for name in values.keys() - given:
            object.__setattr__(made, name, values[name])
        return made


def _children(node: _Fields) -> tuple[list[Any], Any]:
    return list(node.values.values()), (node.kind, tuple(node.values))


def _children_by_key(node: _Fields) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.MappingKey(name), value) for name, value in node.values.items()], (node.kind, tuple(node.values))


def _from_children(values: Iterable[Any], context: Any) -> _Fields:
    return _Fields(context[0], dict(zip(context[1], values, strict=True)))


pytree.register_pytree_node(_Fields, _children, _from_children, flatten_with_keys_fn=_children_by_key)


def apart(value: Any, seen: set[int] | None = None) -> Any:
    """`value` with dataclasses, mappings and objects that torch does not know taken apart; an object that is there
    twice, or in itself, is not."""
    known = set[int]() if seen is None else seen

    def leaf(one: Any) -> Any:
        if isinstance(one, Mapping) and not is_dataclass(one):
            return _Fields(type(one), {key: apart(inside, known) for key, inside in one.items()})
        if is_dataclass(one) and not isinstance(one, type):
            return _Fields(type(one), {f.name: apart(getattr(one, f.name), known) for f in fields(one)})
        if not has_attributes(one) or id(one) in known:
            return one
        known.add(id(one))
        return _Fields(type(one), {name: apart(inside, known) for name, inside in vars(one).items()})

    return pytree.tree_map(leaf, value)


def has_attributes(one: object) -> bool:
    """Whether an object is all that its attributes say: of a plain class, which has no way of its own to copy one."""
    kind = type(one)
    if callable(one) or isinstance(one, _WHOLE) or not hasattr(one, "__dict__"):
        return False
    own = kind.__new__, kind.__reduce__, kind.__reduce_ex__
    plain = own == (object.__new__, object.__reduce__, object.__reduce_ex__)
    return plain and not hasattr(kind, "__slots__") and not hasattr(kind, "__setstate__")


_WHOLE = torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | enum.Enum  # sizes know their whole trace


def together(value: Any) -> Any:
    def node(one: Any) -> bool:
        return isinstance(one, _Fields)

    return pytree.tree_map(lambda one: one.build() if node(one) else one, value, is_leaf=node)


def flatten(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], like: pytree.TreeSpec | None = None
) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """A call's leaves by name, and its tree; keys of dicts are put in the order of `like` where they are the same."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CompileError(f"inputs do not fit the model's forward{signature}: {error}") from None
    bound.apply_defaults()
    call = apart((tuple(bound.args), dict(bound.kwargs)))
    if like is not None:
        call = _ordered(call, like)
    paths, tree = pytree.tree_flatten_with_path(call)
    names = [_leaf_name(path, placeable(signature)) for path, _ in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CompileError(f"two inputs have the name {twice[0]}; rename a key")
    return dict(zip(names, (value for _, value in paths), strict=True)), tree


def placeable(signature: inspect.Signature) -> list[str]:
    """The parameters that can be given by place, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def unflatten(values: Iterable[Any], tree: pytree.TreeSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of a call from its leaves."""
    args, kwargs = together(pytree.tree_unflatten(values, tree))
    return tuple(args), dict(kwargs)


def _ordered(value: Any, like: pytree.TreeSpec) -> Any:
    if like.is_leaf() or pytree.tree_structure(value).is_leaf():
        return value
    if type(value) is like.type and isinstance(value, dict | _Fields):
        value = _in_order(value, like.context[1] if like.type in (defaultdict, _Fields) else like.context)
    inside, tree = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
    if tree.num_children != like.num_children:
        return value
    return pytree.tree_unflatten([_ordered(*pair) for pair in zip(inside, like.children(), strict=True)], tree)


def _in_order(value: Any, keys: Sequence[Any]) -> Any:
    """A dict, or what is taken apart, with these keys in this order; as it is where it has others."""
    entries = value.values if isinstance(value, _Fields) else value
    if entries.keys() != set(keys):
        return value
    ordered = {key: entries[key] for key in keys}
    if isinstance(value, _Fields):
        return _Fields(value.kind, ordered)
    made = value.copy()
    made.clear()
    made.update(ordered)
    return made


def _leaf_name(path: tuple[Any, ...], positional: list[str]) -> str:
    in_kwargs = path[0].idx == 1
    head = path[1]
    if in_kwargs:
        parts = [str(head.key)]
    else:
        parts = [positional[head.idx] if head.idx < len(positional) else f"args_{head.idx}"]
    return ".".join([*parts, *map(_key_name, path[2:])])


def _key_name(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def named_leaves(value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """A value's leaves, each with its path; of classes whose keys torch does not know, by their places."""
    try:
        paths, _ = pytree.tree_flatten_with_path(apart(value))
    except ValueError:
        return [((str(place),), leaf) for place, leaf in enumerate(pytree.tree_leaves(apart(value)))]
    return [(tuple(map(_key_name, path)), leaf) for path, leaf in paths]


@dataclass(frozen=True)
class Returned:
    """What a forward returns beside its prediction: a tensor alone, a tuple of one, a dataclass, ...; or several
    tensors, which are one prediction. Those of one shape, as of a list of samples, are stacked behind the batch; others
    are packed, as image and audio are in one sequence: a sample's entries of each, one after the other. Then `shapes`
    and `dtypes` are theirs, the shapes without the batch."""

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    @staticmethod
    def of(output: Any) -> "Returned":
        """Raises CompileError where there is no tensor, or several that are no one prediction."""
        leaves, tree = pytree.tree_flatten(apart(output))
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        first = next(iter(tensors.values()), None)
        plain = tuple(None if place in tensors else leaf for place, leaf in enumerate(leaves))
        if first is not None and all((one.shape, one.dtype) == (first.shape, first.dtype) for one in tensors.values()):
            return Returned(plain, tree, (*tensors,))
        if first is None or not all(_may_be_packed(first, one) for one in tensors.values()):
            raise CompileError(
                f"forward returns {len(tensors)} tensors in a {type(output).__name__}{_shapes(tensors.values())}; a "
                "sampler needs one, the prediction, or several of one shape, or of real numbers for as many samples "
                "each: wrap the model in a module that returns that"
            )
        shapes, dtypes = zip(*((tuple(one.shape[1:]), one.dtype) for one in tensors.values()), strict=True)
        return Returned(plain, tree, (*tensors,), shapes, dtypes)

    def tensor(self, output: Any) -> torch.Tensor:
        """The prediction in an output like this."""
        leaves = pytree.tree_leaves(apart(output))
        found: list[torch.Tensor] = [leaves[place] for place in self.places]
        if self.shapes:
            return torch.cat([one.reshape(one.shape[0], math.prod(one.shape[1:])) for one in found], 1)
        return found[0] if len(found) == 1 else torch.stack(found, min(1, found[0].ndim))

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors that this prediction is."""
        if not self.shapes:
            return [tensor] if len(self.places) == 1 else tensor.unbind(min(1, tensor.ndim - 1))
        pieces = zip(tensor.split([*map(math.prod, self.shapes)], 1), self.shapes, self.dtypes, strict=True)
        return [piece.reshape(len(tensor), *shape).to(dtype) for piece, shape, dtype in pieces]

    def rebuilt(self, tensor: torch.Tensor) -> Any:
        """The output that has this prediction."""
        leaves = list(self.leaves)
        for place, part in zip(self.places, self.parts(tensor), strict=True):
            leaves[place] = part
        return together(pytree.tree_unflatten(leaves, self.tree))


def _may_be_packed(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have a batch, the same one, sizes behind it that are numbers, and a type that has room for both."""
    if not first.ndim or not other.ndim or first.shape[0] != other.shape[0]:
        return False
    if not all(type(size) is int for size in other.shape[1:]):
        return False
    return first.dtype == other.dtype or (first.is_floating_point() and other.is_floating_point())


def _shapes(tensors: Iterable[torch.Tensor]) -> str:
    listed = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return f" ({listed})" if listed else ""
