"""Nested values as JSON, with their tensors apart.

    {"best": 0.5, "betas": (0.9, 0.95), "average": tensor}
        ->  {"mapping": [["best", 0.5], ["betas", {"tuple": [0.9, 0.95]}], ["average", {"tensor": "extra.average"}]]}

What is neither is refused by name.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fxpipe.errors import RunError

Keep = Callable[[str, str, torch.Tensor], str]
"""Takes a tensor by a proposed key and the name it has in the mapping or list that holds it; the key it is kept by."""
Names = Callable[[list[Any], list[str]], list[str]]
"""Names of the items of a list, or of a mapping, for what they are called: numbers, or keys."""


def numbered(items: list[Any]) -> list[str]:
    return [str(number) for number in range(len(items))]


def as_called(items: list[Any], called: list[str]) -> list[str]:
    return called


def encode(value: Any, key: str, keep: Keep, names: Names = as_called, name: str = "") -> Any:
    """What `json.dumps` takes; `key` says where the value is.

    Raises:
        RunError: a value that is no number, string, tensor, array, or list, tuple or mapping of such.
    """

    def each(items: list[Any], called: list[str]) -> list[Any]:
        pairs = zip(items, called, strict=True)
        return [encode(item, f"{key}.{of_item}", keep, names, of_item) for item, of_item in pairs]

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return {"tensor": keep(key, name, value)}
    if isinstance(value, np.ndarray):
        return {"array": keep(key, name, torch.from_numpy(value.copy()))}
    if isinstance(value, list):
        return each(value, names(value, numbered(value)))
    if isinstance(value, tuple):
        return {"tuple": each(list(value), numbered(list(value)))}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "mapping"
        keys = [encode(one, f"{key}, a key", keep) for one in value]
        items = each(list(value.values()), names(list(value.values()), [str(one) for one in value]))
        return {kind: [list(pair) for pair in zip(keys, items, strict=True)]}
    raise RunError(
        f"{key} is a {type(value).__name__}, which is not saved: give numbers, strings, tensors, and lists, tuples and "
        "mappings of them"
    )


def decode(tree: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """The value that was encoded; `read` gives the tensor that is kept by a key."""
    if isinstance(tree, list):
        return [decode(item, read) for item in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, held)] = tree.items()
    if kind in ("tensor", "array"):
        return read(held) if kind == "tensor" else read(held).numpy()
    items = decode(held, read)
    return tuple(items) if kind == "tuple" else Counter(_pairs(items)) if kind == "counter" else _pairs(items)


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return {key: value for key, value in items}


def tensor_keys(tree: Any) -> list[str]:
    """By which keys the tensors of a tree are kept."""
    found: list[str] = []
    decode(tree, lambda key: found.append(key) or torch.empty(0))  # type: ignore[func-returns-value]
    return found
