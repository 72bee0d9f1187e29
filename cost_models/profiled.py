"""Seconds as measured: every block and frozen component timed at a few batch sizes, interpolated between.

    block 3       1: 2.1 ms, 4: 6.5 ms     ->   2 samples: 3.6 ms, shared out to its nodes as the roofline would
    frozen vae    1: 0.9 ms, 4: 3.1 ms          so that blocks cut elsewhere have a time too

A profile holds for one graph, device, type and torch; `fxpipe.profiling` makes it from real stage graphs.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from cost_models.roofline import Roofline
from fxpipe.costs import NodeCost, Seconds
from fxpipe.costs.table import CostTable, PartSeconds, SecondsAt, shared_out
from fxpipe.errors import CompileError


@dataclass(frozen=True)
class Key:
    """What a profile holds for; `device` is a processor or a GPU by its name, with torch's number of threads."""

    fingerprint: str
    device: str
    dtype: str
    torch: str


@dataclass(frozen=True)
class Entry:
    """Expected seconds of one block or component at each of `samples`, ascending; no backward: zeros."""

    name: str
    nodes: tuple[str, ...]
    samples: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of adding tensors, counting what is read and written, and of drawing, by operation."""

    moving: float
    drawing: tuple[tuple[str, float], ...] = ()

    def drawing_seconds(self, target: str, num_bytes: int) -> float:
        """Of random numbers made by an operation; nothing where that was not timed."""
        return num_bytes / dict(self.drawing).get(target, float("inf"))


@dataclass(frozen=True)
class Profile(Roofline):
    """A cost model from measurements; single nodes without a graph cost what the roofline says. `speeds` are of what
    rank programs do between stages.

    Raises:
        CompileError: it is asked about another graph, or another torch, than it was made with.
    """

    key: Key = field(default=Key("", "", "", ""))
    entries: tuple[Entry, ...] = ()
    speeds: Speeds | None = None

    def node_seconds(self, graph: fx.Graph, costs: Mapping[str, NodeCost], num_samples: int) -> Seconds:
        """Seconds of every node: those of its entry, in the proportions of the roofline."""
        self._require(graph)
        forward = {name: self.forward_seconds(cost, num_samples) for name, cost in costs.items()}
        backward = {name: self.backward_seconds(cost, num_samples) for name, cost in costs.items()}
        for entry in self.entries:
            _share(forward, entry.nodes, interpolated(entry.samples, entry.forward_seconds, num_samples))
            _share(backward, entry.nodes, interpolated(entry.samples, entry.backward_seconds, num_samples))
        return Seconds(forward, backward)

    def of_table(self, graph: fx.Graph, table: CostTable) -> SecondsAt:
        """The same for all nodes at once; a backward's two parts in the proportions of the roofline."""
        self._require(graph)
        base = super().of_table(graph, table)
        nodes = [np.array([table.position[name] for name in entry.nodes], dtype=np.intp) for entry in self.entries]

        def at(num_samples: int) -> PartSeconds:
            roofline = base(num_samples)
            forward, backward = roofline.forward.copy(), roofline.backward_input + roofline.backward_weight
            for entry, of_entry in zip(self.entries, nodes, strict=True):
                for seconds, measured in ((forward, entry.forward_seconds), (backward, entry.backward_seconds)):
                    total, parts = interpolated(entry.samples, measured, num_samples), seconds[of_entry]
                    seconds[of_entry] = total * (parts / parts.sum() if parts.sum() else 1 / len(parts))
            return PartSeconds(forward, *shared_out(backward, roofline.backward_input, roofline.backward_weight))

        return at

    def _require(self, graph: fx.Graph) -> None:
        now = key_of(graph, torch.device("cpu"))
        require_key(self.key, Key(now.fingerprint, self.key.device, now.dtype, now.torch))

    def save(self, path: Path) -> None:
        """Write the measurements as JSON."""
        data = {"key": asdict(self.key), "entries": [asdict(entry) for entry in self.entries]}
        data |= {"speeds": asdict(self.speeds)} if self.speeds else {}
        path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path, base: Roofline) -> Profile:
    """The profile in a file; `base` shares block times out to nodes.

    Raises:
        CompileError: there is no such file, or it is no profile.
    """
    if not path.is_file():
        raise CompileError(f"no profile {path}; fxpipe profile MODEL --out {path} makes it")
    try:
        data = json.loads(path.read_text())
        entries = tuple(Entry(*(_tuples(entry[f.name]) for f in fields(Entry))) for entry in data["entries"])
        speeds = _speeds(data["speeds"]) if "speeds" in data else None
        return with_measurements(base, Key(**data["key"]), entries, speeds)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CompileError(f"{path} is no profile ({error!r}); fxpipe profile MODEL --out {path} makes one") from None


def with_measurements(base: Roofline, key: Key, entries: tuple[Entry, ...], speeds: Speeds | None = None) -> Profile:
    """The profile of `entries` over a roofline."""
    given = {f.name: getattr(base, f.name) for f in fields(Roofline)}
    return Profile(**given, key=key, entries=entries, speeds=speeds)


def _speeds(data: Mapping[str, Any]) -> Speeds:
    return Speeds(data["moving"], tuple((target, speed) for target, speed in data["drawing"]))


def key_of(graph: fx.Graph, device: torch.device) -> Key:
    """The key of a captured graph on `device`."""
    lines = (f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {_shape(n.meta.get('val'))}" for n in graph.nodes)
    dtypes = {str(n.meta["val"].dtype) for n in graph.find_nodes(op="placeholder") if n.meta["kind"] == "parameter"}
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return Key(digest, device_name(device), ", ".join(sorted(dtypes)), torch.__version__)


def require_key(profile: Key, wanted: Key) -> None:
    """Raise CompileError unless a profile of one key holds for the other; names what differs."""
    words = {"fingerprint": "graph", "device": "device", "dtype": "parameter type", "torch": "torch version"}
    for name, word in words.items():
        found, needed = getattr(profile, name), getattr(wanted, name)
        if found != needed:
            raise CompileError(f"the profile is of another {word}, {found}; here it is {needed}: profile again")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def interpolated(samples: Sequence[int], seconds: Sequence[float], num_samples: int) -> float:
    """Piecewise linear; beyond the ends along the nearest piece, never below zero; from one point: proportional."""
    if len(samples) == 1:
        return seconds[0] * num_samples / samples[0]
    inside = [i for i in range(1, len(samples) - 1) if samples[i] < num_samples]
    at = max(inside, default=0)
    slope = (seconds[at + 1] - seconds[at]) / (samples[at + 1] - samples[at])
    return max(0.0, seconds[at] + slope * (num_samples - samples[at]))


def expected(seconds: Sequence[float]) -> float:
    """Mean without the slowest and the fastest tenth. Times of parts are added up; medians of skewed ones fall short of
    their sum."""
    rest = sorted(seconds)[len(seconds) // 10 : len(seconds) - len(seconds) // 10]
    return statistics.fmean(rest)


def wait_for(device: torch.device) -> None:
    """Until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share(seconds: dict[str, float], nodes: Sequence[str], total: float) -> None:
    weights = [seconds[name] for name in nodes]
    whole = sum(weights)
    for name, weight in zip(nodes, weights, strict=True):
        seconds[name] = total * (weight / whole if whole else 1 / len(nodes))


def _shape(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
