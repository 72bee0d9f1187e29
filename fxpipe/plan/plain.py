"""Frozen dataclasses of plain data, as JSON holds it: people edit such files, so every value is held against its type.

{"boundaries": [0, 2, 4], ...}      Staged(boundaries=(0, 2, 4), ...)
{"boundaries": [0, "2", 4], ...}    boundaries[1] is '2'; give an integer
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fxpipe.errors import CompileError

T = TypeVar("T")
Readers = Mapping[Any, Callable[[Any, str], Any]]
Writers = Mapping[type, Callable[[Any], Any]]
"""How values of some types are read, which are found where the text says, and written."""

_WORDS: Mapping[Any, str] = {
    int: "an integer", float: "a number", str: "a text", bool: "true or false", tuple: "a list",
    Mapping: "values by name",
}  # fmt: skip


def made_of(kind: type[T], data: object, readers: Readers, where: str = "") -> T:
    """The dataclass of `data`, which has its fields by name; `where` that was found, in messages.

    Raises:
        CompileError: a field is missing, unknown, or of another type.
    """
    if not isinstance(data, Mapping):
        raise CompileError(f"{where or 'it'} is {data!r}; give values by name")
    kinds, own = get_type_hints(kind), fields(kind)  # type: ignore[arg-type]
    prefix = f"{where}." * bool(where)
    for name in (f.name for f in own if f.default is MISSING and f.default_factory is MISSING):
        if name not in data:
            raise CompileError(f"{prefix}{name} is missing")
    if unknown := data.keys() - {f.name for f in own}:
        raise CompileError(f"{prefix}{min(map(str, unknown))} is nothing it has; leave it out")
    return kind(**{name: value_of(kinds[name], value, readers, f"{prefix}{name}") for name, value in data.items()})


def value_of(kind: Any, data: Any, readers: Readers, where: str) -> Any:
    """A value of any type that fields have, as `made_of`."""
    origin, of = get_origin(kind), get_args(kind)
    if kind in readers:
        return readers[kind](data, where)
    if origin is UnionType:  # of one type and None
        return None if data is None else value_of(next(k for k in of if k is not NoneType), data, readers, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return made_of(kind, data, readers, where)
    if origin is tuple and isinstance(data, list) and (of[1:] == (...,) or len(of) == len(data)):
        kinds = enumerate(of[:1] * len(data) if of[1:] == (...,) else of)
        return tuple(value_of(one, data[i], readers, f"{where}[{i}]") for i, one in kinds)
    if origin is Mapping and isinstance(data, Mapping):
        return {name: value_of(of[1], value, readers, f"{where}.{name}") for name, value in data.items()}
    if kind is float and type(data) in (int, float) and isfinite(data):
        return float(data)
    if data in of if origin is Literal else type(data) is kind and kind is not float:
        return data
    wanted = " or ".join(map(repr, of)) if origin is Literal else _WORDS[origin or kind]
    count = f" of {len(of)}" * (origin is tuple and of[1:] != (...,))
    raise CompileError(f"{where} is {data!r}; give {wanted}{count}")


def plain_of(value: Any, writers: Writers) -> Any:
    """The plain data of a value, which `value_of` reads."""
    for kind, write in writers.items():
        if isinstance(value, kind):
            return write(value)
    if is_dataclass(value):
        return {f.name: plain_of(getattr(value, f.name), writers) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain_of(of, writers) for name, of in value.items()}
    return [plain_of(of, writers) for of in value] if isinstance(value, tuple) else value
