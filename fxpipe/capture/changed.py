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
from fxpipe.capture.trees import apart, flatten, has_attributes, together
from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Kept:
    """In the place of a tensor that was an input before."""

    name: str


@dataclass(frozen=True)
class Changed:
    """What forward returns, and of arguments that have something new then all that they are."""

    output: Any
    arguments: Mapping[str, Any]


def called(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a call returns; where it has put something into its arguments, that too. What it only takes out of them it
    takes out of its own."""
    before, _ = flatten(signature, args, kwargs)
    output = function(*args, **kwargs)
    after, _ = flatten(signature, args, kwargs)
    held = {(name.partition(".")[0], id(value)) for name, value in before.items()}

    def is_new(name: str, value: Any) -> bool:
        if name in before and before[name] is not value and not isinstance(value, torch.Tensor):
            return not is_same(before[name], value)
        return (name.partition(".")[0], id(value)) not in held

    new = sorted({name.partition(".")[0] for name, value in after.items() if is_new(name, value)})
    if not new:
        return output
    given = _arguments(signature, args, kwargs)
    kept = {id(value): Kept(name) for name, value in before.items() if isinstance(value, torch.Tensor)}

    def marked(value: Any) -> Any:
        return together(pytree.tree_map(lambda leaf: kept.get(id(leaf), leaf), apart(value)))

    return Changed(output, {head: marked(given[head]) for head in new})


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
    """By name, those that have no parameter of their own too."""
    bound = signature.bind(*args, **kwargs).arguments
    rest = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return {**bound, **bound.get("".join(rest), {})}


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
