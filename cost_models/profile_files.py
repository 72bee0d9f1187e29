"""Profiles as files: JSON, so that reading one runs no code, and every number is checked before it is used.

{"key": {"fingerprint": "5f2c...", "device": "EPYC, 8 threads", "torch": "2.13"}, "memory_bytes": null,
 "entries": [{"name": "unet.mid", "nodes": [...], "samples": [1, 4], "forward_seconds": [...], ...}],
 "speeds": {"moving": 9.1e9, "drawing": [["aten.randn_like.default", 2.1e8]]}}
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

from cost_models.profiled import Entry, Key, Profile, Speeds
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError


def save(profile: Profile, path: Path) -> None:
    """Write all but the base, which is chosen when the file is read."""
    speeds = asdict(profile.speeds) if profile.speeds else None
    entries = [asdict(entry) for entry in profile.entries]
    data = {"key": asdict(profile.key), "memory_bytes": profile.memory_bytes, "entries": entries, "speeds": speeds}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path, base: CostModel) -> Profile:
    """The profile in a file; `base` shares its times out to nodes.

    Raises:
        CompileError: there is no such file, or it is no profile: says why.
    """
    if not path.is_file():
        raise CompileError(f"no profile {path}; fxpipe profile MODEL --out {path} makes it")
    try:
        return _profile(json.loads(path.read_text(), parse_constant=_refuse), base)
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # of JSON, text encoding, or what is in it
        why = f"{type(error).__name__}: {error!s:.200}"
        raise CompileError(f"{path} is no profile ({why}); fxpipe profile MODEL --out {path} makes one") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of seconds")


def _profile(data: Mapping[str, Any], base: CostModel) -> Profile:
    key = Key(**data["key"])
    _require(all(isinstance(value, str) for value in asdict(key).values()), "the key's values are texts", key)
    memory = data["memory_bytes"]
    _require(memory is None or (type(memory) is int and memory > 0), "memory_bytes is positive, or null", memory)
    entries = tuple(map(_entry, data["entries"]))
    twice = [name for name, count in Counter(name for entry in entries for name in entry.nodes).items() if count > 1]
    _require(not twice, "an operation is in one entry", twice)
    return Profile(base, key, entries, _speeds(data["speeds"]), memory)


def _entry(data: Mapping[str, Any]) -> Entry:
    name, *given = (
        data[field.name] if field.default is MISSING else data.get(field.name, ()) for field in fields(Entry)
    )
    entry = Entry(name, *map(tuple, given))
    cut = [seconds for seconds in (entry.input_seconds, entry.weight_seconds) if seconds]
    samples, lists = entry.samples, [entry.forward_seconds, entry.backward_seconds, *cut]
    _require(all(isinstance(text, str) for text in (name, *entry.nodes)), "names are texts", name)
    ascending = all(type(size) is int and size > before for before, size in zip((0, *samples), samples, strict=False))
    _require(bool(samples) and ascending, "samples are positive integers, ascending", name)
    one_each = all(len(of_samples) == len(samples) for of_samples in lists)
    numbers = all(_is_number(value) and value >= 0 for of_samples in lists for value in of_samples)
    _require(one_each and numbers, "seconds: one per size", name)
    return entry


def _speeds(data: Mapping[str, Any] | None) -> Speeds | None:
    if data is None:
        return None
    speeds = Speeds(data["moving"], tuple((str(target), speed) for target, speed in data["drawing"]))
    values = [speeds.moving, *dict(speeds.drawing).values()]
    _require(all(_is_number(value) and value > 0 for value in values), "speeds are positive", values)
    return speeds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{rule}; got {value!r}")
