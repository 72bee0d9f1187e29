"""Schedules that were found before, by what decides them: ratios of the stage times, work, placement, lags, memory.

    F 20 20, B 40 40, lag 1    and    F 0.1 0.1, B 0.2 0.2, lag 0.005        one entry

Times are rounded to a thousandth of the longest, so that a profile taken again finds its schedule again. What is told
about an entry is computed for the problem at hand: its makespan by a simulation, its lower bound from the entry's own
times. With every time at least f times as long, nothing is shorter than f times the entry's bound.
"""

import json
import logging
import os
from collections import OrderedDict
from dataclasses import dataclass, fields
from hashlib import sha256
from math import gcd
from pathlib import Path
from typing import Any

from fxpipe.schedule import Schedule
from fxpipe.schedule_check import check
from passes.schedules.problem import Problem, fits

ENVIRONMENT = "FXPIPE_CACHE"
_FORMAT = 1  # of a file, and of the search: a better search is worth a new number
_ROUNDING = 1000
_MOST_ENTRIES = 256
_entries: OrderedDict[str, "Entry"] = OrderedDict()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A schedule, the seconds and lags it was found for, a lower bound on theirs, and what found it."""

    schedule: Schedule
    times: tuple[float, ...]
    lower_bound_seconds: float
    method: str


def key(problem: Problem, budget_seconds: float, seed: int) -> str:
    """What decides the outcome of a search, as text."""
    times = times_of(problem)
    longest = max(times, default=0.0) or 1.0
    limits = problem.memory_limit_bytes
    sizes = problem.activation_bytes if limits is not None else ()
    unit = gcd(*sizes, *(limits or ())) or 1
    parts = {
        "format": _FORMAT,
        "work": [_plain(getattr(problem.work, field.name)) for field in fields(problem.work)],
        "stage_rank": problem.stage_rank,
        "num_ranks": problem.num_ranks,
        "frozen_ranks": problem.frozen_ranks,
        "kinds": sorted(problem.seconds),
        "times": [_rounded(t / longest) for t in times],
        "sizes": [size // unit for size in sizes],
        "limits": None if limits is None else [limit // unit for limit in limits],
        "budget_seconds": budget_seconds,
        "seed": seed,
    }
    return json.dumps(parts)


def times_of(problem: Problem) -> tuple[float, ...]:
    """All seconds of `problem` in one order: of stages and components by kind, and of transfers."""
    work = problem.work
    kinds = (("F", work.edges), ("B", work.grad_edges), ("T", work.frozen_edges))
    lags = [problem.lag(*edge, kind) for kind, edges in kinds for edge in sorted(edges)]
    return (*(float(t) for kind in sorted(problem.seconds) for t in problem.seconds[kind]), *map(float, lags))


def _rounded(share: float) -> int:
    """In thousandths; half a thousandth always to the same side, whatever the last digits."""
    return round(round(share * _ROUNDING, 6) + 1e-4)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def find(name: str, problem: Problem, folder: str | os.PathLike[str] | None) -> Entry | None:
    """The entry of a key, from this process or from a file of `folder`; None where there is none that fits."""
    entry = _entries.get(name)
    if entry is None and folder is not None:
        entry = _read(_path(folder, name), name)
    if entry is None:
        return None
    if check(entry.schedule, problem.work, problem.num_ranks) or not fits(problem, entry.schedule):
        _log.warning("a cached schedule is not one of the problem it was kept for, and is not used: %s", name)
        return None
    _remember(name, entry)
    return entry


def keep(name: str, entry: Entry, folder: str | os.PathLike[str] | None) -> None:
    """Keep an entry in this process, and in a file of `folder` where one is given."""
    _remember(name, entry)
    if folder is None:
        return
    path = _path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {**vars(entry), "schedule": entry.schedule.text(), "key": name}
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(written))
    part.replace(path)  # whole or not at all, whoever else writes it


def bound_seconds(entry: Entry, problem: Problem) -> float:
    """A lower bound on every schedule of `problem`, from that of the entry."""
    pairs = list(zip(times_of(problem), entry.times, strict=True))
    factor = min((now / then for now, then in pairs if then > 0), default=0.0)
    return factor * entry.lower_bound_seconds


def is_scaled(entry: Entry, problem: Problem) -> bool:
    """Whether all times are those of the entry times one factor, up to rounding of floats."""
    pairs = list(zip(times_of(problem), entry.times, strict=True))
    ratios = [now / then for now, then in pairs if then > 0]
    same_zeros = all((now > 0) == (then > 0) for now, then in pairs)
    return same_zeros and max(ratios, default=1.0) <= min(ratios, default=1.0) * (1 + 1e-12)


def clear() -> None:
    """Forget what this process keeps; files stay."""
    _entries.clear()


def _remember(name: str, entry: Entry) -> None:
    _entries[name] = entry
    _entries.move_to_end(name)
    while len(_entries) > _MOST_ENTRIES:
        _entries.popitem(last=False)


def _path(folder: str | os.PathLike[str], name: str) -> Path:
    return Path(folder) / f"schedule-{sha256(name.encode()).hexdigest()[:32]}.json"


def _read(path: Path, name: str) -> Entry | None:
    if not path.exists():
        return None
    try:
        written = json.loads(path.read_text())
        if written["key"] != name:
            raise ValueError("it was kept under another key")
        schedule = Schedule.parse(written["schedule"])
        return Entry(schedule, tuple(written["times"]), float(written["lower_bound_seconds"]), str(written["method"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s is not a cached schedule, and is not used: %s", path, error)
        return None
