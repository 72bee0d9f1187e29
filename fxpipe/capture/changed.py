"""What forward puts into its arguments, such as keys and values into a cache: a denoiser's call gives it back there.

cache.store(k, v); return h        ->    Changed(h, {"cache": a cache of k and v})     predicted as further tensors
cache.k is old_k                   ->    Kept("cache.k") in it                         the call's own
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpipe.capture.inputs import is_same
from fxpipe.capture.trees import apart, flatten, has_attributes, placeable, together
from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Kept:
    """In the place of a tensor that was an input before."""

    name: str


@dataclass(frozen=True)
class Changed:
    """What forward returns, and of arguments that are no longer as they were all that they are; `is_put`: whether
    something new is there, not only less or in another order."""

    output: Any
    arguments: Mapping[str, Any]
    is_put: bool


def called(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a call returns; where it has changed what its arguments hold, that too."""
    before, _ = flatten(signature, args, kwargs)
    output = function(*args, **kwargs)
    after, _ = flatten(signature, args, kwargs)
    others = [name for name in {**before, **after} if not _is_kept(name, before, after)]
    if not others:
        return output
    given = _arguments(signature, args, kwargs)
    kept = {id(value): Kept(name) for name, value in before.items() if isinstance(value, torch.Tensor)}

    def marked(value: Any) -> Any:
        return together(pytree.tree_map(lambda leaf: kept.get(id(leaf), leaf), apart(value)))

    held = {(_head(name), id(value)) for name, value in before.items() if isinstance(value, torch.Tensor)}
    is_put = any(name in after and (_head(name), id(after[name])) not in held for name in others)
    return Changed(output, {head: marked(given[head]) for head in sorted(set(map(_head, others)))}, is_put)


def _head(name: str) -> str:
    return name.partition(".")[0]


def _is_kept(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    if name not in before or name not in after:
        return False
    one, other = before[name], after[name]
    return one is other or (not isinstance(one, torch.Tensor) and is_same(one, other))


def put_back(made: Changed, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Have the arguments of a call as they are made."""
    named, _ = flatten(signature, args, kwargs)
    given = _arguments(signature, args, kwargs)
    containers = [one for value in made.arguments for one in _containers(given[value])]
    if len({*map(id, containers)}) < len(containers):
        raise CompileError(
            f"forward changes its inputs {', '.join(made.arguments)}, in which a list, a dict or an object is twice, "
            "as a graph does not know it: give it once"
        )
    for head, value in made.arguments.items():
        _put(given[head], value, named)


def _containers(value: Any) -> Iterator[Any]:
    """All that something can be put into, each as often as it is there."""
    has_fields = has_attributes(value) or (is_dataclass(value) and not isinstance(value, type))
    if isinstance(value, list | dict) or has_fields:
        yield value
    inside = vars(value) if has_fields else value
    if isinstance(inside, list | tuple | dict):
        for one in inside.values() if isinstance(inside, dict) else inside:
            yield from _containers(one)


def _arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that `flatten` gives them."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    names = placeable(signature)
    by_place = {names[at] if at < len(names) else f"args_{at}": value for at, value in enumerate(bound.args)}
    return {**by_place, **bound.kwargs}


def _put(old: Any, new: Any, named: Mapping[str, Any]) -> Any:
    """What is to be there: the old container, with all that the new one has."""
    if isinstance(new, Kept):
        return named[new.name]
    into = old if type(old) is type(new) else new
    if isinstance(new, tuple):
        items = [_put(None, now, named) for now in new]
        return type(new)(*items) if hasattr(new, "_fields") else tuple(items)
    if isinstance(new, list):
        into[:] = [_put(was, now, named) for was, now in zip_longest(into[: len(new)], new)]
    elif isinstance(new, dict):
        _update(into, new, named)
    elif has_attributes(new) or (is_dataclass(new) and not isinstance(new, type)):
        _update(vars(into), vars(new), named)
    else:
        return new
    return into


def _update(old: dict[Any, Any], new: Mapping[Any, Any], named: Mapping[str, Any]) -> None:
    items = {key: _put(old.get(key), now, named) for key, now in new.items()}
    old.clear()
    old.update(items)
